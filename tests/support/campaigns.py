"""Campaigns of injected faults as commands: `python -m scripts.chaos ...`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.runs import ROOT, environment


def run_campaign(*words: str, code: int = 0, cwd: Path = ROOT, timeout: float = 380.0) -> tuple[dict[str, Any], str]:
    """(the last line, all that was printed); fails unless the command ends with this exit code."""
    command = [sys.executable, "-m", "scripts.chaos", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment())
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout
