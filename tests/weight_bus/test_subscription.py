"""The subscriber's end of the control plane, message by message, over a data plane that does what the test says."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.infrastructure import WeightBus
from replay.channel import WireError
from weight_bus import messages as m
from weight_bus.errors import BusClosed, RemovedFromBus, TransportError, WeightBusError
from weight_bus.subscription import EngineCallbacks, Subscription

BEAT_S, DEADLINE_S = 1.0, 20.0
CONFIG = WeightBus.model_validate({"heartbeat_s": BEAT_S, "deadline_s": DEADLINE_S})


class Plane:
    """Takes the place of an `Intake`."""

    def __init__(self) -> None:
        self.facts = {"backend": "none"}
        self.corrupt: list[str] = []
        self.breaks = False
        self.seconds = {"wire": 1.0, "verify": 2.0}
        self.forgot = 0
        self.layouts = list[str]()
        layout = SimpleNamespace(kept=("base",))
        self.manifest: Any = SimpleNamespace(layout=layout, differences=lambda held: [k for k in held if held[k] != 1])

    def learn(self, new: m.NewLayout) -> None:
        if not new.names:
            raise WireError("no tensors")
        self.layouts.append(new.id)

    def take(self, begin: m.Begin) -> list[str]:
        assert [*begin.ranks.values()] == [2], "its own"
        if self.breaks:
            raise TransportError("a peer was lost", "closed")
        return self.corrupt

    def apply(self, version: int, load: Any) -> Any:
        return load(version, [])

    def forget(self) -> None:
        self.forgot += 1


class Bench:
    """A subscription, its data plane and its engine."""

    def __init__(self) -> None:
        self.plane, self.done, self.held = Plane(), list[Any](), {"w": 1}
        self.silences: list[float] = []
        join = m.Join(session="", name="r0", instance="i", pid=1, host="h")
        plane: Any = self.plane
        self.subject = Subscription("tcp://bus", join, CONFIG, plane, self.silent, 0.0)
        self.during: Any = lambda: None
        self.busy: tuple[float, str] | None = None
        self.now = 0.0

    def silent(self, what: str, waited_s: float) -> str:
        self.silences.append(waited_s)
        return ""

    def load(self, version: int, _: Any) -> dict[str, int]:
        self.done.append(("load", version, self.subject.version))
        self.during()
        return self.held

    def hear(self, message: Any) -> bool:
        activate = lambda version, evaluate: self.done.append(("activate", version, evaluate))  # noqa: E731
        quarantine = lambda version, reason: self.done.append(("quarantine", version, reason))  # noqa: E731
        self.subject.hear(message)
        return self.subject.apply(EngineCallbacks(self.load, activate, quarantine, lambda: self.busy), self.now)

    def said(self) -> list[Any]:
        found = list(self.subject.outbox)
        self.subject.outbox.clear()
        return found

    def joined(self, incarnation: int = 1, epoch: int = 1) -> "Bench":
        self.subject.advance(0.0)
        self.hear(m.Welcome(session=self.subject.session, incarnation=incarnation, version=0))
        self.hear(m.Epoch(session=self.subject.session, epoch=epoch, members=[]))
        return self

    def begin(self, version: int = 3, **fields: Any) -> m.Begin:
        values: dict[str, Any] = {
            "ranks": {"another": 1, fields.pop("session", self.subject.session): 2}, "size": 3, "epoch": 1,
            "incarnation": 1, "evaluate": True, "endpoint": "", "bucket_bytes": 1, "layout": "l",
            "digests": np.zeros(0, np.int64), "digest": f"d{version}",
        }  # fmt: skip
        return m.Begin(version=version, **values | fields)

    def commit(self, version: int = 3, **fields: Any) -> m.Commit:
        values: dict[str, Any] = {"session": self.subject.session, "epoch": 1, "digest": f"d{version}"}
        return m.Commit(version=version, **values | fields)

    def receives(self, version: int, **fields: Any) -> bool:
        self.hear(self.begin(version, **fields))
        return self.hear(self.commit(version, **{k: v for k, v in fields.items() if k in ("epoch", "digest")}))


@pytest.fixture
def bench() -> Bench:
    made = Bench().joined()
    made.subject.outbox.clear()
    return made


def test_it_joins_again_until_it_is_welcome_and_beats_from_then_on() -> None:
    bench = Bench()
    subject = bench.subject
    for now in (0.0, 5.0, 9.9):
        subject.advance(now)
    (join,) = bench.said()
    assert (join.session, join.version, join.digest, join.facts) == ("i-1", -1, "", {"backend": "none"})
    subject.advance(10.0)
    assert [again.session for again in bench.said()] == ["i-1"] and not subject.admitted
    bench.hear(m.Welcome(session="another", incarnation=1, version=0))
    assert not subject.admitted
    bench.hear(m.Welcome(session="i-1", incarnation=7, version=0))
    subject.advance(30.0)
    assert subject.admitted and subject.incarnation == 7 and not bench.said()
    bench.hear(m.Epoch(session="i-1", epoch=4, members=[]))
    assert bench.said() == [m.EpochReady(session="i-1", epoch=4)] and bench.plane.forgot == 1


def test_a_layout_is_for_all_sessions_and_one_that_is_none_is_passed_over(bench: Bench) -> None:
    for number, names in enumerate(("w", "", "v")):
        new = m.NewLayout(id=f"l{number}", bucket_bytes=1, names=[*names], dtypes=[], shapes=[])
        assert not bench.hear(new)
    assert bench.plane.layouts == ["l0", "l2"] and not bench.said()


def test_a_version_is_staged_and_loaded_and_proven_and_only_then_held(bench: Bench) -> None:
    assert not bench.hear(bench.begin(3))
    (staged,) = bench.said()
    assert isinstance(staged, m.Staged) and (staged.epoch, staged.version, staged.corrupt) == (1, 3, [])
    assert (staged.wire_s, staged.verify_s) == (1.0, 2.0) and not bench.done
    assert bench.hear(bench.commit(3))
    assert bench.done == [("load", 3, -1), ("activate", 3, True)] and bench.subject.version == 3
    (applied,) = bench.said()
    assert isinstance(applied, m.Applied) and (applied.reason, applied.differences) == ("", [])
    assert applied.digest
    bench.done.clear()
    assert bench.receives(4, evaluate=False)
    assert bench.done == [("load", 4, -1), ("activate", 4, False)], "nothing is held while it is loaded"


@pytest.mark.parametrize(
    "fields",
    [{"epoch": 2}, {"epoch": 0}, {"incarnation": 0}, {"incarnation": 2}, {"version": 2}, {"session": "i-0"}],
    ids=str,
)
def test_what_is_of_another_epoch_learner_session_or_of_the_past_is_not_received(bench: Bench, fields: Any) -> None:
    assert bench.receives(3)
    bench.said()
    stray = bench.begin(**{"version": 4, **fields})
    bench.hear(stray)
    assert bench.subject._staged is None and not bench.said()
    bench.hear(bench.commit(stray.version, epoch=stray.epoch, digest=stray.digest))
    assert bench.subject.version == 3


def test_the_version_that_it_holds_is_received_again_where_that_is_sent(bench: Bench) -> None:
    assert bench.receives(3) and bench.receives(3)


@pytest.mark.parametrize("fields", [{"digest": "another"}, {"version": 4, "digest": "d3"}, {"epoch": 2}], ids=str)
def test_a_commit_of_something_that_is_not_staged_is_ignored(bench: Bench, fields: Any) -> None:
    bench.hear(bench.begin(3))
    assert not bench.hear(replace(bench.commit(3), **fields))
    assert not bench.done and bench.subject.version == -1


def test_what_was_called_off_is_not_loaded(bench: Bench) -> None:
    bench.hear(bench.begin(3))
    bench.hear(m.Abort(session=bench.subject.session, epoch=1, version=3, reason="why"))
    assert not bench.hear(bench.commit(3)) and not bench.done


def test_corrupt_bytes_are_named_and_never_loaded(bench: Bench) -> None:
    bench.hear(bench.begin(2))
    bench.plane.corrupt = [f"t{i}" for i in range(50)]
    bench.hear(bench.begin(3))
    _, staged = bench.said()
    assert staged.corrupt == bench.plane.corrupt[:16]
    assert not bench.hear(bench.commit(3)) and not bench.hear(bench.commit(2)) and not bench.done


def test_a_broken_broadcast_is_told_and_leaves_the_group(bench: Bench) -> None:
    bench.plane.breaks, before = True, bench.plane.forgot
    bench.hear(bench.begin(3))
    (failed,) = bench.said()
    assert isinstance(failed, m.ReceiveFailed) and "a peer was lost" in failed.reason
    assert bench.plane.forgot == before + 1


@pytest.mark.parametrize("raises", [True, False])
def test_an_engine_that_does_not_hold_what_was_sent_is_quarantined(bench: Bench, raises: bool) -> None:
    assert bench.receives(2)
    bench.held = {"w": 1, "q": 2, "base": 3}
    if raises:
        bench.during = lambda: {}["no room"]
    bench.said(), bench.done.clear()
    assert not bench.receives(3)
    assert [kind for kind, *_ in bench.done] == ["load", "quarantine"] and bench.subject.version == -1
    applied = bench.said()[-1]
    if raises:
        assert "no room" in applied.reason and applied.digest == ""
    else:
        assert applied.differences == ["q", "base"] and "no update carries that" in applied.reason


def test_a_hold_is_about_what_is_being_applied(bench: Bench) -> None:
    with pytest.raises(WeightBusError):
        bench.subject.hold(5.0, "an evaluation")
    bench.during = lambda: bench.subject.hold(5.0, "an evaluation")
    bench.receives(3)
    (holding,) = [x for x in bench.said() if isinstance(x, m.Holding)]
    assert (holding.version, holding.limit_s, holding.reason) == (3, 5.0, "an evaluation")
    with pytest.raises(WeightBusError):
        bench.subject.hold(5.0, "too late")


def test_an_engine_that_is_busy_gets_the_newest_version_when_it_is_free(bench: Bench) -> None:
    assert bench.receives(3)
    bench.said(), bench.done.clear()
    bench.busy = (60.0, "evaluates v3")
    for version in (4, 5):
        assert not bench.receives(version, evaluate=False)
        staged, holding = bench.said()
        assert isinstance(staged, m.Staged) and isinstance(holding, m.Holding)
        assert (holding.version, holding.limit_s, holding.reason, holding.stages) == (
            version,
            80.0 - bench.now,
            "evaluates v3",
            True,
        )
        assert not bench.hear(m.Heartbeat(session="i-1")) and not bench.said() and bench.subject.version == 3
        bench.now += 10.0
    bench.busy = None
    assert bench.hear(m.Heartbeat(session="i-1"))
    assert bench.done == [("load", 5, -1), ("activate", 5, False)] and not bench.subject.is_due


def test_an_engine_that_stays_busy_is_updated_past_its_limit_whatever_comes(bench: Bench) -> None:
    bench.busy = (60.0, "evaluates v2")
    assert not bench.receives(3)
    *_, holding = bench.said()
    assert not holding.stages, "to be evaluated itself"
    bench.now = 59.0
    assert not bench.receives(4)
    bench.now = 60.0
    assert bench.hear(m.Heartbeat(session="i-1")) and bench.subject.version == 4


@pytest.mark.parametrize("ends", ["epoch", "removed", "begin"])
def test_what_waits_for_the_engine_is_dropped_with_what_is_staged(bench: Bench, ends: str) -> None:
    bench.busy = (60.0, "evaluates v2")
    bench.receives(3)
    if ends == "epoch":
        bench.hear(m.Epoch(session="i-1", epoch=2, members=[]))
    elif ends == "removed":
        bench.hear(m.Removed(session="i-1", reason="slow", rejoin=True))
    else:
        bench.plane.corrupt = ["w"]
        bench.hear(bench.begin(4))
    bench.busy = None
    assert not bench.hear(m.Heartbeat(session="i-1")) and not bench.done


def test_a_removed_subscriber_joins_anew_with_what_it_holds(bench: Bench) -> None:
    bench.receives(3)
    bench.said()
    before = bench.plane.forgot
    bench.hear(m.Removed(session="i-1", reason="slow", rejoin=True))
    assert not bench.subject.admitted and bench.plane.forgot == before + 1
    bench.subject.advance(0.1)
    (join,) = bench.said()
    assert (join.session, join.version, join.digest) == ("i-2", 3, "d3")
    bench.hear(bench.begin(4, session="i-1"))
    assert bench.subject._staged is None, "the session of before has ended"
    with pytest.raises(RemovedFromBus, match="too often"):
        bench.hear(m.Removed(session="i-2", reason="too often", rejoin=False))


def test_a_subscriber_of_the_last_learner_does_not_claim_its_version_before_the_next_one(bench: Bench) -> None:
    bench.receives(3)
    bench.hear(m.Removed(session="i-1", reason="unknown", rejoin=True))
    bench.said()
    bench.subject.advance(1.0)
    (join,) = bench.said()
    assert (join.version, join.digest) == (3, "d3")
    bench.hear(m.Welcome(session="i-2", incarnation=2, version=3))
    (goodbye,) = bench.said()
    assert isinstance(goodbye, m.Goodbye) and goodbye.session == "i-2" and not bench.subject.admitted
    bench.subject.advance(1.1)
    (join,) = bench.said()
    assert (join.session, join.version, join.digest) == ("i-3", -1, "")
    bench.hear(m.Welcome(session="i-3", incarnation=2, version=3))
    assert bench.subject.admitted and bench.subject.incarnation == 2


def test_another_version_of_the_next_learner_takes_no_second_join(bench: Bench) -> None:
    bench.receives(3)
    bench.hear(m.Removed(session="i-1", reason="unknown", rejoin=True))
    bench.subject.advance(1.0)
    bench.hear(m.Welcome(session="i-2", incarnation=2, version=5))
    assert bench.subject.admitted
    bench.hear(m.Epoch(session="i-2", epoch=1, members=[]))
    assert bench.receives(2, incarnation=2), "the next learner's may be older"


def test_an_older_learner_is_not_followed_and_goodbye_ends(bench: Bench) -> None:
    with pytest.raises(RemovedFromBus, match="older learner"):
        bench.hear(m.Welcome(session="i-1", incarnation=0, version=9))
    with pytest.raises(BusClosed, match="over"):
        bench.hear(m.Goodbye(session="i-1", reason="over"))


def test_silence_is_said_once_and_past_the_deadline_once_and_its_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch = bench.subject.watch
    watch(100.0, heard=True, entered=0.0)
    for now in (101.0, 103.0, 103.1, 104.0, 120.0, 120.1, 121.0):
        watch(now, heard=False, entered=0.0)
    watch(122.0, heard=True, entered=0.0)
    assert [round(s, 1) for s in bench.silences] == [20.1]
    assert [("waits for the" in r.message, "again" in r.message) for r in caplog.records] == [
        (True, False), (False, False), (False, True),
    ]  # fmt: skip
    for now in (126.0, 150.0):
        watch(now, heard=False, entered=122.0)
    assert len(bench.silences) == 2
    watch(300.0, heard=True, entered=0.0)
    watch(400.0, heard=False, entered=399.0)
    assert len(bench.silences) == 2, "only the wait counts"
