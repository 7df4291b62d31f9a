"""Stacks of the processes of this host: faulthandler's where they answer, else py-spy's where there is one."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream.runtime.hang.processes import Process
from slipstream.runtime.hang.registry import FOLDER, SIGNAL, Member

ANSWER_S = 1.0
"""An answer takes a few milliseconds; a busy machine may take longer."""
LOOK_S = 0.02
PY_SPY_S = 10.0
MOST = 8
"""Processes that py-spy looks at, all at once."""


def ask(members: Iterable[Member], run_dir: Path) -> dict[str, str]:
    """By name, the stacks of those that answer the signal within ANSWER_S; the others are left out."""
    asked: dict[str, tuple[Path, int]] = {}
    for member in members:
        path = run_dir / FOLDER / f"{member.name}.stacks"
        try:
            size = path.stat().st_size
            os.kill(member.pid, SIGNAL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        asked[member.name] = path, size
    answers = dict.fromkeys(asked, "")
    until, grew = time.monotonic() + ANSWER_S, True
    while time.monotonic() < until and (grew or not all(answers.values())):
        time.sleep(LOOK_S)
        grew = False
        for name, (path, size) in asked.items():
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(size)
                text = file.read()
            grew |= text != answers[name]
            answers[name] = text
    return {name: text for name, text in answers.items() if text}


def py_spy(processes: Sequence[Process]) -> dict[int, str]:
    """By pid, what py-spy reads from outside, of a stopped process as well; nothing without it or without the right."""
    command = tool()
    if command is None:
        return {}
    running = [(one.pid, _start([command, "dump", "--nonblocking", "--pid", str(one.pid)])) for one in processes[:MOST]]
    found, until = {}, time.monotonic() + PY_SPY_S
    for pid, process in running:
        try:
            text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode == 0:
            found[pid] = text
    return found


def tool() -> str | None:
    """Where py-spy is: beside this interpreter, or in the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
