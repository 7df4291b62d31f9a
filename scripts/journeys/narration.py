"""A journey: commands as a user types them, what they say that matters, and the seconds that each took."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from learner.report.metrics import FILE
from scripts.chaos.polling import JsonLines, wait_until

SHOWN_CHARS = 200
NAME = "slipstream"


class Failed(RuntimeError):
    """A command did not do what the journey needs; the message has its last lines."""


class Background:
    """A command that goes on while the journey does."""

    def __init__(self, journey: "Journey", shown: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.shown, self.process, self.log = shown, process, log
        self._journey, self._began = journey, time.monotonic()

    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, tell: Sequence[str] = (), *, codes: Sequence[int] = (0,), timeout_s: float = 300) -> str:
        """Wait for its end and tell of it. Raises Failed: another exit code."""
        code = self.process.wait(timeout_s)
        self._journey.told(f"{self.shown}   (started before)", self.text(), tell, self._began, code, codes)
        return self.text()


class Journey:
    """The steps of one journey, in a folder of its own; `python` starts the commands."""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self.name, self.folder, self.python = name, folder, python
        self.steps: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self._began = time.monotonic()
        self._number = 0
        self._running: list[Background] = []

    def say(self, text: str) -> None:
        """A line about what comes next."""
        sys.stdout.write(f"\n# {text}\n")
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """What is seen and no command prints."""
        sys.stdout.write(f"    ({text})\n")
        sys.stdout.flush()

    def words(self, *words: str) -> list[str]:
        """`slipstream NAME ...` and `python ...` as this machine starts them."""
        if words[0] == NAME:
            return [self.python, "-m", "configs.command", *words[1:]]
        return [self.python, *words[1:]] if words[0] == "python" else list(words)

    def run(
        self,
        *words: str,
        tell: Sequence[str] = (),
        codes: Sequence[int] = (0,),
        timeout_s: float = 300,
        cwd: Path | None = None,
    ) -> str:
        """Run a command to its end; what it said. Raises Failed: another exit code, or nothing that `tell` asks for."""
        background = self.start(*words, cwd=cwd, announce=False)
        began = time.monotonic()
        code = background.process.wait(timeout_s)
        return self.told(background.shown, background.text(), tell, began, code, codes)

    def start(self, *words: str, cwd: Path | None = None, announce: bool = True) -> Background:
        """Start a command in a session of its own, as in another terminal."""
        shown = " ".join(word if re.fullmatch(r"[\w./:=@,+-]+", word) else repr(word) for word in words)
        self._number += 1
        log = self.folder / f"terminal-{self._number}.log"
        environment = os.environ | {"SLIPSTREAM_PYTHON": self.python, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        if self.python == "":
            environment.pop("SLIPSTREAM_PYTHON")
        with log.open("wb") as file:
            process = subprocess.Popen(
                self.words(*words),
                cwd=cwd or self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started = Background(self, shown, process, log)
        self._running.append(started)
        if announce:
            sys.stdout.write(f"$ {shown} &\n")
            sys.stdout.flush()
        return started

    def told(self, shown: str, text: str, tell: Sequence[str], began: float, code: int, codes: Sequence[int]) -> str:
        """Print a command, the lines that `tell` (regular expressions) asks for, and its seconds."""
        seconds = time.monotonic() - began
        lines = [line.strip() for line in text.splitlines()]
        found = [next((line for line in reversed(lines) if re.search(pattern, line)), None) for pattern in tell]
        kept = [line for line in lines if line in found]
        sys.stdout.write(f"$ {shown}\n")
        sys.stdout.writelines(f"    {line[:SHOWN_CHARS]}\n" for line in dict.fromkeys(kept))
        sys.stdout.write(f"    ({seconds:.1f} s)\n")
        sys.stdout.flush()
        self.steps.append({"command": shown, "seconds": round(seconds, 1), "code": code})
        if code not in codes or None in found:
            missing = [pattern for pattern, line in zip(tell, found, strict=True) if line is None]
            raise Failed(f"{shown}: exit code {code}, without {missing}\n" + "\n".join(lines[-30:]))
        return text

    def write(self, path: Path, text: str) -> None:
        """A file as the user's editor leaves it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"$ edit {path.name}\n")
        sys.stdout.writelines(f"    {line}\n" for line in text.strip().splitlines())

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float, of: Background | None = None) -> Any:
        """Wait for something to happen. Raises Failed: `of` has ended before, or it took too long."""

        def look() -> None:
            if of is not None and of.process.poll() is not None:
                raise Failed(f"{of.shown} ended while this waited for {what}:\n{of.text()[-2000:]}")
            time.sleep(0.1)

        return wait_until(condition, what, deadline_s, look=look)

    def close(self, *, ok: bool) -> None:
        """End what still runs; the last line is JSON."""
        for background in self._running:
            if background.process.poll() is None:
                os.killpg(background.process.pid, signal.SIGTERM)
                try:
                    background.process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(background.process.pid, signal.SIGKILL)
                    background.process.wait()
        summary = {"journey": self.name, "ok": ok, "seconds": round(time.monotonic() - self._began, 1)}
        sys.stdout.write("\n" + json.dumps({**summary, **self.facts, "steps": self.steps}) + "\n")
        sys.stdout.flush()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that are steps."""
    return [row for row in JsonLines.read(run_dir / FILE) if "step" in row]


def steps(run_dir: Path) -> int:
    """The newest step of a run."""
    return max((int(row["step"]) for row in rows(run_dir)), default=0)
