"""Every kind of message is written today, byte for byte, as in `wire_frames.json`.

A change of a message needs another SCHEMA_VERSION once a release has spoken the present one:
`python -m tests.frozen.test_frozen_frames` writes the file anew, with defaults for fields that are new.
"""

import base64
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest

from replay import messages as replay_messages
from replay.channel.frames import CRC_BYTES, SCHEMA_VERSION, Message, decode, encode
from weight_bus import messages as bus_messages

FILE = Path(__file__).parent / "wire_frames.json"
FROZEN = json.loads(FILE.read_text())
KINDS: dict[str, type[Message]] = {
    f"{owner}.{name}": kind
    for owner, kinds in {
        "replay": {**replay_messages.TO_REPLAY, **replay_messages.FROM_REPLAY},
        "weight_bus": {**bus_messages.TO_PUBLISHER, **bus_messages.TO_SUBSCRIBER, **bus_messages.TO_SENDER},
    }.items()
    for name, kind in kinds.items()
}


def test_every_kind_of_message_is_frozen_in_this_schema() -> None:
    assert (set(FROZEN["frames"]), FROZEN["schema"]) == (set(KINDS), SCHEMA_VERSION)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_frozen_message_is_read_and_written_again_alike(name: str) -> None:
    frames = [base64.b64decode(frame) for frame in FROZEN["frames"][name]]
    message = decode(frames, {KINDS[name].__name__: KINDS[name]}).message
    assert [bytes(frame) for frame in encode(message, "frozen", 7)] == frames


def again(name: str, frozen: list[str]) -> list[str]:
    """Frames of a kind as it is now, from those of before."""
    kind, (first, *arrays) = KINDS[name], [base64.b64decode(frame) for frame in frozen]
    header: dict[str, Any] = msgpack.unpackb(first)
    held = {entry[0]: (entry, data) for entry, data in zip(header["arrays"], arrays, strict=True)}
    kept = [held.get(array, ([array, dtype, [0]], b"")) for array, dtype in kind.ARRAYS.items()]
    names = {field for field in kind.__dataclass_fields__ if field not in kind.ARRAYS}
    header["fields"] = {field: value for field, value in header["fields"].items() if field in names}
    header |= {"schema": SCHEMA_VERSION, "arrays": [entry for entry, _ in kept]}
    body = msgpack.packb(header)[:-CRC_BYTES]
    crc = zlib.crc32(body)
    for _, data in kept:
        crc = zlib.crc32(data, crc)
    frames = [body + crc.to_bytes(CRC_BYTES, "little"), *(data for _, data in kept)]
    message = decode(frames, {kind.__name__: kind}).message
    return [base64.b64encode(bytes(frame)).decode() for frame in encode(message, "frozen", 7)]


if __name__ == "__main__":
    made = {name: again(name, FROZEN["frames"][name]) for name in sorted(KINDS)}
    FILE.write_text(json.dumps({"schema": SCHEMA_VERSION, "frames": made}, indent=1) + "\n")
    sys.exit(0)
