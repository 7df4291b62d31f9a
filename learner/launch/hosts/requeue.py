"""Whether a start of a job begins its run or resumes it: the first learner node decides, the others read it.

A scheduler starts a preempted job again: Slurm requeues it, Kubernetes recreates its pods. Such a job gives its run a
name that no other job has, so a folder of that name was made by an earlier start of the same job.
"""

import json
from collections.abc import Callable
from pathlib import Path

STARTED = "launch/start.json"
"""Written before replay starts, so a node that replay answers reads what this start decided."""


def can_resume(run_dir: Path) -> bool:
    """Whether a run folder has its configuration and a journal or a complete checkpoint."""
    kept = ("journal/*.seg", "checkpoints/step_*/COMPLETE")
    return (run_dir / "config.yaml").is_file() and any(any(run_dir.glob(pattern)) for pattern in kept)


def decide(run_dir: Path, say: Callable[[str], object]) -> bool:
    """Whether this start of a job resumes the job's run folder; says which, and why.

    A start that ended before replay opened its journal leaves nothing but config.yaml: it is removed, and the run
    begins under its own name.
    """
    if can_resume(run_dir):
        say(f"{run_dir} was begun by an earlier start of this job: resumes it from its journal and newest checkpoint")
        return True
    (run_dir / "config.yaml").unlink(missing_ok=True)
    say(f"{run_dir} has no journal and no complete checkpoint: begins the run")
    return False


def write_start(run_dir: Path, *, resumes: bool) -> None:
    """Leave the decision for the other learner nodes."""
    path = run_dir / STARTED
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"resumes": resumes}) + "\n", encoding="utf-8")


def read_start(run_dir: Path) -> bool:
    """Whether the first learner node resumes the run. Raises OSError when the file is not there."""
    return bool(json.loads((run_dir / STARTED).read_text(encoding="utf-8"))["resumes"])
