"""Packing and staging: layout, reuse of buffers, refusals, and what Begin carries of a manifest."""

import dataclasses
import time
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from replay.channel import WireError, decode
from tests.support.bus_receiver import CONFIG, digests, weights
from tests.weight_bus.test_bus_membership import admitted, asks, made
from weight_bus.bus import Bus
from weight_bus.control import Router
from weight_bus.errors import NonFiniteWeights
from weight_bus.manifest import Layout, Manifest, plan
from weight_bus.messages import TO_SUBSCRIBER, Begin, described, digest_array, layout_of, manifest_of
from weight_bus.packing import Packer, Pieces
from weight_bus.staging import Staging

BUCKET_BYTES = 300_000


def manifest(version: int) -> Manifest:
    named = weights(version)
    layout, _ = Packer(BUCKET_BYTES, kept=["base"]).pack(named.items(), 0)
    return layout.with_digests({**digests(named), "base": 2**64 - 1})


def begin_of(manifest: Manifest) -> Begin:
    place = {"epoch": 1, "incarnation": 1, "ranks": {"s": 1}, "size": 2, "endpoint": "127.0.0.1:1"}
    about = {"version": 1, "evaluate": False, "bucket_bytes": BUCKET_BYTES, "layout": manifest.layout.id}
    return Begin(**place, **about, digests=digest_array(manifest), digest=manifest.digest)


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
        ({"ranks": {"s": 0}}, "rank 0/2"),
        ({"ranks": {"s": 2}}, "rank 2/2"),
        ({"bucket_bytes": 0}, "bucket_bytes 0"),
        ({"digest": "0" * 32}, "is not that of its tensors"),
        ({"digests": np.zeros(7, np.int64)}, "is not that of its tensors"),
        ({"digests": np.zeros(6, np.int64)}, "6 digests of 7 tensors"),
        ({"layout": "another"}, "'another' has not come"),
    ],
)
def test_a_begin_that_does_not_fit_together_is_refused(change, reason):
    expected = manifest(1)
    begin = begin_of(expected)
    assert manifest_of(begin, expected.layout).digests == expected.digests
    with pytest.raises(WireError, match=reason):
        manifest_of(dataclasses.replace(begin, **change), expected.layout)


HALVES = [[0, 0, 0, 500, 100], [0, 0, 100, 500, 157], *([i, 0, 0, 500, 257] for i in range(1, 5)), [5, 0, 33]]
"""A matrix in two boxes, the others whole."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"names": ["a"]}, "differ in length"),
        ({"bucket_bytes": 0}, "bucket_bytes 0"),
        ({"dtypes": ["int64"] * 6}, "int64"),
        ({"names": ["a"] * 6}, "appears twice"),
        ({"shapes": [[1], [1], [-3, -3], [1], [1], [1]]}, r"shape \[-3, -3\]"),
        ({"shapes": [[1 << 62]] * 6}, "is above"),
        ({"kept": ["norm.weight"]}, "comes twice, or travels"),
        ({"kept": ["other"]}, "is not that of its tensors"),
        ({"boxes": HALVES}, "is not that of its tensors"),
        ({"boxes": [HALVES[0], *HALVES]}, "appears twice"),
        ({"boxes": [[0, 1, 0, 500, 257]]}, r"box of shape \[500, 257\] at \[1, 0\]"),
        ({"boxes": [[0, -1, 0, 500, 257]]}, r"box of shape \[500, 257\] at \[-1, 0\]"),
        ({"boxes": [[0, 0, 500]]}, "a box"),
        ({"boxes": [[6, 0, 33]]}, "a box"),
        ({"boxes": [[]]}, "a box"),
    ],
)
def test_a_layout_that_does_not_fit_together_is_refused(change, reason):
    expected = manifest(1).layout
    new = described(expected, BUCKET_BYTES)
    assert layout_of(new) == expected
    with pytest.raises(WireError, match=reason):
        layout_of(dataclasses.replace(new, **change))


def test_digests_of_boxes_add_up_to_those_of_their_tensors():
    """Boxes of a matrix in any order, also where rows and columns are cut."""
    rows, columns, named = ((0, 7), (7, 13)), ((0, 100), (100, 157)), weights(1, rows=20)
    whole = named["layers.0.weight"]
    boxes = [("w", "bfloat16", (h, w), (r, c), (20, 257)) for c, w in columns for r, h in rows]
    layout = layout_of(described(plan([*boxes, ("norm", "float32", (33,))], 3000), 3000))
    assert len(layout.bucket_sizes) > 1 and layout.names == ("w", "norm")
    staging = Staging()
    sums = digests({"w": whole, "norm": named["norm.weight"]})
    staging.prepare(layout.with_digests(sums))
    for entry, (_, held) in zip(layout.entries, staging.tensors(), strict=True):
        source = whole if entry.name == "w" else named["norm.weight"]
        held.copy_(source[tuple(slice(s, s + n) for s, n in zip(entry.start, entry.shape, strict=True))])
    assert staging.corrupt() == [] and staging.sums() == sums
    next(iter(staging.tensors()))[1][3, 4] += 1
    assert staging.corrupt() == ["w"]


def test_what_begins_an_update_of_many_tensors_is_made_and_encoded_once_for_all_servers():
    """18,819 tensors and 256 servers, as for Qwen3-30B-A3B: 6.8 ms a server before."""
    layout = plan([(f"model.layers.{i}.weight", "bfloat16", (i + 1,)) for i in range(18_819)], CONFIG.bucket_bytes)
    membership, queued, seconds = made(), list[tuple[str, Any]](), []
    members = [admitted(membership, asks(f"r{i}")) for i in range(256)]
    with closing(Router("127.0.0.1", 0, "r")) as router:
        router._queue = lambda identity, frames: queued.append((identity, frames)) or ""  # type: ignore
        given = {"_router": router, "_membership": membership, "_incarnation": 1, "_config": CONFIG, "_lanes": ()}
        bus: Any = SimpleNamespace(**given, _senders=SimpleNamespace(of_lane=lambda *_: {"endpoint": "127.0.0.1:1"}))
        for version in range(3):
            started = time.thread_time()
            manifest = layout.with_digests({name: version for name in layout.names})
            offer: Any = SimpleNamespace(version=version, evaluate=False, manifests=[manifest], digest=manifest.digest)
            Bus._announce(bus, offer, None, membership.main, members)
            seconds.append(time.thread_time() - started)
    everyone = [member.identity for member in members]
    assert [identity for identity, _ in queued] == 4 * everyone, "the layout once, and three times Begin"
    assert len({id(frames) for _, frames in queued}) == 4
    assert min(seconds) < 0.05
    new, begin = (decode(queued[i][1], TO_SUBSCRIBER).message for i in (0, -1))
    assert manifest_of(begin, layout_of(new)).digests == manifest.digests and begin.ranks[members[-1].session] == 256


def test_a_manifest_that_no_memory_holds_is_refused_by_size():
    staging = Staging()
    with pytest.raises(WireError, match="1152921504606846976 bytes of an update do not fit into the memory here"):
        staging.prepare(Layout((), (2**60,)).with_digests({}))
    staging.prepare(Layout((), (64,)).with_digests({}))
    assert [bucket.numel() for bucket in staging.buckets] == [64], "and the next one is received as always"
