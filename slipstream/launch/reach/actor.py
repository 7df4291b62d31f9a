"""A node's process as an actor of Ray holds it; the other end is ray.py. Knows nothing of Ray itself."""

import contextlib
import subprocess
import threading
from collections.abc import Sequence

import psutil

NODE_MODULE = "slipstream.launch.node"
NOT_STARTED = 127
"""Exit code of a command that cannot be started, as a shell has it."""
NEWS_S = 5.0
"""`news` answers within this time, also without any."""
BEFORE_S = 40.0
"""How long the process that a node's new one follows may take to end."""


class NodeActor:
    """Starts a node's process, and hands on its lines; holds its stdin, so it ends when this process is gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: list[bytes] = []
        self._code: int | None = None
        self._news = threading.Condition()

    def start(self, words: Sequence[str], line: str, folder: str, before: int) -> int:
        """Start it, once process `before` of this machine (0: none) has ended; its pid, 0 where it cannot."""
        _wait_for_end(before)
        try:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._note([f"{error.filename}: {error.strerror}\n".encode()], NOT_STARTED)
            return 0
        threading.Thread(target=self._read, args=(self._process,), name="output", daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code and last line say why
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        return self._process.pid

    def news(self) -> tuple[list[bytes], int | None]:
        """Lines since the last call, as soon as there are some; with the last of them the exit code."""
        with self._news:
            self._news.wait_for(lambda: self._lines or self._code is not None, NEWS_S)
            lines, self._lines = self._lines, []
            return lines, self._code

    def close_stdin(self) -> None:
        """Have it end in order."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """SIGKILL; its children ask the kernel to die with it."""
        if self._process is not None:
            self._process.kill()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            self._note([raw], None)
        self._note([], process.wait())

    def _note(self, lines: list[bytes], code: int | None) -> None:
        with self._news:
            self._lines += lines
            self._code = code
            self._news.notify_all()


def _wait_for_end(pid: int) -> None:
    """Wait for a node's process whose actor is lost: it ends by itself, and is killed when that takes too long."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid and NODE_MODULE in (process := psutil.Process(pid)).cmdline():
            try:
                process.wait(BEFORE_S)
            except psutil.TimeoutExpired:
                process.kill()
