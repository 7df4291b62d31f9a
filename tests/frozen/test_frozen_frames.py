"""Messages on the wire are those of commit a694bf1, byte for byte, as long as the schema version is."""

import base64
import json
from pathlib import Path

import pytest

from replay import messages as replay_messages
from replay.channel.frames import SCHEMA_VERSION, decode, encode
from weight_bus import messages as bus_messages

FROZEN = json.loads((Path(__file__).parent / "wire_frames.json").read_text())
KINDS = {
    "replay": {**replay_messages.TO_REPLAY, **replay_messages.FROM_REPLAY},
    "weight_bus": {**bus_messages.TO_PUBLISHER, **bus_messages.TO_SUBSCRIBER},
}


def test_the_schema_version_is_the_frozen_one() -> None:
    """A new version needs frozen frames of its own, beside a test that the old ones are refused by their version."""
    assert FROZEN["schema"] == SCHEMA_VERSION


def test_every_kind_of_message_is_frozen() -> None:
    assert set(FROZEN["frames"]) == {f"{owner}.{kind}" for owner, kinds in KINDS.items() for kind in kinds}


@pytest.mark.parametrize("name", sorted(FROZEN["frames"]))
def test_a_frozen_message_is_read_and_written_again_alike(name: str) -> None:
    frames = [base64.b64decode(frame) for frame in FROZEN["frames"][name]]
    envelope = decode(frames, KINDS[name.split(".")[0]])
    assert [bytes(frame) for frame in encode(envelope.message, "frozen", 7)] == frames
