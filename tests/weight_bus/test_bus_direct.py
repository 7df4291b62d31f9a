"""Engines whose own processes are the members of the group (weight_bus.apply: direct), over real sockets and gloo.

The engines here are threads with an end of gloo for each rank; tests/rollout_server has SGLang itself.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from configs.infrastructure import WeightBus
from tests.support import bus_receiver
from tests.support.bus_receiver import CONFIG, HOST, Rollout, Weights, digests, joined, until, weights
from weight_bus import EngineSpoiled, Publisher, RemovedFromBus, TransportError, WeightBusError
from weight_bus.manifest import WITHOUT_GAPS, Entry, plan
from weight_bus.membership import State
from weight_bus.transports import Formation, make_transport
from weight_bus.transports.direct import DirectGloo

DIRECT = CONFIG.model_copy(update={"apply": "direct"})


class Ranks:
    """An engine of several ranks that loads each bucket as it comes; implements DirectReceiver."""

    def __init__(self, ranks: int, name: str) -> None:
        self.ranks, self.name = ranks, name
        self.live: Weights = {}
        self.formed: list[Formation] = []
        self.calls: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.hold: Callable[[], None] = lambda: None
        self.before: Callable[[int], None] = lambda index: None
        self._ends: list[DirectGloo] = []

    def pause(self, version: int) -> None:
        self.calls.append("pause")
        if not self.held.is_set():
            self.hold()
            assert self.held.wait(20.0)

    def resume(self) -> None:
        self.calls.append("resume")

    def form(self, formation: Formation) -> None:
        self.leave()
        self.formed.append(formation)
        self._ends = [DirectGloo(DIRECT, HOST) for _ in range(self.ranks)]
        self._all(lambda end, i: end.form(replace(formation, rank=formation.rank + i)))

    def receive(self, bucket: Sequence[Entry], index: int) -> None:
        self.before(index)
        size = sum(entry.num_bytes for entry in bucket)
        held = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.ranks)]
        self._all(lambda end, i: end.broadcast(held[i], index))
        assert all(torch.equal(held[0], other) for other in held)
        sizes = [entry.num_bytes for entry in bucket]
        for entry, flat in zip(bucket, torch.split(held[0], sizes), strict=True):
            self.live[entry.name] = flat.clone().view(torch.float32).view(entry.shape)

    def prove(self, version: int, entries: Sequence[Entry]) -> Mapping[str, int]:
        assert [entry.name for entry in entries] == list(self.live)
        return digests(self.live)

    def leave(self) -> None:
        for end in self._ends:
            end.close()
        self._ends = []

    def _all(self, call: Callable[[DirectGloo, int], None]) -> None:
        try:
            with ThreadPoolExecutor(self.ranks) as pool:
                list(pool.map(call, self._ends, range(self.ranks)))
        except TransportError as error:
            raise EngineSpoiled(f"{self.name} is spoiled: {error}") from error


class Server(Rollout):
    """Follows the bus with an engine of its own until that ends."""

    def __init__(self, publisher: Publisher, name: str, ranks: int = 2) -> None:
        self.receiver = Ranks(ranks, name)
        super().__init__(publisher, name, config=DIRECT, direct=self.receiver, ends=(WeightBusError,))


@pytest.fixture
def config():
    return DIRECT


publish = partial(bus_receiver.publish, dtype=torch.float32)


def servers(publisher: Publisher, *names: str) -> list[Server]:
    """Joined in this order, which is that of their ranks."""
    made = []
    for number, name in enumerate(names, 1):
        made.append(Server(publisher, name))
        joined(publisher, *names[:number])
    return made


def test_two_engines_of_two_ranks_receive_straight_and_keep_their_group(publisher):
    a, b = servers(publisher, "a", "b")
    for version in (1, 2, 3):
        report = publish(publisher, version)
        assert (report.served, report.failed, report.epoch) == (["a", "b"], {}, 1)
        assert digests(a.receiver.live) == digests(b.receiver.live) == digests(weights(version, dtype=torch.float32))
    assert a.engine.activated == b.engine.activated == [1, 2, 3] and a.engine.loads == 0
    assert [(f.rank, f.size) for server in (a, b) for f in server.receiver.formed] == [(1, 5), (3, 5)]
    third = Server(publisher, "c", ranks=1)
    until(lambda: third.engine.activated == [3], "who joins is sent the last version")
    report = publish(publisher, 4)
    assert (sorted(report.served), report.failed) == (["a", "b", "c"], {}) and report.epoch == 3
    assert [(f.rank, f.size) for f in (s.receiver.formed[-1] for s in (a, b, third))] == [(1, 6), (3, 6), (5, 6)]


def test_the_group_is_kept_until_the_slowest_engine_has_proven_what_it_received(publisher):
    events: list[tuple[str, str, int]] = []
    publisher.on_event.append(lambda event: events.append((event.kind, event.name, event.epoch)))
    a, b = servers(publisher, "a", "b")
    joining = threading.Event()

    def wait(index: int) -> None:
        assert joining.wait(10.0)
        time.sleep(0.3)

    a.receiver.before = wait
    named = weights(1, dtype=torch.float32)
    publisher.start_publish(1, named.items(), digests(named))
    until(lambda: "pause" in a.receiver.calls, "the round has begun")
    third = Server(publisher, "c")
    joined(publisher, "a", "b", "c")
    joining.set()
    until(lambda: third.engine.activated == [1], "it is served afterwards")
    assert events.index(("live", "a", 1)) < events.index(("epoch", "", 2)) and b.engine.activated == [1]


def test_an_engine_that_evaluates_first_keeps_nobody_from_the_new_version(publisher):
    a, b = servers(publisher, "a", "b")
    publish(publisher, 1)
    a.receiver.hold = lambda: a.subscriber.hold(30.0, "evaluates v1")
    a.receiver.held.clear()
    report = publish(publisher, 2)
    assert (report.served, report.failed) == (["b"], {}) and "evaluates v1" in report.held["a"]
    assert b.receiver.calls == ["pause", "pause", "resume", "pause"], "its first round was called off"
    assert publisher.members()["a"] == (State.HOLDING.value, 1), "it serves what it served"
    report = publish(publisher, 3)
    assert report.served == ["b"] and a.engine.activated == [1]
    a.receiver.held.set()
    until(lambda: a.engine.activated == [1, 3], "then it gets the newest")
    assert a.ended is None and publisher.stats()["lost_peers"] == 0
    assert publish(publisher, 4).served == ["a", "b"]


def test_an_engine_lost_in_a_transfer_is_named_and_nobody_serves_a_part(publisher):
    a, b = servers(publisher, "a", "b")
    publish(publisher, 1)

    def die(index: int) -> None:
        if index == 1:
            raise EngineSpoiled("a scheduler died")

    a.receiver.before = die
    started = time.monotonic()
    report = publish(publisher, 2)
    until(lambda: a.ended and (b.ended or b.engine.activated == [1, 2]), "both know")
    assert time.monotonic() - started < 4 * DIRECT.collective_timeout_s + 2
    assert "a scheduler died" in str(a.ended) and "its engine is spoiled and restarts" in report.failed["a"]
    assert a.engine.activated == [1] and a.engine.quarantined == []
    if b.ended:
        assert isinstance(b.ended, EngineSpoiled | RemovedFromBus) and b.engine.activated == [1]
    again = Server(publisher, "a")
    until(lambda: again.engine.activated == [2], "a restarted one gets the whole version")


def test_an_engine_that_cannot_say_what_it_holds_restarts(publisher):
    (a,) = servers(publisher, "a")

    def hang(version: int, entries: Sequence[Entry]) -> Mapping[str, int]:
        raise EngineSpoiled("no answer")

    a.receiver.prove = hang  # type: ignore[method-assign]
    report = publish(publisher, 1)
    assert "the engine is spoiled and restarts: no answer" in report.failed["a"]
    until(lambda: isinstance(a.ended, EngineSpoiled), "it ends, without a refill")
    assert a.engine.activated == [] and len(a.engine.quarantined) == 1
    until(lambda: publisher.members() == {}, "it has left")


def test_an_engine_that_is_not_paused_in_time_costs_the_others_one_round(publisher):
    a, b = servers(publisher, "a", "b")

    def refuse() -> None:
        raise TransportError("requests do not end", "slow")

    a.receiver.hold = refuse
    a.receiver.held.clear()
    report = publish(publisher, 1)
    assert report.served == ["b"] and "requests do not end" in report.failed["a"]
    until(lambda: a.ended, "it is removed when it has had its refills")
    assert isinstance(a.ended, RemovedFromBus) and a.receiver.formed == []
    assert b.receiver.calls[:3] == ["pause", "resume", "pause"], "called off before anything was sent, then alone"


def test_a_staged_subscriber_and_a_direct_publisher_do_not_fit(publisher):
    staged = Rollout(publisher, "staged")
    staged.join(20.0)
    assert isinstance(staged.ended, RemovedFromBus)
    assert "apply is not stated there and direct here, give both ends the same weight_bus.apply" in str(staged.ended)
    with pytest.raises(WeightBusError, match="needs an engine that receives by itself"):
        Rollout(publisher, "none", config=DIRECT)
    with pytest.raises(WeightBusError, match=r"weight_bus\.backend 'ucc' is not available"):
        make_transport(WeightBus(apply="direct", backend="ucc"), HOST)


def test_tensors_of_two_dtypes_have_no_place_in_a_bucket_without_gaps():
    with pytest.raises(ValueError, match=r"'b' of float32 would begin at byte 6 .*one dtype"):
        plan([("a", "bfloat16", (3,)), ("b", "float32", (1,))], 1000, WITHOUT_GAPS)
