"""`--resume RUN_DIR`: the configuration that a run goes on with."""

import json
from pathlib import Path

from configs.loading import load
from configs.schema import Config
from learner.launch.preflight import PreflightError


def configuration(run_dir: Path, overrides: list[str]) -> Config:
    """The run's own configuration, replay's port included: rollout servers elsewhere look for it there.

    Raises:
        PreflightError: the folder is no run, or the run is past the steps that it shall have.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise PreflightError(f"--resume: {path} is missing; name the folder of a run, such as runs/quickstart")
    folder = run_dir.resolve()
    config = load(path, [f"run.name={folder.name}", f"run.dir={folder.parent}", *overrides])
    done, wanted = steps_done(run_dir), config.learner.total_steps
    if wanted < done:
        raise PreflightError(
            f"--resume: {run_dir} has made {done} steps, learner.total_steps is {wanted}; give at least {done} with"
            " --steps, or leave it out"
        )
    return config


def steps_done(run_dir: Path) -> int:
    """The step that the run trained last; 0 before the first."""
    ledger = run_dir / "ledger.jsonl"
    lines = ledger.read_text(encoding="utf-8").splitlines(keepends=True) if ledger.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return int(json.loads(whole[-1])["step"]) if whole else 0
