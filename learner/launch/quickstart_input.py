"""Makes the quick start's model and prompts where they are missing, for whichever process needs them first."""

import subprocess
import sys
from pathlib import Path

from configs.base import ConfigError
from configs.loading import QUICKSTART, find
from configs.schema import Config
from learner.launch.terminal import say


def is_missing(config: Config, source: str) -> bool:
    """Whether `source` is the quick start's preset and its input is not there, so that it can be made."""
    model, data = Path(config.model.path), Path(config.data.train)
    if find(source) != find(QUICKSTART) or data.parent != model.parent:
        return False
    return not ((model / "config.json").exists() and data.exists())


def make_if_missing(config: Config, source: str) -> bool:
    """Run learner.examples.sort6 where its output is missing; returns whether it was made now.

    Several processes may come at once: the script moves its result into place whole, and the first one counts.

    Raises:
        ConfigError: the script failed.
    """
    if not is_missing(config, source):
        return False
    folder = Path(config.model.path).parent
    say(f"making the quick start's model and prompts in {folder} (once, about 10 s)")
    command = [sys.executable, "-m", "learner.examples.sort6", "--out", str(folder), "--seed", str(config.run.seed)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise ConfigError(f"python -m learner.examples.sort6 failed: {made.stderr.strip()[-500:]}")
    return True
