"""Rows of metrics for the services that accelerate knows: TensorBoard, Weights & Biases, MLflow and others.

Each has a thread of its own, so that none of them holds up training. A service that does not start ends the run before
its first step; one that fails later, or is PATIENCE rows behind, is named in the log and counted in
`metrics/trackers_failed`, and gets no more rows: metrics.jsonl has them all. The id of the service's run is kept in
trackers.json of the run folder, so a resumed run goes on under it. Imports no torch before a tracker is asked for.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.data import Tracker, Tracking
from configs.errors import SlipstreamError

log = logging.getLogger(__name__)

IDS = "trackers.json"
START_S = 120.0
CLOSE_S = 60.0
PATIENCE = 1000
"""Rows that may wait for a service."""


class MetricsError(SlipstreamError, RuntimeError, code="SLIP-REPORT-01"):
    """metrics.jsonl is missing or broken, or a tracker does not start; names the file, or the tracker and the fault."""


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """What a service is started with."""

    folder: Path
    project: str
    id: str | None
    """Of the run at the service that is to go on; None for a new one."""
    resume_step: int | None


@dataclass(frozen=True, slots=True)
class TrackerService:
    """How one service differs from the others."""

    start: Callable[[TrackerContext], dict[str, Any]]
    """Arguments of accelerate's tracker."""
    id: Callable[[Any], str | None] = lambda _: None
    """Of the run, from what the tracker wraps."""
    takes_config: bool = True
    has_axes: bool = False
    """It refuses a step that goes back, so steps and versions travel as axes of their own."""


def _wandb(place: TrackerContext) -> dict[str, Any]:
    named = {"name": place.folder.name, "dir": str(place.folder), "id": place.id, "resume": "allow"}
    return {"run_name": place.project, **named}


def _tensorboard(place: TrackerContext) -> dict[str, Any]:
    purge = None if place.resume_step is None else place.resume_step + 1
    return {"run_name": "tensorboard", "logging_dir": str(place.folder), "purge_step": purge, "flush_secs": 10}


def _mlflow(place: TrackerContext) -> dict[str, Any]:
    return {"experiment_name": place.project, "run_id": place.id, "run_name": place.folder.name}


def _trackio(place: TrackerContext) -> dict[str, Any]:
    return {"run_name": place.project, "name": place.folder.name, "resume": "allow"}


def _swanlab(place: TrackerContext) -> dict[str, Any]:
    known = {"id": place.id, "resume": "allow"} if place.id else {}
    named = {"experiment_name": place.folder.name, "logdir": str(place.folder / "swanlab")}
    return {"run_name": place.project, **named, **known}


def _comet(place: TrackerContext) -> dict[str, Any]:
    known = {"experiment_key": place.id, "mode": "get"} if place.id else {}
    return {"run_name": place.project, **known}


def _aim(place: TrackerContext) -> dict[str, Any]:
    return {"run_name": place.folder.name, "logging_dir": str(place.folder), "run_hash": place.id}


def _clearml(place: TrackerContext) -> dict[str, Any]:
    known = {"continue_last_task": place.id} if place.id else {}
    return {"run_name": place.folder.name, "project_name": place.project, **known}


def _dvclive(place: TrackerContext) -> dict[str, Any]:
    return {"dir": str(place.folder / "dvclive"), "resume": place.resume_step is not None}


SERVICES: Mapping[Tracker, TrackerService] = {
    "aim": TrackerService(_aim, lambda run: str(run.hash)),
    "clearml": TrackerService(_clearml, lambda task: str(task.id)),
    "comet_ml": TrackerService(_comet, lambda experiment: str(experiment.get_key())),
    "dvclive": TrackerService(_dvclive),
    "mlflow": TrackerService(_mlflow, lambda run: str(run.info.run_id)),
    "swanlab": TrackerService(_swanlab, lambda run: str(run.id)),
    "tensorboard": TrackerService(_tensorboard, takes_config=False),
    "trackio": TrackerService(_trackio),
    "wandb": TrackerService(_wandb, lambda run: str(run.id), has_axes=True),
}


@dataclass(slots=True)
class _Running:
    """A started tracker with its thread."""

    tracker: Any
    thread: ThreadPoolExecutor
    waiting: deque[Future[None]] = field(default_factory=deque)

    def problem(self) -> str:
        """What has failed since the last call, or an empty string."""
        while self.waiting and self.waiting[0].done():
            if (error := self.waiting.popleft().exception()) is not None:
                return f"{type(error).__name__}: {error}"
        return f"it is {PATIENCE} rows behind" if len(self.waiting) > PATIENCE else ""


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Has the methods of accelerate's."""

    def warning_once(self, *arguments: Any) -> None:
        """What a service leaves out; said for each row."""
        self.debug(*arguments)


class Trackers:
    """All trackers of a run; for one thread."""

    def __init__(
        self, folder: Path, tracking: Tracking, run_config: Mapping[str, Any], resume_step: int | None
    ) -> None:
        """Start them, each within START_S. Raises MetricsError: one does not start, or their ids cannot be read."""
        self.wanted = bool(tracking.trackers)
        self.failed: dict[str, str] = {}
        """By name: why it gets no more rows."""
        self._running: dict[Tracker, _Running] = {}
        ids = read_ids(folder) if self.wanted else {}
        for name in tracking.trackers:
            place = TrackerContext(folder, tracking.project, ids.get(name), resume_step)
            self._running[name] = start(name, place, tracking.tracker_options.get(name, {}), run_config)
            if (found := SERVICES[name].id(self._running[name].tracker.tracker)) is not None:
                ids[name] = found
        if self.wanted:
            beside = folder / f"{IDS}.new"  # a full disk, or a kill, leaves the ids that there were
            beside.write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")
            beside.replace(folder / IDS)

    def log(self, position: int, evaluation: bool, scalars: Mapping[str, float]) -> None:
        """Hand a row to each: of a step, or of an evaluation of a version."""
        axis = "training/version" if evaluation else "training/global_step"
        for name, running in list(self._running.items()):
            if problem := running.problem():
                self._give_up(name, problem)
            elif SERVICES[name].has_axes:
                running.waiting.append(running.thread.submit(running.tracker.log, {axis: position, **scalars}))
            else:
                running.waiting.append(running.thread.submit(running.tracker.log, dict(scalars), step=position))

    def close(self) -> None:
        """Let each send what is left, for CLOSE_S at most."""
        for name, running in list(self._running.items()):
            last = running.thread.submit(running.tracker.finish)
            try:
                error = last.exception(CLOSE_S)
            except TimeoutError:
                self._give_up(name, f"it did not finish within {CLOSE_S:g} s")
                continue
            if problem := running.problem() or (f"{type(error).__name__}: {error}" if error is not None else ""):
                self._give_up(name, problem)
            running.thread.shutdown(wait=False)

    def _give_up(self, name: Tracker, problem: str) -> None:
        self.failed[name] = problem
        running = self._running.pop(name)
        running.thread.shutdown(wait=False, cancel_futures=True)
        log.error("tracker %s failed and gets no more rows, metrics.jsonl has them all: %s", name, problem)


def start(name: Tracker, place: TrackerContext, options: Mapping[str, Any], run_config: Mapping[str, Any]) -> _Running:
    """One tracker, in a thread of its own. Raises MetricsError."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=f"tracker {name}")
    started = thread.submit(_start, name, place, options, run_config)
    try:
        error = started.exception(START_S)
    except TimeoutError:
        raise MetricsError(f"tracking.trackers: {name} did not start within {START_S:g} s; leave it out") from None
    if error is not None:
        hint = f"install the extra: pip install 'slipstream-rl[{name.replace('_', '-')}]'"
        what = hint if isinstance(error, ImportError) else f"correct tracking.tracker_options.{name}, or leave it out"
        raise MetricsError(
            f"tracking.trackers: {name} did not start: {type(error).__name__}: {error}; {what}"
        ) from error
    return _Running(started.result(), thread)


def _start(name: Tracker, place: TrackerContext, options: Mapping[str, Any], run_config: Mapping[str, Any]) -> Any:
    from accelerate import tracking

    # Rank 0 alone comes here. To find the main process, and to log, accelerate would set up a process state of its own,
    # which sets devices, threads and environment variables of this process.
    tracking.logger = _Log(logging.getLogger(tracking.__name__))
    service = SERVICES[name]
    kind = type(name, (tracking.LOGGER_TYPE_TO_CLASS[name],), {"main_process_only": False})
    tracker = kind(**{**service.start(place), **options})
    tracker.start()
    if service.takes_config:
        tracker.store_init_configuration(plain(run_config))
    if service.has_axes:
        # evaluations of version v arrive while later steps are logged, and the default axis may not go back
        tracker.tracker.define_metric("*", step_metric="training/global_step")
        for pattern in ("val-core/*", "val-aux/*"):
            tracker.tracker.define_metric(pattern, step_metric="training/version")
    return tracker


def plain(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of the configuration by dotted key, lists and the like as text: what every service takes."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= plain(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def read_ids(folder: Path) -> dict[str, str]:
    """Ids of the services' runs, by tracker. Raises MetricsError."""
    kept = folder / IDS
    if not kept.exists():
        return {}
    try:
        ids: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MetricsError(f"{kept} is no JSON ({error}); delete it, and trackers begin runs of their own") from error
    return ids
