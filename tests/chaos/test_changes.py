"""Updates as changes among faults: in order, and a rig that notices when they are not."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.chaos.bus_cluster import Oracle
from scripts.chaos.campaigns.changes import Chances, Changes, longest_gap
from scripts.chaos.campaigns.policy import KINDS, Policy
from weight_bus.delta.changes import ChangeReader
from weight_bus.intake import Intake
from weight_bus.manifest import Manifest
from weight_bus.staging import Staging

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.chaos", "weights", "changes"]
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
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
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


def quiet_run(versions: int, *, back: float = 0.0, base: float = 0.0) -> tuple[dict[str, Any], list[str]]:
    """A run of steps to and fro without faults of messages: what came of it, and what is wrong."""
    policy = Policy(7, hidden=64, kinds={"step": 50, "back": 50})
    with Changes(7, policy, chances=Chances(control=0.0, data=0.0, back=back, base=base), pace_s=0.0) as made:
        return made.run(versions)


def test_a_change_that_comes_again_is_refused_by_its_digests() -> None:
    found, _ = quiet_run(16, back=1.0)
    assert found["faults_of_data"]["again"] and found["refused_by_digest"] and found["in_order"] is True


def test_without_the_digests_the_oracle_sees_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "corrupt", lambda self: [])
    monkeypatch.setattr(ChangeReader, "arrived", lambda *_: True)
    monkeypatch.setattr(Manifest, "differences", lambda self, held: [])
    found, wrong = quiet_run(16, back=1.0)
    assert found["served_wrong"] and found["bit_exact"] is False and found["in_order"] is False
    assert any(" with a wrong " in text for text in wrong)


def test_without_the_look_at_the_base_a_change_of_another_one_is_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unguarded(self: Intake, begin: object, manifest: Manifest) -> list[str]:
        reader: ChangeReader = self._reader
        reader.apply(self.staging.buckets, begin.wire_bytes, begin.change_bytes)  # type: ignore[attr-defined]
        self.staging.manifest = manifest
        return self.staging.corrupt()

    with monkeypatch.context() as patched:
        patched.setattr(Intake, "_change", unguarded)
        found, wrong = quiet_run(8, base=1.0)
    assert found["unnoticed"] and found["refused_other_base"] == 0 and found["in_order"] is False
    assert any(text.startswith("other base of v") for text in wrong)
    found, _ = quiet_run(8, base=1.0)
    assert found["unnoticed"] == 0 and found["refused_other_base"] and found["in_order"] is True


def test_a_subscriber_that_stays_behind_is_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with Changes(7, Policy(7, hidden=64), chances=Chances(control=0.0), heal_s=0.2) as made:
        monkeypatch.setattr(made, "serves", lambda version, name: name != "subscriber-1")
        found, _ = made.run(2)
    assert found["all_at_the_newest"] is False and found["in_order"] is False


def test_the_oracle_sees_a_way_back_an_empty_claim_and_a_tensor_too_few() -> None:
    weights = {"a": torch.ones(3), "b": torch.zeros(2)}
    oracle = Oracle()
    for version in (1, 2):
        oracle.publish(version, weights)
    oracle.look("x", 2, weights)
    oracle.claims(2, ["x"])
    assert not oracle.wrong
    oracle.look("x", 1, weights)
    oracle.claims(2, ["y"])
    oracle.look("z", 2, {"a": torch.ones(3)})
    assert ["back" in oracle.wrong[0], "'y'" in oracle.wrong[1], "with a wrong 'b'" in oracle.wrong[2]] == [True] * 3


def test_the_longest_gap() -> None:
    assert longest_gap({1, 2, 5}, 9) == 4 and longest_gap({3}, 3) == 2 and longest_gap(set(), 4) == 4
