"""Trackers: the real ones where they are installed, and what follows when one fails."""

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from configs.data import Tracking
from learner.record import trackers
from learner.record.metrics import Metrics, MetricsError
from learner.record.trackers import SERVICES, TrackerContext, read_ids
from tests.support.waiting import until

CONFIG = {"run": {"seed": 7, "name": "a"}, "learner": {"betas": [0.9, 0.95], "mesh": {"tensor": 1}}}


def open_metrics(folder: Path, resume_step: int | None = None, **tracking: Any) -> Metrics:
    return Metrics(folder, Tracking(**tracking), CONFIG, resume_step=resume_step)


def log_some(recorder: Metrics, *steps: int) -> None:
    for step in steps:
        recorder.log(step, {"critic/score/mean": step / 4, "training/lag_histogram": {"1": 40}})
    recorder.log_evaluation(steps[0], {"val-core/x/greedy": 0.5})
    recorder.close()


class Recorder(GeneralTracker):
    """A service in this process."""

    name = "trackio"
    requires_logging_directory = False
    rows: ClassVar[list[Any]] = []
    fails_at = 0
    hangs: threading.Event | None = None

    def __init__(self, run_name: str, **options: Any) -> None:
        super().__init__()
        self.rows[:] = [("start", run_name, options)]

    @property
    def tracker(self) -> Any:
        return SimpleNamespace()

    def start(self) -> None:
        if "refuse" in self.rows[0][2]:
            raise ConnectionError("no such account")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.rows.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if self.hangs is not None:
            self.hangs.wait(20)
        if self.fails_at and step == self.fails_at:
            raise ConnectionError("the service has gone")
        self.rows.append((step, values))

    def finish(self) -> None:
        self.rows.append("finished")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "trackio", Recorder)
    monkeypatch.setattr(Recorder, "fails_at", 0)
    monkeypatch.setattr(Recorder, "hangs", None)
    return Recorder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_service_gets_the_configuration_and_every_row_under_its_step(tmp_path, service):
    log_some(open_metrics(tmp_path / "a", trackers=["trackio"], project="sums"), 1, 2)
    start, configured, first, second, evaluation, finished = service.rows
    assert start == ("start", "sums", {"name": "a", "resume": "allow"}) and finished == "finished"
    assert configured[1] == {"run.seed": 7, "run.name": "a", "learner.betas": "[0.9, 0.95]", "learner.mesh.tensor": 1}
    assert first[0] == 1 and first[1]["training/lag_histogram/1"] == 40 and second[0] == 2
    assert evaluation == (1, {"val-core/x/greedy": 0.5, "metrics/trackers_failed": 0.0})


def test_a_service_that_fails_in_the_middle_is_named_and_training_goes_on(tmp_path, service, caplog):
    service.fails_at = 2
    recorder = open_metrics(tmp_path, trackers=["trackio"])
    for step in range(1, 6):
        recorder.log(step, {"critic/score/mean": 0.5})
        for running in recorder._trackers._running.values():
            while any(not future.done() for future in running.waiting):
                pass
    recorder.close()
    assert [row["metrics/trackers_failed"] for row in rows_of(tmp_path)] == [0, 0, 0, 1, 1]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said.startswith("tracker trackio failed and gets no more rows") and "the service has gone" in said
    assert [row[0] for row in service.rows[2:]] == [1]


def test_a_service_that_hangs_holds_up_no_step_and_is_given_up(tmp_path, service, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 20)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    service.hangs = threading.Event()
    try:
        recorder = open_metrics(tmp_path, trackers=["trackio"])
        for step in range(1, 30):
            recorder.log(step, {"critic/score/mean": 0.5})
        recorder.close()
    finally:
        service.hangs.set()
    assert rows_of(tmp_path)[-1]["metrics/trackers_failed"] == 1 and "it is 20 rows behind" in caplog.text


def test_a_service_that_does_not_start_ends_the_run_before_its_first_step(tmp_path, service):
    with pytest.raises(MetricsError, match=r"trackers: trackio did not start: ConnectionError: no such account"):
        open_metrics(tmp_path, trackers=["trackio"], tracker_options={"trackio": {"refuse": True}})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_every_tracker_of_the_schema_is_one_of_accelerate_and_is_started_with_what_it_takes(tmp_path):
    """Those that are not installed are constructed, which imports nothing, and not started."""
    assert set(SERVICES) == set(LOGGER_TYPE_TO_CLASS)
    for known in (None, "abc"):
        for name, service in SERVICES.items():
            arguments = service.start(TrackerContext(tmp_path / "a", "sums", known, 3))
            assert LOGGER_TYPE_TO_CLASS[name](**arguments).name == name
            resumes = {"tensorboard": "purge_step", "trackio": "resume", "dvclive": "resume"}
            assert known is None or "abc" in arguments.values() or resumes[name] in arguments


def test_tensorboard_gets_every_scalar_and_drops_steps_that_are_made_again(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    log_some(open_metrics(tmp_path, trackers=["tensorboard"]), 1, 2, 3)
    log_some(open_metrics(tmp_path, 1, trackers=["tensorboard"]), 2)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read["critic/score/mean"] == [(1, 0.25), (2, 0.5)]
    assert read["training/lag_histogram/1"] == [(1, 40.0), (2, 40.0)]
    assert read["val-core/x/greedy"][-1] == (2, 0.5)


def test_wandb_offline_is_resumed_under_one_id(tmp_path, monkeypatch):
    """The real package, without an account: what it has written is what `wandb sync` sends."""
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("CANARY", "hunter2-canary")  # as --forward-env gives it
    offline = {"trackers": ["wandb"], "tracker_options": {"wandb": {"mode": "offline"}}, "project": "sums"}
    log_some(open_metrics(tmp_path / "a", **offline), 1, 2)
    (known,) = read_ids(tmp_path / "a").values()
    log_some(open_metrics(tmp_path / "a", 1, **offline), 2, 3)
    assert read_ids(tmp_path / "a") == {"wandb": known}
    folders = sorted((tmp_path / "a" / "wandb").glob("offline-run-*"))
    # two that begin in one second are told apart by a number behind the id
    assert len(folders) == 2 and {folder.name.split("-")[3] for folder in folders} == {known}
    for folder in folders:  # which a process of the package's fills, after the run has ended as well
        file = folder / f"run-{known}.wandb"
        for name in (b"critic/score/mean", b"training/global_step"):
            until(lambda file=file, name=name: name in file.read_bytes(), f"{name!r} in {file.name}")
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) > 2 and [path for path in files if b"hunter2-canary" in path.read_bytes()] == []
