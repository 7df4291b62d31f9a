"""Programs forked from a process that has imported torch already, in place of `python -m`.

Nine tenths of what a learner rank or a rollout server costs in a test are its imports. A forked program is a process
of its own all the same: with its command line, environment, output, session, parent and exit code, and what it starts
itself (the launcher its children) is forked from it again. Tests of the start use subprocess.

The zygote is `python tests/support/forking.py FD MODULES PADDING`; each line from FD asks for a program, each line to
it says that one has started or ended. The padding is where forked programs write their command lines (`set_title`).
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOADED = """
learner.learner slipstream.launch.launcher slipstream.launch.earlier_run replay.service rollout_server.server
transformers.models.qwen3.modeling_qwen3
"""
FORKED = ("learner.main", "learner.train", "replay.main", "rollout_server.main")
"""Programs that are forked when another forked program starts them; everything else is started for real."""
PADDING = 4000
READY_S = 300.0
RealPopen = subprocess.Popen
CLOCKS = time.time, time.time_ns


class Program:
    """What a forked program has of subprocess.Popen's interface."""

    args: list[str]
    pid: int

    def poll(self) -> int | None:
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and this process has not heard of it yet
            if self.poll() is None:
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Child(Program):
    """A forked program of this process."""

    def __init__(self, argv: Sequence[str], **settings: Any) -> None:
        self.args, self.returncode = list(argv), None
        read, write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            become(argv, ready=write, **settings)
        os.close(write)
        with open(read, "rb") as pipe:  # as subprocess does: the session, output and command line are there on return
            pipe.read(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Popen(RealPopen):  # type: ignore[type-arg]
    """subprocess.Popen inside a forked program: `python -m PROGRAM` of one in FORKED is forked."""

    def __new__(cls, args: Any, **settings: Any) -> Any:
        words = [] if isinstance(args, str | bytes) else [word for word in args[:4] if word != "-u"]
        forks = words[:2] == [sys.executable, "-m"] and words[2] in FORKED
        return Child(args, **settings) if forks else object.__new__(cls)


def become(argv: Sequence[str], *, ready: int, **settings: Any) -> None:
    """Run `python [-u] -m MODULE ARGUMENTS` with Popen's settings in a process that was just forked; never returns."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if settings.get("start_new_session"):
            os.setsid()
        if (stdout := settings.get("stdout")) is not None:
            os.dup2(stdout.fileno(), 1)
        if (stderr := settings.get("stderr")) is not None:
            os.dup2(1 if stderr == subprocess.STDOUT else stderr.fileno(), 2)
        if (env := settings.get("env")) is not None:
            os.environ.clear()
            os.environ.update(env)
        if (cwd := settings.get("cwd")) is not None:
            os.chdir(cwd)
        os.closerange(3, ready)
        os.closerange(ready + 1, 4096)
        argv = after_site(argv)
        words = [word for word in argv[1:] if word != "-u"]
        set_title(argv)
        os.write(ready, b"x")
        os.close(ready)
        random.seed()
        logging.root.handlers.clear()
        subprocess.Popen = Popen  # type: ignore[misc]
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the edge of the process: whatever it is, its output shows it
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


class Replaced(BaseException):
    """This process would go on as another program; carries its command line."""


def after_site(argv: Sequence[str]) -> Sequence[str]:
    """What a sitecustomize.py of PYTHONPATH makes of a command line: it may go on as another one."""
    time.time, time.time_ns = CLOCKS
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    file = next((path for folder in folders if (path := Path(folder, "sitecustomize.py")).is_file()), None)
    begun_with = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    if file is None or str(file) == begun_with:  # the zygote itself began with it
        return argv

    def replace(_: str, words: Sequence[str]) -> None:
        raise Replaced(words)

    execv, os.execv = os.execv, replace  # type: ignore[assignment]
    sys.orig_argv = list(argv)
    try:
        exec(compile(file.read_text(), str(file), "exec"), {"__name__": "sitecustomize", "__file__": str(file)})
    except Replaced as anew:
        (argv,) = anew.args
    finally:
        os.execv = execv
    return argv


def set_title(argv: Sequence[str]) -> None:
    """Write the command line where /proc/<pid>/cmdline shows it."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, size = int(fields[45]), int(fields[46]) - int(fields[45])
    text = b"\0".join(os.fsencode(word) for word in argv)
    ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


def serve(channel: socket.socket, preloaded: str) -> None:
    """Fork programs on request until the tests have ended."""
    sys.path[0] = str(ROOT)
    for module in preloaded.split():
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each forked program would look for garbage in all this, and so copy its pages
    running: dict[int, Child] = {}
    lines = channel.makefile("rwb", buffering=0)
    while True:
        if select.select([channel], [], [], 0.02)[0]:
            line = lines.readline()
            if not line:
                return
            wanted = json.loads(line)
            with open(wanted["output"], "wb") as output:
                program = Child(
                    wanted["argv"], env=wanted["env"], cwd=wanted["cwd"], stdout=output, stderr=subprocess.STDOUT
                )
            running[program.pid] = program
            lines.write(json.dumps({"pid": program.pid}).encode() + b"\n")
        for pid, program in list(running.items()):
            if (code := program.poll()) is not None:
                del running[pid]
                lines.write(json.dumps({"pid": pid, "code": code}).encode() + b"\n")


class Zygote:
    """The tests' end: starts programs, and hears when they end."""

    def __init__(self, preloaded: str = PRELOADED) -> None:
        """Args: preloaded: modules that its programs find imported."""
        self._channel, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), preloaded, "x" * PADDING],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._lines = self._channel.makefile("rwb", buffering=0)
        self._ended: dict[int, int] = {}

    def start(self, argv: Sequence[str], *, output: Path, env: Mapping[str, str], cwd: Path = ROOT) -> "Started":
        """Fork a program, its output to a file."""
        wanted = {"argv": list(argv), "output": str(output), "env": dict(env), "cwd": str(cwd)}
        self._lines.write(json.dumps(wanted).encode() + b"\n")
        while "code" in (answer := self._read(READY_S)):
            pass
        self._ended.pop(answer["pid"], None)  # of an earlier program that had the same number
        return Started(self, list(argv), answer["pid"])

    def code_of(self, pid: int) -> int | None:
        """Exit code of a program that has ended."""
        while pid not in self._ended and select.select([self._channel], [], [], 0)[0]:
            self._read(0)
        return self._ended.get(pid)

    def _read(self, timeout_s: float) -> dict[str, int]:
        assert select.select([self._channel], [], [], timeout_s)[0], f"the zygote gave no answer for {timeout_s:g} s"
        line = self._lines.readline()
        assert line, "the zygote has ended"
        answer: dict[str, int] = json.loads(line)
        if "code" in answer:
            self._ended[answer["pid"]] = answer["code"]
        return answer

    def close(self) -> None:
        """End the zygote; programs that still run go on."""
        self._process.kill()
        self._process.wait(10)
        self._lines.close()
        self._channel.close()


class Started(Program):
    """A forked program of the zygote's."""

    def __init__(self, zygote: Zygote, args: list[str], pid: int) -> None:
        self._zygote, self.args, self.pid = zygote, args, pid

    def poll(self) -> int | None:
        return self._zygote.code_of(self.pid)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
