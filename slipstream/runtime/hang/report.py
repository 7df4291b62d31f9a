"""The report: written when a deadline has passed, into `<run>/hang-<time>.txt`."""

import fcntl
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay import status_client
from replay.channel import ChannelError
from slipstream.runtime import processes
from slipstream.runtime.hang import registry, stacks
from slipstream.runtime.hang.registry import RegisteredProcess
from slipstream.runtime.processes import STUCK, ProcessStatus

log = logging.getLogger(__name__)

MOST = 20
"""Reports of one run; the first ones are the ones to read."""
MOST_ASIDE = 10
"""Of them those of a run that goes on: late answers of an hour must not take the report of what ends it."""
FRESH_S = 15.0
"""What expires this soon after a report is a consequence, and is noted in it."""
FRESH_ASIDE_S = 60.0
"""The same where the run goes on: at most one report a minute."""
OUTSIDE = ("disk", "reward", "server")
"""Codes of waits (replay/waits.py) whose cause no stack of this host shows."""
STATUS_S = 1.0
SILENT_S = 3.0
EVENTS = 40
TAIL_BYTES = 64 * 1024
EVENT = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) \S+ (WARNING|ERROR|CRITICAL) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One that took too long. Example: Wait(waiter="learner-0", what="batch 9", owed_by=("replay",), waited_s=600.0,
    key="learner.batch_deadline_s")."""

    waiter: str
    what: str
    owed_by: Sequence[str]
    """Names of processes, as they are in the run folder."""
    waited_s: float
    key: str
    """The deadline, a key of the configuration mostly."""

    def __str__(self) -> str:
        of = f" from {', '.join(self.owed_by)}" if self.owed_by else ""
        return f"{self.waiter} waited {self.waited_s:.1f} s for {self.what}{of} ({self.key})"


def expired(
    what: str,
    *,
    owed_by: Sequence[str] = (),
    waited_s: float,
    key: str,
    status: Callable[[], Mapping[str, Any]] | None = None,
    ends: bool = True,
    more: Sequence[str] = (),
) -> str:
    """Write a report of a deadline that has passed; returns `; hang report: FILE`, to be put into the message.

    Blocks for two seconds at most, ten more with py-spy. Returns an empty text in a process that belongs to no run.

    Args:
        status: of replay, where this is replay; else replay is asked.
        ends: this process ends for it. Otherwise a thread writes the report while it goes on.
        more: lines of what this process alone knows of it.
    """
    own = registry.own
    if own is None:
        return ""
    if ends:
        registry.owed_by = tuple(owed_by)
    wait = Wait(waiter=own.member.name, what=what, owed_by=owed_by, waited_s=waited_s, key=key)
    try:
        there = sorted(own.run_dir.glob("hang-[0-9]*.txt"))
        path = own.run_dir / f"hang-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.txt"
        fresh_s = FRESH_S if ends else FRESH_ASIDE_S
        if there and (path == there[-1] or time.time() - there[-1].stat().st_mtime < fresh_s):
            return _note(there[-1], wait, more)
        if len(there) >= (MOST if ends else MOST_ASIDE):
            return f"; {len(there)} hang reports are there already, the first is {there[0]}"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:  # another process has begun it in this very second
            return _note(path, wait, more)
    except OSError as error:
        return f"; no hang report could be written: {error}"
    known = status() if status is not None else None
    if not ends:
        threading.Thread(target=_write_or_say, args=(path, wait, own.member, known, more), daemon=True).start()
    elif failed := _write_or_say(path, wait, own.member, known, more):
        return f"; no hang report could be written: {failed}"
    return f"; hang report: {path}"


def _note(path: Path, wait: Wait, more: Sequence[str]) -> str:
    """Add a wait to a report, which may still be under way, and is no fresher for it. Raises OSError."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made = os.fstat(file.fileno())
        lines = [f"ALSO EXPIRED, {time.strftime('%H:%M:%S', time.gmtime())} UTC: {wait}", *more]
        file.write("\n" + "\n".join(lines) + "\n")
        file.flush()
        os.utime(file.fileno(), ns=(made.st_atime_ns, made.st_mtime_ns))
    return f"; hang report: {path}"


def _write_or_say(
    path: Path, wait: Wait, by: RegisteredProcess, status: Mapping[str, Any] | None, more: Sequence[str]
) -> OSError | None:
    """A disk that is full, or gone, counts less than what has expired."""
    try:
        write(path, wait, by, status, more)
    except OSError as error:
        log.warning("%s: the hang report could not be written: %s", path, error)
        return error
    return None


def write(
    path: Path, wait: Wait, by: RegisteredProcess, status: Mapping[str, Any] | None, more: Sequence[str] = ()
) -> list[str]:
    """Fill the file; returns the lines of its suspects. Raises OSError."""
    run_dir, noted = path.parent, registry.members(path.parent)
    here = {member.pid: member for member in noted if member.is_here()}
    known = processes.all_processes()
    others = processes.descendants(here, known)
    seen = stacks.py_spy([*here, *(one.pid for one in others)])
    seen = stacks.ask([member for pid, member in here.items() if pid not in seen], run_dir) | seen
    state = ask_replay(by) if status is None else status
    suspects = list(_suspects(here, known, seen, state))
    now, host = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), socket.gethostname()
    lines = [
        f"Hang report of {run_dir}, {now} UTC, host {host}, by {by.name} (pid {by.pid})",
        f"{wait}",
        *("", "SUSPECTS", *(suspects or ["no process here is stopped or dead: read the stacks"])),
        *("", "WHO WAITS FOR WHOM", f"{wait}", *_waits(state), *more),
        *("", "PROCESSES"),
    ]
    for member in noted:
        there = f"run `python -m slipstream.runtime.hang` there, on {member.host}, with the run folder"
        gone = f"pid {member.pid}: {'has ended' if member.host == host else there}"
        lines.append(f"{member.name:16} {known[member.pid] if member.pid in here and member.pid in known else gone}")
    lines += [f"{'  ' + one.name:16} {one}, child of {one.parent}: {one.command}" for one in others]
    names = {pid: member.name for pid, member in here.items()}
    names |= {one.pid: f"{one.name}, child of {one.parent}" for one in others if one.pid in seen}
    for pid, name in names.items():
        nothing = f"did not answer within {stacks.ANSWER_S:g} s; `py-spy dump --pid {pid}` may show more"
        lines += ["", f"STACKS OF {name} (pid {pid})", seen.get(pid, nothing).rstrip()]
    lines += ["", f"LAST EVENTS (warnings and errors of all logs, {EVENTS} at most)", *last_events(run_dir)]
    lines += ["", "LAST LINES", *_last_lines(run_dir)]
    _fill(path, "\n".join(lines) + "\n")
    return suspects


def _fill(path: Path, text: str) -> None:
    """Write the report before what was noted while it was under way. Raises OSError."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        noted = file.read()
        file.truncate(0)
        file.write(text + noted)


def _suspects(
    here: Mapping[int, RegisteredProcess],
    known: Mapping[int, ProcessStatus],
    seen: Mapping[int, str],
    status: Mapping[str, Any],
) -> Iterator[str]:
    """Processes that cannot go on by themselves, and what they owe."""
    peers = {peer["name"]: peer for peer in status.get("peers", ())}
    for pid, member in here.items():
        process = known.get(pid)
        if process is not None and (process.state in STUCK or pid not in seen):
            yield f"{member.name} (pid {pid}) is {process.does}{_owes(peers.get(member.name))}"
    on_this_host = {member.name for member in here.values()}
    for name, peer in peers.items():
        if peer["silent_s"] > SILENT_S and name not in on_this_host:
            yield f"{name} does not run here; replay last heard it {peer['silent_s']:.1f} s ago{_owes(peer)}"
    for wait in status.get("waits", ()):
        if wait["code"] in OUTSIDE:
            yield f"{wait['who']} waits for {wait['for']}, for {wait['since_s']:.1f} s"


def _owes(peer: Mapping[str, Any] | None) -> str:
    if peer is None:
        return ""
    leases = f"{peer['leases']} leases" if peer["role"] == "rollout_server" else "its next message"
    heard = f"was last heard {peer['silent_s']:.1f} s ago, then: {peer['activity'] or 'nothing'}"
    return f"; it owes replay {leases}, {heard}"


def _waits(status: Mapping[str, Any]) -> Iterator[str]:
    """What replay knows of it."""
    if "problem" in status:
        yield f"replay: {status['problem']}"
        return
    groups = status["groups"]
    yield (
        f"replay: version {status['version']}, groups: {groups['leased']} leased, {groups['buffered']} finished,"
        f" {groups['taken']} in training, {groups['max']} at most"
    )
    for one in status["waits"]:
        yield f"{one['who']} waits for {one['for']}, for {one['since_s']:.1f} s"
    for peer in status["peers"]:
        heard = f"last heard {peer['silent_s']:.1f} s ago"
        yield f"{peer['name']}: {peer['activity'] or '-'} for {peer['since_s']:.1f} s; {heard}"


def ask_replay(member: RegisteredProcess) -> Mapping[str, Any]:
    """The state of the run, or `problem`, within STATUS_S."""
    if member.replay is None:
        return {"problem": "its address is not known here"}
    try:
        answer = status_client.ask_replay(member.replay, member.keys, STATUS_S)
    except ChannelError as error:
        return {"problem": f"it could not be asked: {error}"}
    return answer.state if answer is not None else {"problem": f"it did not answer at {member.replay}"}


def last_events(run_dir: Path) -> list[str]:
    """Warnings and errors of all logs by time, the last EVENTS of them."""
    found = []
    for path in run_dir.glob("logs/*.log"):
        found += [line for line in end_of(path).splitlines() if EVENT.match(line)]
    return [line[:400] for line in sorted(found)[-EVENTS:]]


def _last_lines(run_dir: Path) -> Iterator[str]:
    for path in sorted(run_dir.glob("logs/*.log")):
        lines = [line for line in end_of(path).splitlines() if line.strip()]
        yield f"{path.name}: {lines[-1][:400] if lines else '(empty)'}"


def end_of(path: Path, offset: int = 0) -> str:
    """The last bytes of a log that may still grow, at most those from `offset` on."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
