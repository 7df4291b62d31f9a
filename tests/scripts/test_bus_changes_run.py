"""Updates as changes among faults: in order, and a witness that notices when they are not; and over a slow link."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bus_changes import campaign, policy
from scripts.bus_changes.campaign import Campaign, longest_gap
from scripts.bus_changes.policy import Policy
from scripts.bus_changes.witness import Witness
from weight_bus.changes import ChangeReader
from weight_bus.intake import Intake
from weight_bus.manifest import Manifest
from weight_bus.staging import Staging

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.bus_changes"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_short_run_is_in_order(tmp_path: Path) -> None:
    # a process of its own, because gloo ends the process when a Begin is taken twice
    words = [*COMMAND, "--versions", "24", "--seed", "3", "--log", str(tmp_path / "log")]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bit_exact"] is True and found["served_wrong"] == found["unnoticed"] == 0
    assert found["as_changes"] + found["whole"] == 24 and found["as_changes"] >= 10
    assert found["faults_of_messages"] >= 6 and sum(map(bool, found["messages"].values())) >= 3, found["messages"]
    assert found["faults_of_data"] and found["all_at_the_newest"] is True
    assert all(found["activated"][name] + found["missed"][name] == 24 for name in found["activated"])


def test_the_versions_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    first, second = Policy(5, hidden=32, layers=1), Policy(5, hidden=32, layers=1)
    before = first.next()[1]
    assert second.next()[1].keys() == before.keys()
    shares: dict[str, list[float]] = {kind: [] for kind in policy.KINDS}
    for _ in range(150):
        (kind, named), (_, again) = first.next(), second.next()
        assert all(named[name].equal(again[name]) for name in named)
        changed = sum(int((named[n] != before[n]).sum()) for n in named) / sum(t.numel() for t in named.values())
        shares[kind].append(changed)
        before = named
    # a step after going back over a leap takes that leap again, so not every step is a small one
    assert 0 < statistics.median(shares["step"]) < 0.2
    assert min(shares["leap"]) > 0.5 and set(shares["same"]) == {0} and shares["back"]


# ---- without the guards -----------------------------------------------------------------------------------


def quiet_run(
    monkeypatch: pytest.MonkeyPatch, versions: int, *, back: float = 0.0, base: float = 0.0
) -> dict[str, Any]:
    """A run of steps to and fro without faults of messages."""
    monkeypatch.setattr(policy, "KINDS", {"step": 50, "back": 50})
    for name, value in {"DATA": 0.0, "BACK": back, "BASE": base, "PACE_S": 0.0}.items():
        monkeypatch.setattr(campaign, name, value)
    with Campaign(7, lossy=False, hidden=64) as made:
        return made.run(versions)


def test_a_change_that_comes_again_is_refused_by_its_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = quiet_run(monkeypatch, 16, back=1.0)
    assert found["faults_of_data"]["again"] and found["refused_by_digest"] and found["in_order"] is True


def test_without_the_digests_the_witness_sees_what_it_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Staging, "corrupt", lambda self: [])
    monkeypatch.setattr(Manifest, "differences", lambda self, held: [])
    found = quiet_run(monkeypatch, 16, back=1.0)
    assert found["served_wrong"] and found["bit_exact"] is False and found["in_order"] is False
    assert "serves other bytes under v" in capsys.readouterr().out


def test_without_the_look_at_the_base_a_change_of_another_one_is_unnoticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unguarded(self: Intake, begin: object, manifest: Manifest) -> None:
        reader: ChangeReader = self._reader
        reader.apply(self.staging.buckets, begin.wire_bytes, begin.change_bytes)  # type: ignore[attr-defined]
        self.staging.manifest = manifest

    with monkeypatch.context() as patched:
        patched.setattr(Intake, "_change", unguarded)
        found = quiet_run(monkeypatch, 8, base=1.0)
    assert found["unnoticed"] and found["refused_other_base"] == 0 and found["in_order"] is False
    assert "other base of v" in capsys.readouterr().out
    found = quiet_run(monkeypatch, 8, base=1.0)
    assert found["unnoticed"] == 0 and found["refused_other_base"] and found["in_order"] is True


def test_a_subscriber_that_stays_behind_is_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "HEAL_S", 0.2)
    with Campaign(7, lossy=False, hidden=64) as made:
        monkeypatch.setattr(made, "_serves", lambda version, name: name != "subscriber-1")
        found = made.run(2)
    assert found["all_at_the_newest"] is False and found["in_order"] is False


def test_the_witness_sees_a_way_back_an_empty_claim_and_a_tensor_too_few() -> None:
    weights = {"a": torch.ones(3), "b": torch.zeros(2)}
    witness = Witness()
    for version in (1, 2):
        witness.publish(version, weights)
    witness.look("x", 2, weights)
    witness.claims(2, ["x"])
    assert not witness.wrong
    witness.look("x", 1, weights)
    witness.claims(2, ["y"])
    witness.look("z", 2, {"a": torch.ones(3)})
    assert ["back" in witness.wrong[0], "'y'" in witness.wrong[1], "other bytes" in witness.wrong[2]] == [True] * 3


def test_the_longest_gap() -> None:
    assert longest_gap({1, 2, 5}, 9) == 4 and longest_gap({3}, 3) == 2 and longest_gap(set(), 4) == 4
