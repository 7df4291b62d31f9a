"""What has changed between two versions of a bucket, lossless: gaps between changed elements and differences of bits.

At the learning rates of RL only about one bf16 element in a hundred changes in a step (PULSE, arXiv 2602.03839), and
nine in ten of those by one unit in the last place. So a version travels as two bytes a changed element: how many
unchanged ones lie before it, and the zigzag-coded difference of its bits as integers. 255 in either byte says that the
number stands, whole, in a list behind.

A bucket is cut into sections of at most SECTION elements, each coded by itself:

    kind  u8   0 nothing changed, 1 coded, 2 the new bytes as they are
    width u8   bytes an element: 2 or 4
    zero  u16
    elements, changed, long gaps, long differences   u32 each
    zero  u32
    then, each padded to 8 bytes:  gaps u8, differences u8, long gaps i32, long differences i16 or i32

All of it is torch operations, so that either side may be a CPU or a GPU. Integers wrap, and every bit pattern, NaN
too, comes back as it was. Applied to another base it gives nonsense: who decodes knows the base and proves the result.
"""

import struct
from collections.abc import Iterator, Sequence

import torch

from replay.channel import WireError

SECTION = 1 << 26
HEADER = struct.Struct("<BBHIIIII")
ALIGN = 8
LONG = 255
SAME, CODED, WHOLE = 0, 1, 2
INTEGERS = {2: torch.int16, 4: torch.int32}
WORTH = 0.5
"""A coded section or version that is not below this share of its bytes is sent whole."""


def encode(old: torch.Tensor, new: torch.Tensor, width: int, section: int = SECTION) -> torch.Tensor:
    """The change from `old` to `new`.

    Args:
        old: flat uint8, a bucket.
        new: the same size, on the same device.
        width: bytes an element: 2, or 4 where every number of the bucket has so many.
        section: most elements that are coded at once; needs about 9 bytes for each of them meanwhile.

    Returns:
        Flat uint8 on that device, at most `most_bytes` long.
    """
    was, now = old.view(INTEGERS[width]), new.view(INTEGERS[width])
    parts: list[torch.Tensor] = []
    for first in range(0, now.numel(), section):
        parts += _section(was[first : first + section], now[first : first + section], width)
    return torch.cat(parts) if parts else new[:0]


def most_bytes(num_bytes: int, width: int, section: int = SECTION) -> int:
    """The longest that a change of a bucket of `num_bytes` can be."""
    sections = -(-num_bytes // (width * section))
    return num_bytes + sections * (HEADER.size + ALIGN)


def apply(bucket: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Turn a bucket that holds the base into the next version, in place.

    Nothing is written before all of it has been checked against the bucket's size.

    Args:
        bucket: flat uint8.
        change: flat uint8 on the same device; other changes may follow in it.

    Returns:
        What is left of `change`.

    Raises:
        WireError: it does not fit the bucket.
    """
    done, writes = 0, []
    while done < bucket.numel():
        kind, width, elements, columns, change = _read_section(change)
        size = elements * width
        if not 0 < size <= bucket.numel() - done or (done % width):
            raise WireError(f"a change of {size} bytes from byte {done} on, of a bucket of {bucket.numel()}")
        place = bucket[done : done + size].view(INTEGERS[width])
        writes.append((kind, place, _decoded(kind, place, columns)))
        done += size
    for kind, place, (index, values) in writes:
        if kind == WHOLE:
            place.copy_(values)
        elif kind == CODED:
            place[index] += values
    return change


# ---- one section --------------------------------------------------------------------------------------------


def _section(was: torch.Tensor, now: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    index = torch.nonzero(now != was).view(-1)
    changed = index.numel()
    if changed == 0:
        yield _header(now, SAME, width, now.numel())
        return
    gaps = torch.diff(index, prepend=index.new_full((1,), -1)) - 1
    # A difference of integers wraps; its sign is spread over all bits, so that small ones of either sign are small.
    difference = now[index] - was[index]
    zigzag = (difference << 1) ^ (difference >> (8 * width - 1))
    long_gap, long_value = gaps >= LONG, (zigzag < 0) | (zigzag >= LONG)
    columns = [
        torch.where(long_gap, LONG, gaps).to(torch.uint8),
        torch.where(long_value, LONG, zigzag).to(torch.uint8),
        gaps[long_gap].to(torch.int32).view(torch.uint8),
        zigzag[long_value].view(torch.uint8),
    ]
    if sum(column.numel() for column in columns) >= WORTH * now.numel() * width:
        yield _header(now, WHOLE, width, now.numel())
        yield from _padded(now.view(torch.uint8))
        return
    yield _header(now, CODED, width, now.numel(), changed, columns[2].numel() // 4, columns[3].numel() // width)
    for column in columns:
        yield from _padded(column)


def _header(like: torch.Tensor, kind: int, width: int, elements: int, *counts: int) -> torch.Tensor:
    changed, long_gaps, long_values = counts or (0, 0, 0)
    packed = HEADER.pack(kind, width, 0, elements, changed, long_gaps, long_values, 0)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(like.device)


def _padded(column: torch.Tensor) -> Iterator[torch.Tensor]:
    yield column
    if column.numel() % ALIGN:
        yield column.new_zeros(ALIGN - column.numel() % ALIGN)


def _read_section(change: torch.Tensor) -> tuple[int, int, int, Sequence[torch.Tensor], torch.Tensor]:
    """Kind, width, elements, columns, and what follows."""
    if change.numel() < HEADER.size:
        raise WireError(f"a change ends within a header, after {change.numel()} bytes")
    header = HEADER.unpack(change[: HEADER.size].cpu().numpy().tobytes())
    kind, width, zero, elements, changed, long_gaps, long_values, end = header
    if kind > WHOLE or width not in INTEGERS or zero or end or max(long_gaps, long_values) > changed:
        raise WireError(f"a change has a header that cannot be: {header}")
    sizes = {SAME: [], WHOLE: [elements * width], CODED: [changed, changed, 4 * long_gaps, width * long_values]}[kind]
    columns, at = [], HEADER.size
    for size in sizes:
        if at + size > change.numel():
            raise WireError(f"a change ends after {change.numel()} bytes, its columns at byte {at + size}")
        columns.append(change[at : at + size])
        at += size + -size % ALIGN
    return kind, width, elements, columns, change[at:]


def _decoded(kind: int, place: torch.Tensor, columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where to write, and what to write or add."""
    if kind == SAME:
        return place[:0], place[:0]
    if kind == WHOLE:
        return place[:0], columns[0].view(place.dtype)
    index = torch.cumsum(_lengthened(columns[0], columns[2].view(torch.int32).to(torch.int64)) + 1, 0) - 1
    zigzag = _lengthened(columns[1], columns[3].view(place.dtype))
    forwards = not bool((columns[2].view(torch.int32) < LONG).any())
    if not forwards or index.numel() == 0 or int(index[-1]) >= place.numel():
        raise WireError(f"a change of {index.numel()} elements does not fit {place.numel()}")
    half = (zigzag >> 1) & torch.iinfo(place.dtype).max  # a logical shift
    return index, half ^ -(zigzag & 1)


def _lengthened(column: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
    """A byte column with its long numbers in their places. Raises WireError when there are not as many as places."""
    places = torch.nonzero(column == LONG).view(-1)
    if places.numel() != long.numel():
        raise WireError(f"a change has {long.numel()} long numbers for {places.numel()} places")
    numbers = column.to(long.dtype)
    numbers[places] = long
    return numbers
