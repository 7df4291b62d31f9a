"""What all campaigns share: waits, tails, the state that one goes on from, the table of faults, plans and logs."""

import json
import re
from pathlib import Path

import pytest

from scripts.chaos.__main__ import main
from scripts.chaos.campaigns.chaos import make_plan, new_part, pairs
from scripts.chaos.campaigns.resume import compare
from scripts.chaos.cluster import VARIANTS
from scripts.chaos.faults import FAULTS, FLIPS, POINTS, Injector, as_markdown
from scripts.chaos.report import State
from scripts.chaos.watch import CLASSES

ROOT = Path(__file__).parents[2]


def test_a_campaign_goes_on_from_its_state_and_refuses_another_ones(tmp_path):
    state = State(tmp_path / "work", "chaos", {"seed": 1})
    state.fresh("01").joinpath("half").touch()
    state.add({"faults": 3})
    again = State(tmp_path / "work", "chaos", {"seed": 1})
    assert again.done == [{"faults": 3}]
    assert list(again.fresh("01").iterdir()) == []
    with pytest.raises(ValueError, match=r'"seed": 1.*, not .*"seed": 2'):
        State(tmp_path / "work", "chaos", {"seed": 2})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ValueError, match="is not empty"):
        State(tmp_path / "other", "chaos", {})


def test_runs_that_are_over_are_added_up_and_not_run_again(tmp_path, capsys):
    arguments = {"faults": 2, "seed": 1, "per_run": 1, "only": "cut", "variant": "", "ray": False}
    state = State(tmp_path / "work", "chaos", arguments)
    good = {**new_part(), "faults": 1, "acked": 9, "trained": 8, "recovery_s": [1.5], "coverage": {"cut at any": 1}}
    command = ["--faults", "2", "--per-run", "1", "--only", "cut", "--work", str(tmp_path / "work")]
    state.add(good)
    state.add(good)
    assert main([*command, "--data", str(tmp_path / "data")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["faults"], found["acked"], found["lost"], found["pairs_hit"]) == (2, 18, 0, 1)
    state.done[1] = {**good, "lost": ["a group"], "hung": ["a wait"]}
    state.add({**good, "unnamed": ["a fault"]})
    assert main([*command, "--data", str(tmp_path / "data")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert (json.loads(lines[-1])["lost"], "WRONG: a wait" in lines, "WRONG: a fault" in lines) == (1, True, True)
    with pytest.raises(SystemExit):
        main([*command, "--seed", "2"])


def test_repeated_steps_are_compared_by_digest_and_groups():
    line = {"step": 1, "digest": "a", "groups": [[0, 1]]}
    assert (compare([line, line])["different"], compare([line, line])["repeated"]) == ([], 1)
    assert all(compare([line, {**line, **other}])["different"] == [1] for other in ({"digest": "b"}, {"groups": []}))
    assert compare([line, {**line, "step": 2}])["trained_twice"] == 1


def test_every_fault_of_the_table_can_be_done_and_no_other():
    done = {name.removeprefix("do_") for name in vars(Injector) if name.startswith("do_")}
    assert done == {fault.name.split()[0] for fault in FAULTS}
    assert set(FLIPS) == {fault.name.removeprefix("flip ") for fault in FAULTS if fault.name.startswith("flip ")}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_row_holds_together(fault):
    assert set(fault.points) <= set(POINTS) and fault.classes <= set(CLASSES)
    for pattern in fault.says:
        named = set(re.findall(r"\\\[(\w+)\\\]", pattern))
        assert re.compile(pattern) and named and named <= fault.classes, "the line has one of the fault's classes"


def test_the_page_prints_this_table():
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    for row in as_markdown():
        assert row in page, f"docs/faults.md lacks this row of `python -m scripts.chaos --table`: {row}"


def test_a_plan_is_drawn_from_its_seed_and_covers_the_pairs_first():
    assert make_plan(1, 50, 20) == make_plan(1, 50, 20) != make_plan(2, 50, 20)
    plan = make_plan(3, 280, 20)
    assert [len(faults) for _, faults in plan] == [20] * 14
    planned = {(fault.fault, fault.point) for _, faults in plan for fault in faults}
    assert {name for name, _ in planned} == {fault.name for fault in FAULTS}
    assert planned == {pair for variant in VARIANTS for pair in pairs(variant)}, "280 faults are enough for every pair"
    for variant, faults in plan:
        assert {(f.fault, f.point) for f in faults} <= set(pairs(variant))
