"""What the terminal shows of the logs: guards of rank 0, leaks of all, progress of the first of each kind."""

from learner.launch.announcements import Announcements


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
