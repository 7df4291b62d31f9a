"""Messages on the wire are the frozen ones of their schema version, byte for byte."""

import base64
import json
from pathlib import Path

import pytest

from replay import messages as replay_messages
from replay.channel.frames import SCHEMA_VERSION, decode, encode
from weight_bus import messages as bus_messages

FOLDER = Path(__file__).parent
FROZEN = json.loads((FOLDER / "wire_frames_6.json").read_text())
KINDS = {
    "replay": {**replay_messages.TO_REPLAY, **replay_messages.FROM_REPLAY},
    "weight_bus": {**bus_messages.TO_PUBLISHER, **bus_messages.TO_SUBSCRIBER},
}


def test_the_schema_version_is_the_frozen_one() -> None:
    """A new version needs frozen frames of its own."""
    assert FROZEN["schema"] == SCHEMA_VERSION


def test_every_kind_of_message_is_frozen() -> None:
    assert set(FROZEN["frames"]) == {f"{owner}.{kind}" for owner, kinds in KINDS.items() for kind in kinds}


GREW: set[str] = set()
"""Messages with a field more since, which has a default. They are no part of a journal, and PROTOCOL of
weight_bus/transports/base.py keeps releases apart that differ in it."""


@pytest.mark.parametrize("name", sorted(FROZEN["frames"]))
def test_a_frozen_message_is_read_and_written_again_alike(name: str) -> None:
    frames, kinds = [base64.b64decode(frame) for frame in FROZEN["frames"][name]], KINDS[name.split(".")[0]]
    written = frames
    for same in (name not in GREW, True):
        before, envelope = written, decode(written, kinds)
        written = [bytes(frame) for frame in encode(envelope.message, "frozen", 7)]
        assert (written == before) == same
