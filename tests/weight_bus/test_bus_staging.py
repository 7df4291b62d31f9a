"""Packing and staging: layout, reuse of buffers, refusals, and what Begin carries of a manifest."""

import dataclasses

import pytest
import torch

from replay.channel import WireError
from tests.support.bus_receiver import digests, weights
from weight_bus.errors import NonFiniteWeights
from weight_bus.manifest import Manifest
from weight_bus.messages import Begin, described, manifest_of
from weight_bus.packing import Packer, Pieces
from weight_bus.staging import Staging

BUCKET_BYTES = 300_000


def begin_of(version: int) -> Begin:
    named = weights(version)
    layout, _ = Packer(BUCKET_BYTES).pack(named.items(), 0)
    manifest = layout.with_digests(digests(named))
    place = {"session": "s", "epoch": 1, "incarnation": 1, "rank": 1, "size": 2, "endpoint": "127.0.0.1:1"}
    about = {"version": version, "evaluate": False, "bucket_bytes": BUCKET_BYTES}
    return Begin(**place, **about, **described(manifest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_cast_and_put_together_in_their_bucket(dtype):
    whole = {name: tensor.float() for name, tensor in weights(1).items()} | {"empty": torch.zeros(0, 3)}
    pieces = {}
    for name, tensor in whole.items():
        parts = [part.reshape(-1) for part in tensor.tensor_split((0, 2, 7))]  # the first has no rows
        pieces[name] = Pieces(tuple(tensor.shape), dtype, parts)
        assert torch.equal(pieces[name].whole(), tensor.to(dtype))
    packer = Packer(BUCKET_BYTES)
    expected = Packer(BUCKET_BYTES).pack([(n, t.to(dtype)) for n, t in whole.items()], 0)[1]
    for into in (0, 1, 0):
        _, buckets = packer.pack(pieces.items(), into)
        assert all(torch.equal(found, right) for found, right in zip(buckets, expected, strict=True))
    broken = {**pieces, "norm.weight": Pieces((33,), dtype, pieces["norm.weight"].parts[:-1])}
    with pytest.raises(ValueError, match="do not make up"):
        packer.pack(broken.items(), 1)


def test_nothing_is_allocated_after_two_updates():
    packer, staging = Packer(BUCKET_BYTES), Staging()
    seen: list[list[int]] = []
    staged: list[list[int]] = []
    for version in range(6):
        layout, buckets = packer.pack(weights(version).items(), version % 2)
        seen.append([bucket.data_ptr() for bucket in buckets])
        staging.prepare(layout.with_digests(digests(weights(version))))
        for target, source in zip(staging.buckets, buckets, strict=True):
            target.copy_(source)
        staged.append([bucket.data_ptr() for bucket in staging.buckets])
        assert staging.corrupt() == []
    assert seen[2] == seen[4] == seen[0] and seen[3] == seen[5] == seen[1]
    assert not set(seen[0]) & set(seen[1]), "what is retained for joins is not written to"
    assert all(pointers == staged[0] for pointers in staged)


def test_a_non_finite_value_is_found_in_a_bucket_of_two_dtypes():
    named = {"wide": torch.ones(5), "narrow": torch.ones(5, dtype=torch.bfloat16)}
    packer = Packer(BUCKET_BYTES)
    packer.pack(named.items(), 0)
    for name in named:
        spoilt = {**named, name: named[name].clone().index_fill_(0, torch.tensor([3]), float("nan"))}
        with pytest.raises(NonFiniteWeights, match=f"'{name}' has 1 non-finite of 5"):
            packer.pack(spoilt.items(), 1)


def test_a_layout_never_changes_within_a_run():
    packer = Packer(BUCKET_BYTES)
    named = weights(1)
    packer.pack(named.items(), 0)
    one, step = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    for used, wrong, said in (
        (packer, list(named.items())[:-1], r"ends before tensor 'norm\.weight'"),
        (packer, [*named.items(), ("more", one)], "changed its layout"),
        (packer, weights(1, dtype=torch.float16).items(), "changed its layout"),
        (Packer(BUCKET_BYTES), [("step", step)], r"torch\.int64"),
        (Packer(BUCKET_BYTES), [("w", one), ("w", one)], "'w' appears twice"),
    ):
        with pytest.raises(ValueError, match=said):
            used.pack(wrong, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"names": ["a"]}, "differ in length"),
        ({"rank": 0}, "rank 0/2"),
        ({"rank": 2}, "rank 2/2"),
        ({"bucket_bytes": 0}, "bucket_bytes 0"),
        ({"digest": "0" * 32}, "is not that of its tensors"),
        ({"dtypes": ["int64"] * 6}, "int64"),
        ({"names": ["a"] * 6}, "appears twice"),
        ({"shapes": [[1], [1], [-3, -3], [1], [1], [1]]}, r"shape \[-3, -3\]"),
        ({"shapes": [[1 << 62]] * 6}, "is above"),
        ({"kept": {"norm.weight": 1}}, "first difference: 'norm.weight'"),
        ({"kept": {"other": 1}}, "is not that of its tensors"),
    ],
)
def test_a_begin_that_does_not_fit_together_is_refused(change, reason):
    with pytest.raises(WireError, match=reason):
        manifest_of(dataclasses.replace(begin_of(1), **change))


def test_a_manifest_that_no_memory_holds_is_refused_by_size():
    staging = Staging()
    with pytest.raises(WireError, match="a manifest of 1152921504606846976 bytes does not fit into the memory here"):
        staging.prepare(Manifest((), (2**60,)))
    staging.prepare(Manifest((), (64,)))
    assert [bucket.numel() for bucket in staging.buckets] == [64], "and the next one is received as always"
