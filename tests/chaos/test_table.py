"""The table of faults: everybody who speaks of a fault means the same one, and docs/faults.md prints what is used."""

import re
from pathlib import Path

import pytest

from scripts.chaos.cluster import VARIANTS
from scripts.chaos.faults import FAULTS, POINTS, as_markdown, make_plan, pairs
from scripts.chaos.injection import FLIPS, Injector
from scripts.chaos.watch import CLASSES, Logs

ROOT = Path(__file__).parents[2]


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
    plan = make_plan(3, 200, 20)
    assert [len(faults) for _, faults in plan] == [20] * 10
    planned = {(fault.fault, fault.point) for _, faults in plan for fault in faults}
    assert {name for name, _ in planned} == {fault.name for fault in FAULTS}
    assert planned == {pair for variant in VARIANTS for pair in pairs(variant)}, "200 faults are enough for every pair"
    for variant, faults in plan:
        assert {(f.fault, f.point) for f in faults} <= set(pairs(variant))


def test_only_takes_words():
    assert {f.fault for _, faults in make_plan(1, 30, 30, "cut, freeze up") for f in faults} == {"cut", "freeze up"}
    assert not any(variant.keys for variant, _ in make_plan(1, 60, 5, "flip welcome")), "for want of open messages"
    with pytest.raises(ValueError, match="no fault of the table"):
        make_plan(1, 5, 5, "nonsense")


def test_logs_show_whole_lines_since_a_mark_in_all_files(tmp_path):
    logs = Logs(tmp_path, [tmp_path / "by-hand.out"])
    (tmp_path / "replay.log").write_text("old [corrupt]\n")
    mark = logs.mark()
    with (tmp_path / "replay.log").open("a") as file:
        file.write("lost 'a' [closed]\nhalf a li")
    (tmp_path / "by-hand.out").write_text("waited for replay [silent]\n")
    found = [(line.log, line.classes) for line in logs.since(mark)]
    assert found == [("replay.log", {"closed"}), ("by-hand.out", {"silent"})]
    assert logs.first([r"nothing", r"waited .*\[silent\]"], mark).log == "by-hand.out"
    assert logs.first([r"\[corrupt\]"], mark) is None
