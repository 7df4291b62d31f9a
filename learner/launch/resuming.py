"""`--resume RUN_DIR`: the configuration that a run goes on with."""

from pathlib import Path

from configs.loading import load
from configs.schema import Config
from learner import ledger
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
    lines, wanted = ledger.read(run_dir), config.learner.total_steps
    done = int(lines[-1]["step"]) if lines else 0
    if wanted < done:
        raise PreflightError(
            f"--resume: {run_dir} has made {done} steps, learner.total_steps is {wanted}; give at least {done} with"
            " --steps, or leave it out"
        )
    return config
