"""Versions as changes of the one before: what travels, and what happens to those who cannot use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.infrastructure import WeightBus
from replay.channel import WireError
from scripts.chaos.campaigns.flips import stepped
from tests.support.bus_receiver import CONFIG, Rollout, Weights, digests, learner, servers, until, weights
from weight_bus import Publisher, PublishReport
from weight_bus.delta import coding
from weight_bus.delta.changes import ChangeMaker, ChangeReader, digest_of
from weight_bus.intake import Intake
from weight_bus.manifest import plan
from weight_bus.transports import TransportFactory

CPU = torch.device("cpu")
NOTHING = torch.empty(0, dtype=torch.uint8)
DELTA = CONFIG.model_copy(update={"delta": True})
FULL = plan([(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in weights(0).items()], CONFIG.bucket_bytes).num_bytes


@contextmanager
def bus(
    config: WeightBus = DELTA, *names: str, factory: TransportFactory | None = None
) -> Iterator[tuple[Publisher, list[Rollout]]]:
    """Servers that hold version 0."""
    names = names or ("a", "b")
    with learner(config) as publisher:
        made = servers(publisher, *names, config=config, factory=factory)
        assert sorted(send(publisher, 0, weights(0)).served) == [*names]
        yield publisher, made


def send(publisher: Publisher, version: int, named: Weights) -> PublishReport:
    return publisher.publish(version, named.items(), digests(named))


def same(server: Rollout, named: Weights) -> bool:
    return all(torch.equal(server.engine.live[n].view(torch.uint8), t.view(torch.uint8)) for n, t in named.items())


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_versions_travel_as_changes_and_arrive_bit_by_bit(compression):
    config = DELTA.model_copy(update={"compression": compression, "full_every": 5})
    with bus(config) as (publisher, receivers):
        named, full, changes = weights(0), [0], []
        for version in range(1, 12):
            named = stepped(named, version)
            report = send(publisher, version, named)
            assert sorted(report.served) == ["a", "b"] and not report.failed
            assert all(same(server, named) for server in receivers)
            (full if report.num_bytes == FULL else changes).append(version)
            assert report.num_bytes == FULL or report.num_bytes * 25 < FULL
        assert full == [0, 5, 10] and len(changes) == 9
        assert publisher.stats()["changes"] == 9 and publisher.stats()["corrupt"] == 0


def test_who_joins_late_gets_all_of_it_and_changes_afterwards():
    second = stepped(weights(0), 1)
    third = stepped(second, 2)
    with bus(DELTA, "a") as (publisher, _):
        assert send(publisher, 1, second).num_bytes < FULL / 25
        late = Rollout(publisher, "late", config=DELTA)
        until(lambda: late.engine.activated == [1], "it is filled")
        report = send(publisher, 2, third)
        assert sorted(report.served) == ["a", "late"] and report.num_bytes < FULL / 25
        assert same(late, third)


def test_too_much_that_is_new_travels_whole_and_is_tried_again_ever_more_seldom():
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


def test_a_change_between_other_layouts_is_refused():
    """Also where the buckets have the same sizes: tensors that change places would be right by name only."""
    transport: Any = SimpleNamespace(device=CPU)
    intake = Intake(transport, "r")
    first, second = (plan([(name, "bfloat16", (900,)) for name in names], 10_000) for names in ("ab", "ba"))
    intake.staging.prepare(first.with_digests({"a": 1, "b": 2}))
    intake._holds = "base"
    begin: Any = SimpleNamespace(base="base", version=2, wire_bytes=0, change_bytes=0, change_digest=digest_of(NOTHING))
    with pytest.raises(WireError, match="v2 comes as a change of base"):
        intake._change(begin, second.with_digests({"a": 1, "b": 2}))
    intake._holds = "another"
    with pytest.raises(WireError, match="v2 comes as a change of base, and another is staged"):
        intake._change(begin, intake.staging.manifest)
    intake._holds, begin.change_digest = "base", "1" * 16
    assert intake._change(begin, intake.staging.manifest) == ["the change from base"], (
        "damaged on its way, and not applied"
    )


def test_a_change_that_there_is_no_memory_for_costs_a_full_refill(monkeypatch, caplog):
    """On a GPU that an engine fills, a dense one of a large model needs gigabytes to be applied."""

    def exhausted(buckets, change):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.20 GiB.")

    monkeypatch.setattr(coding, "apply", exhausted)
    second = stepped(weights(0), 1)
    with bus(DELTA, "a") as (publisher, (server,)):
        report = send(publisher, 1, second)
        assert report.served == ["a"] and same(server, second) and report.num_bytes == FULL
    assert "cannot be applied in the memory here: CUDA out of memory" in caplog.text


def test_a_change_on_a_gpu_has_ended_before_it_counts_as_staged(monkeypatch):
    """Schedulers copy the buckets from processes of their own, which do not wait for the subscriber's stream."""
    old, new = changed(torch.Generator().manual_seed(3), 1000, 2, 0.01, small=True)
    change, bucket, found = coding.encode(old, new, 2).joined(CPU), old.clone(), []
    reader = ChangeReader(CPU)
    for piece, part in zip(reader.room(change.numel(), 16), torch.split(change, 16), strict=True):
        piece.copy_(part)
    stream = SimpleNamespace(synchronize=lambda: found.append(bucket.clone()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    reader._device = torch.device("cuda", 0)
    reader.apply([bucket], change.numel(), change.numel())
    assert len(found) == 1 and torch.equal(found[0], new)


@pytest.mark.parametrize(
    ("wire_bytes", "num_bytes", "message"),
    [(64, 64, "header that cannot be"), (64, 100, "compressed change"), (0, 0, "ends within a header")],
)
def test_what_is_no_change_is_refused(wire_bytes, num_bytes, message):
    reader = ChangeReader(CPU)
    for piece in reader.room(64, 32):
        piece.fill_(255)
    with pytest.raises(WireError, match=message):
        reader.apply([torch.zeros(128, dtype=torch.uint8)], wire_bytes, num_bytes)


# ---- the coding: every bit comes back, and nothing that cannot be is written anywhere ----------------------


def changed(rng: torch.Generator, elements: int, width: int, share: float, small: bool) -> tuple[torch.Tensor, ...]:
    """A bucket of random bits and the next one."""
    integers = coding.INTEGERS[width]
    bounds = torch.iinfo(integers)
    old = torch.randint(bounds.min, bounds.max, (elements,), generator=rng).to(integers)
    where = torch.rand(elements, generator=rng) < share
    low, high = (1, 3) if small else (bounds.min, bounds.max)
    steps = torch.randint(low, high, (elements,), generator=rng)
    new = torch.where(where, old + steps.to(integers), old)
    return old.view(torch.uint8), new.view(torch.uint8)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    elements=st.integers(0, 3000),
    width=st.sampled_from([2, 4]),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    small=st.booleans(),
    section=st.integers(1, 4000),
)
def test_every_bit_comes_back(seed, elements, width, share, small, section):
    old, new = changed(torch.Generator().manual_seed(seed), elements, width, share, small)
    coded = coding.encode(old, new, width, section)
    change = coded.joined(CPU)
    assert change.numel() == coded.num_bytes
    bucket = old.clone()
    coding.apply([bucket], change)
    assert torch.equal(bucket, new)
    with pytest.raises(WireError, match="bytes has columns of"):
        coding.apply([bucket], torch.cat([change, change.new_zeros(3)]))


@settings(max_examples=300)
@given(seed=st.integers(0, 2**31), flips=st.integers(1, 6), cut=st.integers(0, 40))
def test_damaged_changes_are_refused_or_stay_inside_the_bucket(seed, flips, cut):
    """A damaged change may decode to other numbers, which the digests find; it is never another error."""
    rng = torch.Generator().manual_seed(seed)
    old, new = changed(rng, 800, 2, 0.05, small=True)
    coded = coding.encode(old, new, 2).joined(CPU)
    # the header and the long lists are where sizes come from
    for position in torch.randint(0, coded.numel(), (flips,), generator=rng).tolist():
        coded[position] = int(torch.randint(0, 256, (1,), generator=rng))
    if cut:
        coded = coded[: max(0, coded.numel() - cut)]
    bucket = old.clone()
    try:
        coding.apply([bucket], coded)
    except WireError:
        assert torch.equal(bucket, old), "what is refused writes nothing"
