"""The run folder: its name, its claim, and that it stays where it is while the run writes into it."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from configs.loading import dump
from configs.schema import Config
from slipstream.check.checks import not_writable
from slipstream.launch.servers import RunFailed

PARTS = ("config.yaml", "journal", "logs")
"""Of the folder; a clean-up may take them one after the other."""
JOB = "SLIPSTREAM_JOB"
"""Environment variable with the name of the job that the run is of, where one has started its nodes."""
JOB_FILE = "launch/job"
STARTED_IN = "started_in"
"""File of the run folder with the path of the folder where the run was started: relative paths begin there."""
SETTLED_S = 1.0
"""Within this time a clean-up that has begun has taken one of these, too."""


class FolderGone(RunFailed, code="SLIP-RUN-09"):
    """The run folder is not there any more."""


@dataclass(slots=True)
class RunFolder:
    """What of the folder was there when the run began."""

    path: Path
    _known: dict[str, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        found = {name: identity(self.path / name) for name in PARTS}
        self._known = {name: one for name, one in found.items() if one is not None}

    def check(self) -> None:
        """Raises FolderGone."""
        gone = [name for name, known in self._known.items() if identity(self.path / name) != known]
        if gone:
            raise FolderGone(
                f"run.dir: {self.path} was deleted, moved or replaced while the run writes into it ({gone[0]} is not"
                " the one that it began with), so nothing more can be kept; move it back and --resume it, or start"
                " again with a run.dir that nothing cleans up"
            )

    def check_after(self, error: FileNotFoundError) -> None:
        """A file of the run is missing: look again when a clean-up is further. Raises FolderGone, or else the error."""
        time.sleep(SETTLED_S)
        self.check()
        raise error


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None where there is nothing."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def claim_run_dir(config: Config, *, new: bool) -> Config:
    """Create the run folder and its config.yaml; config.yaml claims it for one run.

    Returns:
        The configuration, with the next free name where another run of this name has started since the checks.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    claimed = config
    while True:
        folder = Path(claimed.run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path, beside = folder / "config.yaml", folder / "config.yaml.new"
            with (path if new else beside).open("x" if new else "w", encoding="utf-8") as file:
                file.write(dump(claimed))
            if not new:  # whole, or the one before: a disk that is still full must not take the run's configuration
                beside.replace(path)
            else:
                (folder / STARTED_IN).write_text(f"{Path.cwd()}\n", encoding="utf-8")
                if job := os.environ.get(JOB):
                    (folder / JOB_FILE).parent.mkdir(exist_ok=True)
                    (folder / JOB_FILE).write_text(job, encoding="utf-8")
            return claimed
        except OSError as error:
            if not (isinstance(error, FileExistsError) and folder.is_dir()):
                raise not_writable(config, folder, error) from error
            claimed = with_free_name(config)


def new_job() -> str:
    """Name of a job that no other has: the number of a process, and when."""
    return f"{os.getpid()}-{int(time.time())}"


def folder_of(job: str, config: Config) -> Path | None:
    """The run folder that this job has begun, whatever free name it took."""
    found = (path for path in Path(config.run.dir).glob(f"*/{JOB_FILE}") if path.read_text(encoding="utf-8") == job)
    return next((path.parents[1] for path in found), None) if job else None


def with_free_name(config: Config) -> Config:
    """Under `run.name`, or `name-2`, `name-3`, ... where earlier runs have their folders: nothing is overwritten."""
    name, number = config.run.name, 2
    while (Path(config.run.dir) / name / "config.yaml").exists():
        name = f"{config.run.name}-{number}"
        number += 1
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
