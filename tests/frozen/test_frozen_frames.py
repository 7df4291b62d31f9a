"""Messages on the wire are the frozen ones of their schema version, byte for byte; those of commit a694bf1 are refused.

Schema 3 differs from 2 in Group, which has `policies`. Journals may hold messages of schema 2.
"""

import base64
import json
from pathlib import Path

import pytest

from replay import messages as replay_messages
from replay.channel import WireError
from replay.channel.frames import SCHEMA_VERSION, decode, encode
from weight_bus import messages as bus_messages

FROZEN = json.loads((Path(__file__).parent / "wire_frames_3.json").read_text())
OF_A694BF1 = json.loads((Path(__file__).parent / "wire_frames.json").read_text())
KINDS = {
    "replay": {**replay_messages.TO_REPLAY, **replay_messages.FROM_REPLAY},
    "weight_bus": {**bus_messages.TO_PUBLISHER, **bus_messages.TO_SUBSCRIBER},
}


def test_the_schema_version_is_the_frozen_one() -> None:
    """A new version needs frozen frames of its own, beside a test that the old ones are refused by their version."""
    assert OF_A694BF1["schema"] == 2
    assert FROZEN["schema"] == SCHEMA_VERSION


def test_every_kind_of_message_is_frozen() -> None:
    assert set(FROZEN["frames"]) == {f"{owner}.{kind}" for owner, kinds in KINDS.items() for kind in kinds}


GREW = {"weight_bus.Begin", "replay.Hello"}
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


@pytest.mark.parametrize("name", sorted(OF_A694BF1["frames"]))
def test_a_message_of_schema_2_is_refused_by_its_version_and_read_from_journals(name: str) -> None:
    frames = [base64.b64decode(frame) for frame in OF_A694BF1["frames"][name]]
    kinds = KINDS[name.split(".")[0]]
    with pytest.raises(WireError, match="schema version 2, this side speaks 3; update the older side"):
        decode(frames, kinds)
    if name in ("replay.Group", "replay.EvaluationResult"):
        assert name.endswith(type(decode(frames, kinds, oldest_schema=2).message).__name__)
