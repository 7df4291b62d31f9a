"""The quick start's model and prompts, made where they are missing."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from configs.errors import InputMissing
from configs.loading import QUICKSTART, find, load
from configs.schema import Config
from slipstream.launch.terminal import say
from slipstream.runtime import packages

EXAMPLES = Path(__file__).parents[2]
"""What has examples/: a clone; a wheel brings packages alone."""
INPUT_S = 600.0
"""How long the quick start's input may take, which takes half a minute on a busy machine."""


def input_is_missing(config: Config, source: str) -> bool:
    """Whether `source` is the quick start's preset and its input is not there, so that it can be made.

    With prompts of the user's own only the model is missing.
    """
    if find(source) != find(QUICKSTART):
        return False
    model, train = Path(config.model.path), config.data.train
    needed = [model / "config.json"]
    if isinstance(train, str) and Path(train).parent == model.parent:
        needed.append(Path(train))
    elif config.model.path != load(QUICKSTART).model.path:
        return False
    return not all(path.exists() for path in needed)


def make_input(config: Config, source: str) -> bool:
    """Run examples.sort6 where its output is missing; returns whether it was made now.

    Several processes may come at once: the script moves its result into place whole, and the first one counts.

    Raises:
        ConfigError: the script failed, or took more than INPUT_S.
    """
    if not input_is_missing(config, source):
        return False
    folder = Path(config.model.path).parent
    say(f"making the quick start's model and prompts in {folder} (once, about 10 s)")
    if not (EXAMPLES / "examples" / "sort6.py").exists():
        raise InputMissing(f"model.path: no folder {config.model.path!r}; examples/sort6.py of a clone makes it")
    command = [sys.executable, "-m", "examples.sort6", "--out", str(folder), "--seed", str(config.run.seed)]
    environment = os.environ | packages.environment()  # the examples lie beside our packages
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INPUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise InputMissing(
            f"model.path: {folder} was not ready after {INPUT_S:g} s; see what holds up {shlex.join(command)}"
        ) from error
    if made.returncode != 0:
        raise InputMissing(f"python -m examples.sort6 failed: {made.stderr.strip()[-500:]}")
    return True
