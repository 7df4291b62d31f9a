"""Bits that flip anywhere on their way into an engine: each is named and healed, and none is served."""

import json
from pathlib import Path

import pytest

from scripts.chaos.__main__ import main
from scripts.chaos.campaigns.flips import Flips
from weight_bus.manifest import Manifest
from weight_bus.staging import Staging


@pytest.mark.parametrize("proves_staged", [True, False])
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "changes"])
def test_every_flipped_bit_is_found_and_healed_and_none_is_served(
    delta: bool, proves_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the proof of staged bytes, by the digests of live weights alone."""
    if not proves_staged:
        monkeypatch.setattr(Staging, "corrupt", lambda self: [])
    with Flips(3, delta=delta) as flips:
        for place in flips.places * 2:
            flips.plant(place)
    counts = flips.counts
    assert flips.wrong == [] and flips.served_corrupt == 0
    assert counts["planted"] == counts["healed"] == dict.fromkeys(flips.places, 2)
    assert counts["found"] + counts["harmless"] == dict.fromkeys({*flips.places} - {"rest"}, 2)
    assert delta or not counts["harmless"].total()  # each byte of a whole version belongs to a tensor


@pytest.mark.parametrize("more", [[], ["--delta"]], ids=["whole", "changes"])
def test_the_campaign_fails_where_an_engine_serves_what_it_did_not_prove(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Manifest, "differences", lambda self, held: [])
    assert main(["flips", "--updates", "12", "--work", str(tmp_path / "work"), *more]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["served_corrupt"] > 0
