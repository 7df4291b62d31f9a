"""What the terminal shows of the logs: guards of rank 0, leaks of all, progress of the first of each kind."""

from slipstream.launch.announcements import Announcements


def test_lines_of_guards_leaks_and_progress_are_shown_once(tmp_path):
    old = "2026-11-22 07:00:00,000 learner-0 WARNING guard: of an earlier start\n"
    (tmp_path / "learner-0.log").write_text(old)
    shown = Announcements(tmp_path)
    assert list(shown.new()) == []
    for name in ("learner-0", "learner-1", "rollout-0", "rollout-10", "rollout-node1-0", "replay", "launcher"):
        head = f"2026-11-22 07:00:01,000 {name}"
        with (tmp_path / f"{name}.log").open("a") as log:
            log.write(f"{head} WARNING guard: kl\n{head} WARNING leak: {name}\n")
            log.write(f"{head} INFO progress: loading\n{head} INFO no leak: here\n{head} INFO leaking: no\n")
    expected = {"guard: kl", "learner-0: loading", "rollout-0: loading", "rollout-node1-0: loading"}
    expected |= {
        f"leak: {n}" for n in ("learner-0", "learner-1", "rollout-0", "rollout-10", "rollout-node1-0", "replay")
    }
    found = list(shown.new())  # launcher.log has what was shown
    assert len(found) == len(expected) and set(found) == expected
    assert list(shown.new()) == []


def test_a_hang_of_a_process_that_goes_on_is_shown_once(tmp_path):
    """Its report has what else expires meanwhile; what ends a process comes as an error, which the launcher shows."""
    shown = Announcements(tmp_path)
    late = "reward function 'slow', 3 times in a row was late, the last timed out after 2 s"
    lines = [f"{late}; hang report: runs/x/hang-{number}.txt [slow]" for number in (1, 1, 2)]
    with (tmp_path / "rollout-3.log").open("a") as log:
        for line in lines:
            log.write(f"2026-11-22 07:00:01,000 rollout-3 WARNING {line}\n")
        log.write("2026-11-22 07:00:02,000 rollout-3 ERROR batch 9; hang report: runs/x/hang-3.txt [slow]\n")
    assert list(shown.new()) == [f"rollout-3: {line}" for line in lines[1:]]
