"""`--resume RUN_DIR` and `--replay RUN_DIR`: going on with an earlier run, or training again what its journal holds.

A playback needs no engine; it runs beside the original, as long as its journal, and compares every digest.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from configs.base import ConfigError
from configs.loading import load, read_yaml
from configs.schema import Config
from learner import ledger
from learner.launch.preflight import with_free_name
from replay.journal import JournalReader

BEFORE: dict[str, Any] = {"learner.share_prefixes": False}
"""What a run did whose folder is older than a key, where its default would train other bits."""


def resumed(run_dir: Path, overrides: list[str]) -> Config:
    """The run's own configuration, replay's port included: rollout servers elsewhere look for it there.

    Raises:
        ConfigError: the folder is no run, or the run is past the steps that it shall have.
    """
    path, folder = _config_file("--resume", run_dir), run_dir.resolve()
    as_it_was = [f"run.name={folder.name}", f"run.dir={folder.parent}", *_as_it_was(path)]
    config = load(path, [*as_it_was, *overrides])
    lines, wanted = ledger.read(run_dir), config.learner.total_steps
    done = int(lines[-1]["step"]) if lines else 0
    if wanted < done:
        raise ConfigError(
            f"--resume: {run_dir} has made {done} steps, learner.total_steps is {wanted}; give at least {done} with"
            " --steps, or leave it out"
        )
    return config


def played_back(run_dir: Path, overrides: list[str]) -> Config:
    """The configuration of a playback.

    Raises:
        ConfigError: the folder is no run with a journal.
        JournalError: the journal is damaged.
    """
    path, folder = _config_file("--replay", run_dir), run_dir.resolve()
    steps = _last_step(run_dir)
    if steps == 0:
        raise ConfigError(f"--replay: {run_dir}/journal holds no step; name the folder of a run that has trained")
    fixed = {
        "run.name": f"{folder.name}-replay",
        "run.dir": folder.parent,
        "learner.total_steps": steps,
        "placement.local_rollouts": "false",
        "evaluation.every_steps": 0,
        "network.replay_port": 0,
    }
    settings = [*_as_it_was(path), *(f"{key}={value}" for key, value in fixed.items())]
    return with_free_name(load(path, [*settings, *overrides]))


def _config_file(option: str, run_dir: Path) -> Path:
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{option}: {path} is missing; name the folder of a run, such as runs/quickstart")
    return path


def _as_it_was(path: Path) -> list[str]:
    """Settings that keep an old run's arithmetic; none for a file that `load` will refuse."""
    try:
        tree = read_yaml(path.read_bytes())
    except yaml.YAMLError:
        return []
    settings = []
    for key, value in BEFORE.items():
        name, _, leaf = key.partition(".")
        section = tree.get(name) if isinstance(tree, dict) else None
        if isinstance(section, dict) and leaf not in section:
            settings.append(f"{key}={json.dumps(value)}")
    return settings


def _last_step(run_dir: Path) -> int:
    """The last committed step of the surviving line of policies; 0 for none. Raises JournalError."""
    steps: set[int] = set()
    for record in JournalReader(run_dir / "journal").records():
        if record.kind == "diverged":
            steps = {step for step in steps if step <= record.fields["step"]}
        elif record.kind == "snapshot":
            steps |= {step for step, digest, _ in record.fields["line"] if digest}
        elif record.kind == "commit":
            steps.add(record.fields["step"])
    return max(steps, default=0)


def report(config: Config, code: int) -> int:
    """Print, as JSON, how many digests equal the journal's; exit code 0 only if every one does."""
    lines = ledger.read(config.run_dir)
    different = [line["step"] for line in lines if line["digest"] != line.get("expected")]
    compared = {
        "steps": len(lines),
        "equal": len(lines) - len(different),
        "first_different": different[0] if different else None,
        "last_digest": lines[-1]["digest"] if lines else None,
    }
    sys.stdout.write(json.dumps(compared) + "\n")
    sys.stdout.flush()
    all_equal = compared["equal"] == compared["steps"] == config.learner.total_steps
    return code if code or all_equal else 1
