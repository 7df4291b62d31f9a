"""Digests that a change carries forward are those of the bytes that it makes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_bus import carried
from weight_bus.delta import coding
from weight_bus.delta.changes import ChangeReader
from weight_bus.digest import Part, add, slice_digests
from weight_bus.intake import Intake
from weight_bus.manifest import ALIGNMENT, ITEM_SIZES, WITHOUT_GAPS, Manifest, plan
from weight_bus.staging import Staging, view_of

CPU = torch.device("cpu")
Buckets = list[torch.Tensor]


def random_bytes(layout: Manifest, rng: torch.Generator) -> Buckets:
    """Every bit pattern, NaN too; between the tensors as well."""
    return [torch.randint(0, 256, (size,), generator=rng, dtype=torch.uint8) for size in layout.bucket_sizes]


def digests(buckets: Buckets, layout: Manifest) -> dict[str, int]:
    sums = slice_digests(Part(view_of(buckets, entry)) for entry in layout.entries)
    return dict(zip((entry.name for entry in layout.entries), sums, strict=True))


def moved(buckets: Buckets, shares: list[float], rng: torch.Generator, *, small: bool) -> Buckets:
    """The next version: of each bucket this share of 2-byte words is another, some by so much as others."""
    after = []
    for bucket, share in zip(buckets, shares, strict=True):
        words = bucket.view(torch.int16)
        steps = torch.randint(1, 3 if small else 1 << 15, words.shape, generator=rng).short()
        after.append((words + steps * (torch.rand(words.shape, generator=rng) < share)).view(torch.uint8))
    return after


def updates_of(old: Buckets, new: Buckets, widths: list[int], section: int) -> list[coding.Update]:
    parts = [coding.encode(was, now, width, section) for was, now, width in zip(old, new, widths, strict=True)]
    whole = coding.Coded(b"".join(part.headers for part in parts), [c for part in parts for c in part.columns])
    return coding.decode(old, whole.joined(CPU))


def whole_ones(updates: list[coding.Update], layout: Manifest) -> set[str]:
    """What is to be digested anew, by the bytes that a section and a tensor share."""
    found = set()
    for update in updates:
        width = update.place.element_size()
        section = set(range(update.begin, update.begin + update.place.numel() * width))
        for entry in layout.entries:
            shared = section & set(range(entry.offset, entry.offset + entry.num_bytes))
            if entry.bucket == update.bucket and shared and (update.index is None or ITEM_SIZES[entry.dtype] != width):
                found.add(entry.name)
    return found


dtypes = st.sampled_from(sorted(ITEM_SIZES))
shapes = st.sampled_from([(), (1,), (0, 3), (7,), (40,), (13, 9), (300,)])


@settings(deadline=None, max_examples=150)
@given(
    tensors=st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=8),
    bucket_bytes=st.sampled_from([64, 500, 2000]),
    gaps=st.booleans(),
    forced=st.sampled_from([0, 2, 4]),
    section=st.sampled_from([5, 64, 333, 10_000]),
    share=st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=8, max_size=8),
    small=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_carried_digests_are_those_of_the_new_bytes(
    tensors: list[tuple[str, tuple[int, ...]]],
    bucket_bytes: int,
    gaps: bool,
    forced: int,
    section: int,
    share: list[float],
    small: bool,
    seed: int,
) -> None:
    if not gaps:
        tensors = [(tensors[0][0], shape) for _, shape in tensors]
    named = [(f"t{number}", dtype, shape) for number, (dtype, shape) in enumerate(tensors)]
    layout = plan(named, bucket_bytes, ALIGNMENT if gaps else WITHOUT_GAPS)
    rng = torch.Generator().manual_seed(seed)
    old = random_bytes(layout, rng)
    new = moved(old, share[: len(old)], rng, small=small)
    # as a publisher takes it, or one that no publisher takes
    width = forced if gaps else 0
    widths = [width or min(ITEM_SIZES[entry.dtype] for entry in entries) for entries in layout.by_bucket()]
    before, staged = digests(old, layout), [bucket.clone() for bucket in old]
    updates = updates_of(staged, new, widths, section)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(carried, "PRICE", 0)
        grown = carried.apply(updates, layout)
    assert all(torch.equal(found, right) for found, right in zip(staged, new, strict=True))
    after = digests(new, layout)
    assert {name: add((before[name], value)) for name, value in grown.items()} == {n: after[n] for n in grown}
    assert set(after) - set(grown) == whole_ones(updates, layout)


@pytest.mark.parametrize(("share", "expected"), [(0.01, {"w", "same"}), (0.15, {"same"})])
def test_what_has_changed_so_much_that_it_is_more_work_is_not_carried(share: float, expected: set[str]) -> None:
    layout = plan([("w", "bfloat16", (8000,)), ("same", "bfloat16", (40,))], 16_000)
    rng = torch.Generator().manual_seed(1)
    old = random_bytes(layout, rng)
    new = moved(old, [share, 0.0], rng, small=True)
    assert set(carried.apply(updates_of(old, new, [2, 2], 10_000), layout)) == expected


# ---- what a subscriber makes of it --------------------------------------------------------------------------

LAYOUT = plan([("a", "bfloat16", (900,)), ("b", "bfloat16", (900,)), ("norm", "float32", (30,))], 10_000)


def staged(rng: torch.Generator) -> tuple[Staging, Manifest]:
    staging = Staging()
    staging.prepare(LAYOUT)
    for bucket, drawn in zip(staging.buckets, random_bytes(LAYOUT, rng), strict=True):
        bucket.copy_(drawn)
    manifest = LAYOUT.with_digests(digests(staging.buckets, LAYOUT))
    staging.prepare(manifest)
    assert staging.corrupt() == []
    return staging, manifest


def test_only_what_was_not_carried_is_looked_at_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(2)
    staging, _ = staged(rng)
    new = moved(staging.buckets, [0.01], rng, small=True)
    manifest = LAYOUT.with_digests(digests(new, LAYOUT))
    looked_at: list[int] = []

    def spied(parts: Any) -> list[int]:
        parts = list(parts)
        looked_at.extend(part.tensor.numel() for part in parts)
        return slice_digests(parts)

    monkeypatch.setattr("weight_bus.staging.slice_digests", spied)
    updates = updates_of(staging.buckets, new, [2], 10_000)
    staging.follow(manifest, carried.apply(updates, LAYOUT))
    assert staging.corrupt() == [] and looked_at == [30]
    staging.buckets[0][5] ^= 1
    assert staging.corrupt() == ["a"], "afterwards all bytes are looked at"


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_change_that_makes_other_bytes_is_named(name: str) -> None:
    rng = torch.Generator().manual_seed(3)
    staging, _ = staged(rng)
    new = moved(staging.buckets, [0.01], rng, small=True)
    manifest = LAYOUT.with_digests(digests(new, LAYOUT))
    entry = next(entry for entry in LAYOUT.entries if entry.name == name)
    new[0][entry.offset + 100] ^= 4
    staging.follow(manifest, carried.apply(updates_of(staging.buckets, new, [2], 10_000), LAYOUT))
    assert staging.corrupt() == [name]


def test_a_version_that_comes_whole_carries_nothing() -> None:
    staging, manifest = staged(torch.Generator().manual_seed(4))
    staging.follow(manifest, dict.fromkeys("ab", 0))
    staging.prepare(manifest)
    staging.buckets[0][5] ^= 1
    assert staging.corrupt() == ["a"]


def test_tensors_that_change_places_are_looked_at() -> None:
    """In buckets of the same sizes, where their digests would be right by name and wrong by place."""
    rng = torch.Generator().manual_seed(5)
    staging, manifest = staged(rng)
    transport: Any = SimpleNamespace(device=CPU)
    intake = Intake(transport, "run")
    intake.staging, intake._holds = staging, manifest.digest
    exchanged = plan([("b", "bfloat16", (900,)), ("a", "bfloat16", (900,)), ("norm", "float32", (30,))], 10_000)
    coded = coding.encode(staging.buckets[0], staging.buckets[0].clone(), 2).joined(CPU)
    for piece in intake._reader.room(coded.numel(), coded.numel()):
        piece.copy_(coded)
    begin: Any = SimpleNamespace(base=manifest.digest, version=2, wire_bytes=coded.numel(), change_bytes=coded.numel())
    intake._change(begin, exchanged.with_digests(manifest.digests))
    assert staging.corrupt() == ["b", "a"]


def test_a_reader_that_knows_no_layout_carries_nothing() -> None:
    old = random_bytes(LAYOUT, torch.Generator().manual_seed(6))
    coded = coding.encode(old[0], old[0].clone(), 2).joined(CPU)
    reader = ChangeReader(CPU)
    reader.room(coded.numel(), coded.numel())[0].copy_(coded)
    assert reader.apply(old, coded.numel(), coded.numel()) == {}
    assert reader.apply(old, coded.numel(), coded.numel(), LAYOUT) == dict.fromkeys(("a", "b", "norm"), 0)
