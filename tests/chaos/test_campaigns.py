"""What all campaigns share: waits, tails, the state file that one goes on from, and the command line."""

import json

import pytest

from scripts.chaos.__main__ import main
from scripts.chaos.campaigns.bus import totals
from scripts.chaos.campaigns.chaos import as_json, new_part
from scripts.chaos.campaigns.resume import compare
from scripts.chaos.polling import Hung, JsonLines, wait_until
from scripts.chaos.report import State


def test_a_wait_ends_with_its_condition_or_at_its_deadline():
    now = [0.0]

    def look():
        now[0] += 1.0

    assert wait_until(lambda: now[0] >= 3 and "found", "it", 5.0, look=look, clock=lambda: now[0]) == "found"
    with pytest.raises(Hung, match=r"^it: not within 5.0 s; version 3$"):
        wait_until(lambda: False, "it", 5.0, look=look, state=lambda: "version 3", clock=lambda: now[0])
    assert now[0] == 9.0


def test_json_lines_are_read_once_they_are_whole(tmp_path):
    lines = JsonLines(tmp_path / "lines")
    assert lines.poll() == []
    for text, new in (('{"a": 1}\n{"a": 2', [{"a": 1}]), ("}\n", [{"a": 2}])):
        with lines.path.open("a") as file:
            file.write(text)
        assert lines.poll() == new
    assert lines.events == [{"a": 1}, {"a": 2}]


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
    arguments = {"faults": 2, "seed": 1, "per_run": 1, "only": "cut"}
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


def test_the_last_lines_keep_their_keys():
    chaos = "faults acked trained dropped lost trained_twice hung unnamed ended_early violations buffered"
    assert list(as_json(new_part())) == [*chaos.split(), "repeated_steps", "pairs_hit", "max_recovery_s"]
    bus = "cases hung digests_equal unnamed longest_s deadline_s roles skipped violations"
    assert list(totals([], 0, 0)) == bus.split()


def test_repeated_steps_are_compared_by_digest_and_groups():
    line = {"step": 1, "digest": "a", "groups": [[0, 1]]}
    assert (compare([line, line])["different"], compare([line, line])["repeated"]) == ([], 1)
    assert all(compare([line, {**line, **other}])["different"] == [1] for other in ({"digest": "b"}, {"groups": []}))
    assert compare([line, {**line, "step": 2}])["trained_twice"] == 1
