"""The coding of changes: every bit comes back, and nothing that cannot be is written anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.channel import WireError
from weight_bus.delta import coding


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


def joined(coded: coding.Coded) -> torch.Tensor:
    return coded.joined(torch.device("cpu"))


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    elements=st.integers(0, 3000),
    width=st.sampled_from([2, 4]),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
    small=st.booleans(),
    section=st.integers(1, 4000),
)
def test_every_bit_comes_back(seed: int, elements: int, width: int, share: float, small: bool, section: int) -> None:
    old, new = changed(torch.Generator().manual_seed(seed), elements, width, share, small)
    coded = coding.encode(old, new, width, section)
    change = joined(coded)
    assert change.numel() == coded.num_bytes
    bucket = old.clone()
    coding.apply([bucket], change)
    assert torch.equal(bucket, new)
    with pytest.raises(WireError, match="bytes has columns of"):
        coding.apply([bucket], torch.cat([change, change.new_zeros(3)]))


def test_several_buckets_are_one_change() -> None:
    rng = torch.Generator().manual_seed(5)
    pairs = [changed(rng, n, width, share, True) for n, width, share in [(900, 2, 0.1), (0, 2, 0.0), (700, 4, 0.9)]]
    coded = [coding.encode(old, new, width, 300) for (old, new), width in zip(pairs, (2, 2, 4), strict=True)]
    whole = coding.Coded(b"".join(c.headers for c in coded), [column for c in coded for column in c.columns])
    buckets = [old.clone() for old, _ in pairs]
    coding.apply(buckets, joined(whole))
    assert all(torch.equal(bucket, new) for bucket, (_, new) in zip(buckets, pairs, strict=True))


def test_one_element_in_a_hundred_by_one_unit_in_the_last_place_is_80_times_smaller() -> None:
    rng = torch.Generator().manual_seed(0)
    old = (torch.randn(1_000_000, generator=rng) / 50).bfloat16().view(torch.int16)
    new = old + (torch.rand(old.numel(), generator=rng) < 0.01).short()
    coded = coding.encode(old.view(torch.uint8), new.view(torch.uint8), 2)
    assert new.numel() * 2 / coded.num_bytes > 80


def test_a_section_that_is_mostly_new_travels_whole() -> None:
    old, new = changed(torch.Generator().manual_seed(1), 1000, 2, 1.0, small=False)
    assert coding.encode(old, new, 2).headers[0] == coding.WHOLE
    assert coding.encode(old, old.clone(), 2).headers[0] == coding.SAME


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**31), flips=st.integers(1, 6), cut=st.integers(0, 40))
def test_damaged_changes_are_refused_or_stay_inside_the_bucket(seed: int, flips: int, cut: int) -> None:
    """A damaged change may decode to other numbers, which the digests find; it is never another error."""
    rng = torch.Generator().manual_seed(seed)
    old, new = changed(rng, 800, 2, 0.05, small=True)
    coded = joined(coding.encode(old, new, 2))
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


def test_a_change_for_a_larger_bucket_is_refused() -> None:
    old, new = changed(torch.Generator().manual_seed(2), 64, 2, 0.1, small=True)
    coded = joined(coding.encode(old, new, 2))
    with pytest.raises(WireError, match="of bucket 0 of 100"):
        coding.apply([old[:100].clone()], coded)
    with pytest.raises(WireError, match=r"a header that cannot be|ends within a header|from byte 128 on"):
        coding.apply([torch.cat([old, old])], coded)
