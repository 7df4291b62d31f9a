"""Versions as changes of the one before: what travels, and what happens to those who cannot use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from configs import Config
from configs.infrastructure import WeightBus
from replay.channel import WireError
from tests.support.bus_receiver import CONFIG, Rollout, Weights, digests, faulty, joined, learner, until, weights
from weight_bus import Publisher, PublishReport
from weight_bus.delta.changes import ChangeMaker, ChangeReader, digest_of
from weight_bus.intake import Intake
from weight_bus.manifest import plan
from weight_bus.transports import TransportFactory

NOTHING = torch.empty(0, dtype=torch.uint8)
DELTA = CONFIG.model_copy(update={"delta": True})
FULL = plan([(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in weights(0).items()], CONFIG.bucket_bytes).num_bytes


def stepped(named: Weights, version: int, share: float = 0.01) -> Weights:
    """A step of training: this share of the elements, by a unit in the last place."""
    rng = torch.Generator().manual_seed(version)
    after = {}
    for name, tensor in named.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        after[name] = (bits + (torch.rand(bits.shape, generator=rng) < share).to(bits.dtype)).view(tensor.dtype)
    return after


@contextmanager
def bus(
    config: WeightBus = DELTA, *names: str, factory: TransportFactory | None = None
) -> Iterator[tuple[Publisher, list[Rollout]]]:
    """Servers that hold version 0."""
    names = names or ("a", "b")
    with learner(config) as publisher:
        servers = [Rollout(publisher, name, config=config, factory=factory) for name in names]
        joined(publisher, *names)
        assert sorted(send(publisher, 0, weights(0)).served) == [*names]
        yield publisher, servers


def send(publisher: Publisher, version: int, named: Weights) -> PublishReport:
    return publisher.publish(version, named.items(), digests(named))


def same(server: Rollout, named: Weights) -> bool:
    return all(torch.equal(server.engine.live[n].view(torch.uint8), t.view(torch.uint8)) for n, t in named.items())


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_versions_travel_as_changes_and_arrive_bit_by_bit(compression: str) -> None:
    config = DELTA.model_copy(update={"compression": compression, "full_every": 5})
    with bus(config) as (publisher, servers):
        named, full, changes = weights(0), [0], []
        for version in range(1, 12):
            named = stepped(named, version)
            report = send(publisher, version, named)
            assert sorted(report.served) == ["a", "b"] and not report.failed
            assert all(same(server, named) for server in servers)
            (full if report.num_bytes == FULL else changes).append(version)
            assert report.num_bytes == FULL or report.num_bytes * 25 < FULL
        assert full == [0, 5, 10] and len(changes) == 9
        assert publisher.stats()["changes"] == 9 and publisher.stats()["corrupt"] == 0


def test_who_joins_late_gets_all_of_it_and_changes_afterwards() -> None:
    second = stepped(weights(0), 1)
    third = stepped(second, 2)
    with bus(DELTA, "a") as (publisher, _):
        assert send(publisher, 1, second).num_bytes < FULL / 25
        late = Rollout(publisher, "late", config=DELTA)
        until(lambda: late.engine.activated == [1], "it is filled")
        report = send(publisher, 2, third)
        assert sorted(report.served) == ["a", "late"] and report.num_bytes < FULL / 25
        assert same(late, third)


def test_too_much_that_is_new_travels_whole_and_is_tried_again_ever_more_seldom() -> None:
    maker = ChangeMaker(DELTA.model_copy(update={"full_every": 1000}))
    layout = plan([("w", "bfloat16", (1000,))], CONFIG.bucket_bytes)
    rng = torch.Generator().manual_seed(0)

    def bucket() -> list[torch.Tensor]:
        return [torch.randint(0, 256, (layout.bucket_sizes[0],), generator=rng, dtype=torch.uint8)]

    tried = []
    for version in range(40):
        if maker.due("base"):
            tried.append(version)
            assert maker.change("base", bucket(), bucket(), layout) is None
    assert tried == [0, 2, 5, 10, 19, 36]
    maker._skip = 0
    calm = bucket()
    assert maker.due("base") and maker.change("base", calm, [calm[0].clone()], layout) is not None and maker._wait == 1


def test_a_change_that_is_damaged_on_the_way_costs_a_full_refill() -> None:
    def damage(bucket: torch.Tensor) -> None:
        if bucket.numel() < 60_000:  # a change; full buckets are larger
            bucket[5000] ^= 1  # a gap

    second = stepped(weights(0), 1)
    with bus(DELTA, "a", factory=faulty(0, damage)) as (publisher, (server,)):
        report = send(publisher, 1, second)
        assert report.served == ["a"] and same(server, second) and report.num_bytes == FULL
        assert publisher.stats()["corrupt"] == 1


@pytest.mark.parametrize("elsewhere", [True, False], ids=["elsewhere", "where it changes"])
def test_a_bit_that_flips_in_staged_bytes_between_two_versions_is_never_served(elsewhere: bool) -> None:
    """Before the engine loads it, or by the digests of the live weights afterwards."""
    first, second = weights(0), stepped(weights(0), 1)
    changes = (second["layers.2.weight"] != first["layers.2.weight"]).view(-1)
    place = int(torch.nonzero(~changes if elsewhere else changes)[7])
    with bus(DELTA, "a") as (publisher, (server,)):
        staged = dict(server.subscriber._intake.staging.tensors())
        staged["layers.2.weight"].view(-1).view(torch.int16)[place] ^= 8
        report = send(publisher, 1, second)
        assert report.served == ["a"] and report.num_bytes == FULL and same(server, second)
        stats = publisher.stats()
        assert stats["quarantines"] + stats["corrupt"] == 1
        assert server.engine.activated == [0, 1]


def test_a_subscriber_whose_staged_bytes_are_another_version_refuses_the_change_after_it_came() -> None:
    second = stepped(weights(0), 1)
    with bus() as (publisher, servers):
        servers[0].subscriber._intake._holds = "something else"
        assert sorted(send(publisher, 1, second).served) == ["a", "b"]
        assert all(same(server, second) for server in servers)


def test_a_change_between_other_layouts_is_refused() -> None:
    """Also where the buckets have the same sizes: tensors that change places would be right by name only."""
    transport: Any = SimpleNamespace(device=torch.device("cpu"))
    intake = Intake(transport, "r")
    first, second = (plan([(name, "bfloat16", (900,)) for name in names], 10_000) for names in ("ab", "ba"))
    intake.staging.prepare(first)
    intake._holds = "base"
    begin: Any = SimpleNamespace(base="base", version=2, wire_bytes=0, change_bytes=0, change_digest=digest_of(NOTHING))
    with pytest.raises(WireError, match="v2 comes as a change of base"):
        intake._change(begin, second)


@pytest.mark.parametrize(
    ("wire_bytes", "num_bytes", "message"),
    [(64, 64, "header that cannot be"), (64, 100, "compressed change"), (0, 0, "ends within a header")],
)
def test_what_is_no_change_is_refused(wire_bytes: int, num_bytes: int, message: str) -> None:
    reader = ChangeReader(torch.device("cpu"))
    for piece in reader.room(64, 32):
        piece.fill_(255)
    with pytest.raises(WireError, match=message):
        reader.apply([torch.zeros(128, dtype=torch.uint8)], wire_bytes, num_bytes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"delta": True, "apply": "direct"}, "weight_bus.apply=staged"),
        ({"compression": "zstd"}, "is of what weight_bus.delta sends"),
        ({"compression": "zstd", "delta": True, "backend": "nccl"}, "works on host memory"),
    ],
)
def test_what_cannot_travel_together_is_refused(keys: dict[str, object], message: str) -> None:
    rollout = {"engine": "sglang"}
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "rollout": rollout, "weight_bus": keys})


def test_zstd_without_its_package_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(Exception, match="install the extra zstd"):
        ChangeMaker(DELTA.model_copy(update={"compression": "zstd"}))
