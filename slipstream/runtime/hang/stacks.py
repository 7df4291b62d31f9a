"""Stacks of the processes of this host: what py-spy sees, else what faulthandler writes where a signal asks for it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream.runtime.hang.registry import FOLDER, SIGNAL, RegisteredProcess

ANSWER_S = 1.0
"""An answer takes a few milliseconds; a busy machine may take longer."""
LOOK_S = 0.05
PY_SPY_S = 10.0
MOST = 16
"""Processes that py-spy looks at, all at once."""


def py_spy(pids: Sequence[int]) -> dict[int, str]:
    """By pid, what py-spy reads from outside, of a stopped process as well; nothing without it or without the right."""
    beside = Path(sys.executable).with_name("py-spy")
    command = str(beside) if beside.exists() else shutil.which("py-spy")
    if command is None:
        return {}
    running = {
        pid: subprocess.Popen(
            [command, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for pid in pids[:MOST]
    }
    found, until = {}, time.monotonic() + PY_SPY_S
    for pid, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        if process.returncode == 0:
            found[pid] = text
    return found


def ask(members: Iterable[RegisteredProcess], run_dir: Path) -> dict[int, str]:
    """By pid, the stacks of those that answer the signal within ANSWER_S; the others are left out."""
    asked: dict[int, tuple[Path, int]] = {}
    for member in members:
        path = run_dir / FOLDER / f"{member.name}.stacks"
        try:
            size = path.stat().st_size
            os.kill(member.pid, SIGNAL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        asked[member.pid] = path, size
    answers, before = dict.fromkeys(asked, ""), None
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until and (answers != before or not all(answers.values())):
        time.sleep(LOOK_S)
        before = answers
        answers = {pid: path.read_bytes()[size:].decode("utf-8", "replace") for pid, (path, size) in asked.items()}
    return {pid: text for pid, text in answers.items() if text}
