"""Messages on the wire are the frozen ones of their schema version, byte for byte; those of older schemas are refused.

Schema 3 differs from 2 in Group, which has `policies`; 4 from 3 in EvaluationLease and EvaluationResult, which have
sets and several answers to a prompt; 5 from 4 in Group and Batch, whose trajectories may have several samples; 6 from 5
in the same two, whose prompts may have pictures; 7 from 6 in EvaluationLease and EvaluationResult, which say what is
asked for, Renew, which says what waits, and Batch, which has the bound of its lag. Journals may hold messages of
schemas 2 to 7; 8 made Renew an inventory, gave Refused a code, and Group and EvaluationResult what failed.
"""

import base64
import json
from pathlib import Path

import pytest

from replay import messages as replay_messages
from replay.channel import WireError
from replay.channel.frames import SCHEMA_VERSION, decode, encode
from weight_bus import messages as bus_messages

FOLDER = Path(__file__).parent
FROZEN = json.loads((FOLDER / "wire_frames_8.json").read_text())
OLDER = {2: json.loads((FOLDER / "wire_frames.json").read_text())}
OLDER |= {schema: json.loads((FOLDER / f"wire_frames_{schema}.json").read_text()) for schema in (3, 4, 5, 6)}
KINDS = {
    "replay": {**replay_messages.TO_REPLAY, **replay_messages.FROM_REPLAY},
    "weight_bus": {**bus_messages.TO_PUBLISHER, **bus_messages.TO_SUBSCRIBER},
}


def test_the_schema_version_is_the_frozen_one() -> None:
    """A new version needs frozen frames of its own, beside a test that the old ones are refused by their version."""
    assert {version: frozen["schema"] for version, frozen in OLDER.items()} == {2: 2, 3: 3, 4: 4, 5: 5, 6: 6}
    assert FROZEN["schema"] == SCHEMA_VERSION


def test_every_kind_of_message_is_frozen() -> None:
    assert set(FROZEN["frames"]) == {f"{owner}.{kind}" for owner, kinds in KINDS.items() for kind in kinds}


GREW: set[str] = set()
"""Messages with a field more since, which has a default. They are no part of a journal. A peer of a release before
refuses such a message by the name of the field; PROTOCOL of weight_bus/transports/base.py keeps others apart."""


@pytest.mark.parametrize("name", sorted(FROZEN["frames"]))
def test_a_frozen_message_is_read_and_written_again_alike(name: str) -> None:
    frames, kinds = [base64.b64decode(frame) for frame in FROZEN["frames"][name]], KINDS[name.split(".")[0]]
    written = frames
    for same in (name not in GREW, True):
        before, envelope = written, decode(written, kinds)
        written = [bytes(frame) for frame in encode(envelope.message, "frozen", 7)]
        assert (written == before) == same


@pytest.mark.parametrize(
    ("schema", "name"), [(schema, name) for schema, frozen in OLDER.items() for name in sorted(frozen["frames"])]
)
def test_a_message_of_an_older_schema_is_refused_by_its_version_and_read_from_journals(schema: int, name: str) -> None:
    frames = [base64.b64decode(frame) for frame in OLDER[schema]["frames"][name]]
    kinds = KINDS[name.split(".")[0]]
    with pytest.raises(WireError, match=f"schema version {schema}, this side speaks 8; update the older side"):
        decode(frames, kinds)
    if name in ("replay.Group", "replay.EvaluationResult"):
        assert name.endswith(type(decode(frames, kinds, oldest_schema=2).message).__name__)
