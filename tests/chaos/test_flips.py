"""Flipped bits in weight updates: found, healed, never served; and a rig that notices when they are served."""

import json

import pytest

from scripts.chaos.__main__ import main
from scripts.chaos.campaigns.flips import ALL, Flip, Flips
from weight_bus.staging import Staging

UPDATES, EVERY = 24, 2


@pytest.mark.parametrize("more", [[], ["--delta"]], ids=["whole", "delta"])
def test_every_flipped_bit_is_found_and_healed_and_none_is_served(capsys, more):
    arguments = ["weights", "flips", "--updates", str(UPDATES), "--every", str(EVERY), "--seed", "3", *more]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    planted = sum(found["planted"].values())
    assert planted == UPDATES // EVERY and {"wire", "staged", "live"} <= found["planted"].keys()
    assert found["found"] == found["healed"] == planted - found["harmless"]
    assert more or found["harmless"] == 0, "each byte of a whole version belongs to a tensor"
    assert found["served_corrupt"] == 0 and found["digests_equal"] is True


def test_a_flip_in_the_base_of_a_change_is_found_among_live_weights_and_healed_by_a_refill():
    with Flips(3, delta=True) as made:
        for planted in (None, Flip("base", "receiver-1", "embed", byte=40, bit=6), None):
            made.update(planted)
        (line,) = (line for line in made.lines if "quarantined" in line)
        assert "'receiver-1'" in line and "v3: quarantined: 1 tensors of the engine differ, first 'embed'" in line
        assert made.counts["found"]["base"] == made.counts["healed"]["base"] == 1 and not made.wrong
        assert not made.oracle.wrong


def test_bits_at_rest_are_reported_as_what_the_bus_cannot_see():
    with Flips(4, at_rest_every=0.1) as made:
        at_rest = made.run(6, 6)["at_rest"]
    assert at_rest["planted"] >= 4
    assert at_rest["found"] == 0 and at_rest["served"] == at_rest["overwritten"] == at_rest["planted"]


def test_without_the_proof_of_staged_bytes_the_live_digest_still_finds_them(monkeypatch):
    monkeypatch.setattr(Staging, "corrupt", lambda self: [])
    with Flips(3) as made:
        for victim in ("receiver-0", ALL):
            made.update(Flip("wire", victim, "embed", byte=5, bit=3))
        assert made.counts["healed"]["wire"] == 2 and not made.oracle.wrong


def test_a_flip_that_nobody_names_is_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Flip, "apply", lambda self, tensor, offset=0: None)
    work = ["--work", str(tmp_path / "work")]  # which a campaign that finds something leaves there
    assert main(["weights", "flips", "--updates", "2", "--every", "1", "--seed", "3", *work]) == 1
    out = capsys.readouterr().out
    assert out.count("found False") == 2 and json.loads(out.splitlines()[-1])["found"] == 0
