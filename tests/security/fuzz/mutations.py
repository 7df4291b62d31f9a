"""What is done to a valid message: to its bytes, frames or values, with or without the right checksum afterwards."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from replay.channel.frames import CRC_BYTES, CRC_MARK, DTYPES, checksum

Frames = list[bytes]

RESEALED = 0.75
"""Share of mutated messages that get the right checksum for what they are now."""
DEPTH, MOST = 40, 300
"""Levels of nesting: above what a message may have, and near what msgpack itself writes."""
NASTY: Sequence[Any] = (
    None, True, False, 0, 1, -1, -2, 3, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**62, 2**62 + 1, 2**63 - 1, 2**63,
    2**64 - 1, -(2**63), 0.0, -0.0, 0.5, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "", "x", "x" * 5000,
    "\n\x1b[31mreplay: the run ends", "\u202e\U0001f600", "../../etc/passwd", "%s%s%n", "learner", "rollout_server",
    "learner-0", "r0", "float64", "object", b"", b"\0" * 16, [], {}, [[]], [[0, 0]], [[0, 0, 1, 0]],
    [[-1, -1, -1, -1]], [[0] * 5] * 3, [0] * 2000, [""] * 50, {"": None}, {"a": {"b": []}}, {"incarnation": 1},
    [2**62], [-1], [1, 1], [True],
)  # fmt: skip
INTEGERS = (0, 1, 2, -1, 2**31 - 1, -(2**31), 255, 3, 7)
SHAPES: Sequence[list[int]] = ([1, 1], [-1], [2**62], [], [True], [0])
FLOATS = (0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"), 1e-45, 3e38, -3e38)


class Mutator:
    """Changes messages as its random numbers say."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.resealed = 0
        """Mutated messages with a right checksum."""
        self.mutated = 0

    def mutate(self, frames: Frames) -> Frames:
        """The frames, changed. One in twenty stays as it is, so that the other side goes on from state to state."""
        chance = self._rng.random()
        if chance < 0.05:
            return frames
        self.mutated += 1
        if chance < 0.09:
            return [self._rng.randbytes(self._rng.randrange(80)) for _ in range(self._rng.randrange(1, 6))]
        if chance < 0.65:
            frames = self._values(frames)
        elif chance < 0.80:
            frames = self._arrays(frames)
        else:
            for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
                frames = self._frames(frames)
        if self._rng.random() < RESEALED and frames[0][:-CRC_BYTES].endswith(CRC_MARK):
            self.resealed += 1
            return seal(frames)
        return frames

    def _values(self, frames: Frames) -> Frames:
        header = msgpack.unpackb(frames[0])
        for _ in range(self._rng.choice((1, 1, 2, 5))):
            self._change(header)
        return [msgpack.packb(header), *frames[1:]]

    def _change(self, header: dict[str, Any]) -> None:
        """Another value at one place of the tree, a place less, or one more."""
        rng = self._rng
        # the fields are where most of what is checked lies; all else of a header is few values
        holder: Any = header["fields"] if rng.random() < 0.95 and isinstance(header.get("fields"), dict) else header
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                return
            key = rng.choice(keys)
            if isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.6:
                holder = holder[key]
                continue
            break
        if key == "crc":
            return
        chance = rng.random()
        if chance < 0.1:
            del holder[key]
        elif chance < 0.2 and isinstance(holder, list):
            holder.append(holder[key])
        elif chance < 0.23:
            holder[key] = self._nested()
        elif chance < 0.45 and type(holder[key]) is int:
            holder[key] = max(-(2**63), min(2**64 - 1, holder[key] + rng.choice((-2, -1, 1, 2, 1000))))
        elif chance < 0.85:  # of the same type, so that it passes for what it is not
            same = [value for value in NASTY if type(value) is type(holder[key])]
            holder[key] = copy.deepcopy(rng.choice(same or NASTY))
        else:
            holder[key] = copy.deepcopy(rng.choice(NASTY))

    def _nested(self) -> Any:
        value: Any = copy.deepcopy(self._rng.choice(NASTY))
        for _ in range(self._rng.choice((2, DEPTH, MOST))):
            value = [value] if self._rng.random() < 0.5 else {"a": value}
        return value

    def _arrays(self, frames: Frames) -> Frames:
        """Other entries, another length (with a description that fits, or not), another dtype."""
        rng = self._rng
        header = msgpack.unpackb(frames[0])
        if len(frames) == 1 or len(header["arrays"]) != len(frames) - 1:
            return self._values(frames)
        frames = list(frames)
        for _ in range(rng.choice((1, 1, 2, len(frames)))):
            number = rng.randrange(1, len(frames))
            name, dtype, _ = header["arrays"][number - 1]
            if dtype not in DTYPES or len(frames[number]) % DTYPES[dtype].itemsize:  # changed before
                continue
            array = np.frombuffer(frames[number], dtype=dtype).copy()
            entry = (
                rng.choice(FLOATS) if dtype == "float32" else rng.choice(INTEGERS) & (0xFF if dtype == "uint8" else -1)
            )
            chance = rng.random()
            if chance < 0.55 and array.size:
                array[rng.randrange(array.size)] = entry
            elif chance < 0.7:
                array = np.full(rng.choice((0, 1, 2, 500)), entry, dtype=dtype)
            elif chance < 0.8:
                array = np.resize(array, array.size + rng.choice((-1, 1)) if array.size else 3)
            elif chance < 0.9:
                dtype = rng.choice(("uint8", "int32", "int64", "float32", "float64", "object", ""))
            shape = [array.size] if rng.random() < 0.9 else rng.choice(SHAPES)
            header["arrays"][number - 1] = [name, dtype, shape]
            frames[number] = array.tobytes()
        return [msgpack.packb(header), *frames[1:]]

    def _frames(self, frames: Frames) -> Frames:
        """Other bits, lengths, numbers or order of frames."""
        rng, frames = self._rng, list(frames)
        number = rng.randrange(len(frames))
        frame = bytearray(frames[number])
        match rng.choice(("flip", "cut", "stretch", "swap", "repeat", "drop", "insert", "flood")):
            case "flip":
                for _ in range(rng.choice((1, 1, 2, 16)) if frame else 0):
                    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                frames[number] = bytes(frame)
            case "cut":
                frames[number] = bytes(frame[: rng.randrange(len(frame) + 1)])
            case "stretch":
                frames[number] += rng.randbytes(rng.choice((1, 4, 200)))
            case "swap":
                rng.shuffle(frames)
            case "repeat":
                frames.insert(number, frames[number])
            case "drop":
                del frames[number]
            case "insert":
                frames.insert(number, rng.randbytes(rng.choice((0, 4, 64))))
            case "flood":  # more frames than a message may have, now and then
                frames += [b""] * (70 if rng.random() < 0.1 else 1)
        return frames or [b""]


def seal(frames: Frames) -> Frames:
    """The frames with the checksum that belongs to them."""
    body = frames[0][:-CRC_BYTES]
    return [body + checksum(body, frames[1:]), *frames[1:]]
