"""What the launcher reads from the logs of its children."""

import sys
from pathlib import Path

from learner.launch import children

ENTRY = """[{number}]:
  time      : 2026-11-21_18:11:37
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid}){signal}
  error_file: <N/A>
  traceback : To enable traceback see: ...
"""


def report(*entries: tuple[int, int, int], root: tuple[int, int, int]) -> str:
    """What torchrun prints when ranks (rank, exit code, pid) have failed."""

    def shown(number: int, entry: tuple[int, int, int]) -> str:
        rank, code, pid = entry
        signal = "  (SIGKILL)" if code == -9 else ""
        return ENTRY.format(number=number, rank=rank, code=f"{code:<2}", pid=pid, signal=signal)

    others = "".join(shown(number, entry) for number, entry in enumerate(entries, 1)) or "  <NO_OTHER_FAILURES>\\n"
    return f"Failures:\n{others}------\nRoot Cause (first observed failure):\n{shown(0, root)}======\n"


def test_the_rank_that_was_killed_is_named_whichever_torchrun_saw_end_first(tmp_path: Path) -> None:
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


def test_who_was_killed_from_outside_has_no_last_word(tmp_path: Path) -> None:
    said = "import os, signal, sys; print('2026-11-21 10:00:00,000 x ERROR no room [full]', flush=True); "
    ends = {"os.kill(os.getpid(), signal.SIGKILL)": ("SIGKILL", False), "sys.exit(4)": ("exit code 4", True)}
    for end, (how, quoted) in ends.items():
        child = children.start("x", [sys.executable, "-c", said + end], tmp_path / f"{how}.log", {})
        child.process.wait()
        assert how in child.how_it_ended() and ("no room" in child.how_it_ended()) == quoted


def test_what_a_child_reports_while_it_starts_is_shown_once(tmp_path: Path) -> None:
    lines = [
        "2026-11-22 07:00:00,000 replay INFO reading a.jsonl: 1,000 rows, 40%",
        "2026-11-22 07:00:05,000 replay INFO reading a.jsonl: 2,000 rows, 80%",
    ]
    step = "echo '{line}'; until [ -e go-{number} ]; do sleep 0.01; done"  # until the test has seen the line
    steps = [step.format(line=line, number=number) for number, line in enumerate(lines, start=1)]
    (tmp_path / "run.sh").write_text("\n".join([*steps, "echo ready at 7\n"]))
    child = children.start("x", ["sh", "-c", f"cd {tmp_path} && . ./run.sh"], tmp_path / "x.log", {})
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        (tmp_path / f"go-{len(shown)}").touch()

    found = children.wait_for_line(child, r"^ready at (\d)$", 20, progress=r"INFO (reading .*)$", show=show)
    child.process.wait()
    assert found is not None and found[1] == "7"
    assert shown == ["reading a.jsonl: 1,000 rows, 40%", "reading a.jsonl: 2,000 rows, 80%"]
