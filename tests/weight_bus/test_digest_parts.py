"""Digests of slices: the two-dimensional form that the kernel walks, and batches. tests/gpu has the kernel itself."""

import itertools
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_bus.digest import add, digester, reference_digest, slice_digest, slice_digests
from weight_bus.digest.definition import (
    CHUNK,
    HOST_CHUNK,
    SHARED_CHUNK,
    VIEWS,
    StridedRows,
    TensorSlice,
    all_rows,
    host_digest,
)

WORD = (1 << 32) - 1
DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64)


def mix(bits: int, index: int) -> int:
    """The definition, one element at a time; bits as a signed number (one byte: unsigned)."""
    if not -(1 << 31) <= bits < 1 << 31:
        bits = bits % (1 << 32) + (bits >> 32) * 0xC2B2AE3D
    h = (bits * 0x9E3779B1 + (index + 1) * 0x85EBCA77) & WORD
    h = (h ^ (h >> 16)) * 0x7FEB352D & WORD
    h = (h ^ (h >> 15)) * 0x846CA68B & WORD
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h


def walked(rows: StridedRows) -> int:
    """What a kernel that walks these rows finds."""
    bits = rows.values.contiguous().view(VIEWS[rows.values.element_size()]).tolist()
    return add([mix(b, rows.base + r * rows.row_step + c) for r, row in enumerate(bits) for c, b in enumerate(row)])


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (math.prod(shape) * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@settings(max_examples=150)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), data=st.data())
def test_slices_of_all_kinds_are_walked_in_two_dimensions(shape, dtype, data):
    whole = random_tensor(shape, dtype, 1)
    flip = data.draw(st.booleans()) and len(shape) > 1
    source = whole.transpose(0, -1).contiguous().transpose(0, -1) if flip else whole
    cuts = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    piece = source[tuple(slice(low, high) for low, high in cuts)]
    part = TensorSlice(piece, shape, [low for low, _ in cuts])
    numbers = whole.reshape(-1).view(VIEWS[whole.element_size()]).tolist()
    places = itertools.product(*(range(n) for n in shape))
    taken = [all(low <= i < high for i, (low, high) in zip(place, cuts, strict=True)) for place in places]
    expected = add([mix(b, i) for i, (b, inside) in enumerate(zip(numbers, taken, strict=True)) if inside])
    assert reference_digest(part) == slice_digest(*part[:3]) == expected
    rows = all_rows(part)
    assert all(found.values.shape[1] == 1 or found.values.stride(1) == 1 for found in rows)
    assert add([walked(found) for found in rows]) == expected


@pytest.mark.parametrize("first", [0, 1, (1 << 31) - 5, (1 << 32) - 40_000, (1 << 33) + 3])
def test_long_tensors_are_the_sum_of_their_pieces_at_any_place(first):
    """Over the borders of what is mixed at once, and of 32-bit positions."""
    part, shape = random_tensor((2 * CHUNK + 77,), torch.int16, 9), ((1 << 34),)
    cuts = [0, 5, CHUNK - 1, CHUNK + 3, 2 * CHUNK, part.numel()]
    pieces = [slice_digest(part[a:b], shape, (first + a,)) for a, b in itertools.pairwise(cuts)]
    assert add(pieces) == slice_digest(part, shape, (first,))
    for place in (5, CHUNK - 1, 2 * CHUNK + 76):
        expected = mix(int(part[place]), first + place) % (1 << 64)
        assert slice_digest(part[place : place + 1], shape, (first + place,)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [0, (1 << 31) - 5, (1 << 32) - 40_000, (1 << 33) + 3])
def test_numpy_and_torch_agree_at_any_place(dtype, first, monkeypatch):
    """Whichever the number of threads chooses."""
    values = random_tensor((12_345,), dtype, 10)
    part = TensorSlice(values, (1 << 34,), (first,))
    rows = StridedRows(values.view(1, -1), first, 0)
    found = host_digest(rows, dtype, 5000)
    assert found == reference_digest(part) == host_digest(rows, dtype, 12_345) == host_digest(rows, dtype)
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert slice_digests([part]) == [found]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_what_one_would_digest(threads, monkeypatch):
    """Many tensors and a long one, of which each thread takes pieces; and a slice that is no single row."""
    monkeypatch.setattr(digester, "HOST_THREADS", threads)
    monkeypatch.setattr(digester, "PIECE", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    begun, chunks = [], set()

    def noted(rows, dtype, chunk=HOST_CHUNK):
        begun.append(threading.get_ident())
        chunks.add(chunk)
        return host_digest(rows, dtype, chunk)

    monkeypatch.setattr(digester, "host_digest", noted)
    parts = [TensorSlice(random_tensor((size,), torch.bfloat16, size)) for size in (1, 999, 1000, 1001, 2000, 54_321)]
    parts += [
        TensorSlice(random_tensor((30, 40), torch.int16, 3)[:, 7:20], (30, 40), (0, 7)),
        TensorSlice(torch.empty(0)),
    ]
    assert slice_digests(parts) == [reference_digest(part) for part in parts]
    assert len(begun) == 1 + 1 + 1 + 2 + 2 + 55
    assert (threading.get_ident() in begun) == (threads == 1)
    assert chunks == {HOST_CHUNK if threads == 1 else SHARED_CHUNK}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rounded_part_is_digested_as_it_is_after_the_cast(dtype):
    master = torch.randn(300, 7, generator=torch.Generator().manual_seed(4))
    (found,) = slice_digests([TensorSlice(master[5:], (300, 7), (5, 0), dtype)])
    assert found == slice_digest(master[5:].to(dtype), (300, 7), (5, 0))
