"""Updates as changes among faults. Without the guards of the product: test_planted."""

import pytest
import torch

from scripts.chaos.bus_cluster import Oracle, Policy
from scripts.chaos.campaigns.changes import Chances, Changes
from tests.support.campaigns import run_campaign


def test_a_short_run_is_in_order(tmp_path):
    # a process of its own, because gloo ends the process when a Begin is taken twice
    words = ("--versions", "24", "--seed", "3", "--log", str(tmp_path / "log"))
    found, _ = run_campaign("weights", "changes", *words, timeout=150)
    assert found["bit_exact"] is True and found["served_wrong"] == found["unnoticed"] == 0
    assert found["as_changes"] + found["whole"] == 24 and found["as_changes"] >= 10
    assert sum(found["kinds"].values()) == 24 and {"step", "back"} <= found["kinds"].keys()
    assert found["faults_of_messages"] >= 6 and sum(map(bool, found["messages"].values())) >= 3, found["messages"]
    assert found["faults_of_data"] and found["all_at_the_newest"] is True
    assert all(found["activated"][name] + found["missed"][name] == 24 for name in found["activated"])
    assert all((gap > 0) is (found["missed"][name] > 0) for name, gap in found["longest_gap"].items())


@pytest.mark.parametrize(("back", "base", "refused"), [(1, 0, "refused_by_digest"), (0, 1, "refused_other_base")])
def test_a_change_that_comes_again_or_names_another_base_is_refused(back, base, refused):
    policy = Policy(7, hidden=64, kinds={"step": 50, "back": 50})
    with Changes(7, policy, chances=Chances(control=0.0, data=0.0, back=back, base=base), pace_s=0.0) as made:
        found, _ = made.run(12)
    assert found["faults_of_data"] and found[refused] and found["unnoticed"] == 0 and found["in_order"] is True


def test_a_subscriber_that_stays_behind_is_not_in_order(monkeypatch):
    with Changes(7, Policy(7, hidden=64), chances=Chances(control=0.0), heal_s=0.2) as made:
        monkeypatch.setattr(made, "serves", lambda version, name: name != "subscriber-1")
        found, _ = made.run(2)
    assert found["all_at_the_newest"] is False and found["in_order"] is False


def test_the_oracle_sees_a_way_back_an_empty_claim_and_a_tensor_too_few():
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
