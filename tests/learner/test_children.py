"""What the launcher reads from the logs of its children."""

import sys

from learner.launch import children

ENTRY = """[{number}]:
  time      : 2026-11-21_18:11:37
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid}){signal}
  error_file: <N/A>
  traceback : To enable traceback see: ...
"""


def report(*others: tuple[int, int, int], root: tuple[int, int, int]) -> str:
    """What torchrun prints when ranks (rank, exit code, pid) have failed."""
    entries = [
        ENTRY.format(number=number, rank=rank, code=f"{code:<2}", pid=pid, signal="  (SIGKILL)" if code == -9 else "")
        for number, (rank, code, pid) in enumerate([root, *others])
    ]
    shown = "".join(entries[1:]) or "  <NO_OTHER_FAILURES>\n"
    return f"Failures:\n{shown}------\nRoot Cause (first observed failure):\n{entries[0]}======\n"


def test_the_rank_that_was_killed_is_named_whichever_torchrun_saw_end_first(tmp_path):
    log = tmp_path / "learner.log"
    for text, said in [
        (report((1, 1, 11), root=(0, -9, 10)), "learner rank 0 (pid 10) was killed by SIGKILL [closed]"),
        (report((1, -9, 11), root=(0, 1, 10)), "learner rank 1 (pid 11) was killed by SIGKILL [closed]"),
        (report((1, -15, 11), root=(0, 1, 10)), ""),
        (report(root=(0, 1, 10)), ""),
    ]:
        log.write_text(text)
        assert children.killed_rank(log, 0) == said
    assert children.killed_rank(log, len(text)) == ""


def test_who_was_killed_from_outside_has_no_last_word(tmp_path):
    said = "import os, signal, sys; print('2026-11-21 10:00:00,000 x ERROR no room [full]', flush=True); "
    ends = {"os.kill(os.getpid(), signal.SIGKILL)": ("SIGKILL", False), "sys.exit(4)": ("exit code 4", True)}
    for end, (how, quoted) in ends.items():
        child = children.start("x", [sys.executable, "-c", said + end], tmp_path / f"{how}.log", {})
        child.process.wait()
        assert how in child.how_it_ended() and ("no room" in child.how_it_ended()) == quoted


def test_logs_are_followed_line_by_line(tmp_path):
    log = tmp_path / "x.log"
    tail = children.Tail.from_end(log)
    assert tail.new_lines() == []
    log.write_bytes(b"one\ntwo\nthr")
    assert tail.new_lines() == ["one", "two"]
    with log.open("ab") as file:
        file.write(b"ee\n")
    assert tail.new_lines() == ["three"] and children.Tail.from_end(log).new_lines() == []
    (tmp_path / "new").write_text("anew\n")
    (tmp_path / "new").replace(log)
    assert tail.new_lines() == ["anew"]


def test_what_a_child_reports_while_it_starts_is_shown_once(tmp_path):
    line = "2026-11-22 07:00:00,000 replay INFO reading a.jsonl: 1,000 rows, 40%"
    waits = f"until [ -e {tmp_path}/seen ]; do sleep 0.01; done"
    child = children.start("x", ["sh", "-c", f"echo '{line}'; {waits}; echo ready at 7"], tmp_path / "x.log", {})
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        (tmp_path / "seen").touch()

    found = children.wait_for_line(child, r"^ready at (\d)$", 20, progress=r"INFO (reading .*)$", show=show)
    child.process.wait()
    assert found is not None and found[1] == "7" and shown == ["reading a.jsonl: 1,000 rows, 40%"]
    assert children.wait_for_line(child, "^never$", 20, progress="^$", show=show) is None, "it has ended"
