"""Campaigns of injected faults as commands: `python -m scripts.chaos ...`."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tests.support.forking import Zygote
from tests.support.runs import ROOT, environment


def run_campaign(
    *words: str, code: int = 0, cwd: Path = ROOT, timeout: float = 380.0, zygote: Zygote | None = None
) -> tuple[dict[str, Any], str]:
    """(the last line, all that was printed); fails unless the command ends with this exit code.

    With a zygote the command and the programs of its run are forked.
    """
    command = [sys.executable, "-m", "scripts.chaos", *words]
    if zygote is not None:
        with NamedTemporaryFile() as output:
            started = zygote.start(command, output=Path(output.name), env=environment(), cwd=cwd)
            try:
                ended = started.wait(timeout)
            finally:
                started.kill()
            said = Path(output.name).read_text()
        assert ended == code, said[-8000:]
        return json.loads(next(line for line in reversed(said.splitlines()) if line.startswith("{"))), said
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment())
    assert done.returncode == code, done.stdout[-6000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout
