"""`python -S -m rollout_server.tasks.sandbox.inside <pid of its parent> <fd>`: cuts itself off and becomes the program.

stdin begins with the order: 4 bytes of length, little-endian, then JSON; what follows is the program's. The fd gets
READY right before the program is there, or the reason why it is not; the program never has it.

supervisor (ends all that is left) -> setup (own session, new namespaces) -> process 1 of them, which is the program:
there is no process of ours beside it that it could attack, and its end is the end of all that it has started.
"""

import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

from rollout_server.tasks.sandbox.root import LIBC, build
from rollout_server.tasks.sandbox.syscalls import refuse
from rollout_server.tasks.workers.supervisor import PR_SET_PDEATHSIG, supervise

READY = b"\0ready"
LENGTH = struct.Struct("<I")
NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "network": 0x40000000,
    "process": 0x20000000,
    "ipc": 0x08000000,
    "name": 0x04000000,
    "cgroup": 0x02000000,
}
NICE = 10
USER = 1000
"""Of the program, as it sees itself."""
NOBODY = 65534
"""Of the program on the machine, where the rollout server runs as root; its files are closed to that user."""
NPROC_SINCE = (5, 14)
"""From this Linux on RLIMIT_NPROC counts within a user namespace; before, it counted the engine's threads too."""


def main() -> NoReturn:
    """Entry point."""
    supervise(int(sys.argv[1]))
    status = int(sys.argv[2])
    os.set_inheritable(status, False)
    try:
        _become_the_program(_order(), status)
    except (OSError, ValueError, KeyError) as error:
        os.write(status, f"{type(error).__name__}: {error}".encode()[:4000])
    os._exit(125)


def _order() -> dict[str, Any]:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := os.read(0, count - len(data))):
                raise ValueError("the order ends too early")
            data += more
        return data

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    order: dict[str, Any] = json.loads(exactly(length))
    return order


def _become_the_program(order: dict[str, Any], status: int) -> NoReturn:
    limits, is_isolated = order["limits"], bool(order["namespaces"])
    if order["group"]:
        with open(order["group"], "w") as group:
            group.write("0")
    # where memory runs out the kernel ends the program, and not the engine beside it
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(NICE)
    if is_isolated:
        _leave_the_machine(order["namespaces"])
        # the size is that of all files together; the first process of the namespace goes on below
        build(order["folder"], order["visible"], limits["file_bytes"], USER, USER)
        LIBC.sethostname(b"box", 3)
    else:
        os.chdir(order["folder"])
    for name, text in order["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    for kind, value in _limits(limits, is_isolated):
        resource.setrlimit(kind, (value, value))
    os.umask(0o077)
    refuse()
    os.write(status, READY)
    os.execve(order["argv"][0], order["argv"], order["environment"])


def _limits(limits: dict[str, Any], is_isolated: bool) -> list[tuple[int, int]]:
    found = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CPU, int(limits["seconds"]) + 2),
    ]
    if is_isolated and counts_processes():
        found.append((resource.RLIMIT_NPROC, limits["processes"]))
    return [(kind, _possible(kind, value)) for kind, value in found]


def _possible(kind: int, wanted: int) -> int:
    hardest = resource.getrlimit(kind)[1]
    return wanted if hardest == resource.RLIM_INFINITY else min(wanted, hardest)


def counts_processes() -> bool:
    """Whether the kernel counts a namespace's processes apart from those of the user."""
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit()) >= NPROC_SINCE


def _leave_the_machine(names: list[str]) -> None:
    """New namespaces; returns in the first process of the new process namespace, as nobody with rights inside alone.

    Raises OSError: the kernel refuses.
    """
    is_root, me = os.geteuid() == 0, os.getpid()
    outside = (NOBODY, NOBODY) if is_root else (os.geteuid(), os.getegid())
    if is_root:
        os.setgroups([])
    wait, go = os.pipe()
    mapper = os.fork()  # of the old namespace: only there one may map to another user
    if mapper == 0:
        os.close(go)
        os._exit(_map_users(me, outside) if os.read(wait, 1) else 1)
    os.close(wait)
    flags = sum(NAMESPACES[name] for name in names)
    if LIBC.unshare(flags) != 0:
        os.close(go)
        os.waitpid(mapper, 0)
        _refuse(f"unshare of {', '.join(names)}")
    os.write(go, b"g")
    os.close(go)
    if os.waitpid(mapper, 0)[1] != 0:
        raise OSError("the users of the namespace could not be mapped")
    os.setresgid(USER, USER, USER)
    first = os.fork()
    if first:
        _end_as(os.waitpid(first, 0)[1])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _map_users(process: int, outside: tuple[int, int]) -> int:
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{USER} {outside[0]} 1"),
            ("gid_map", f"{USER} {outside[1]} 1"),
        ):
            with open(f"/proc/{process}/{name}", "w") as file:
                file.write(text)
    except OSError:
        return 1
    return 0


def _refuse(what: str) -> NoReturn:
    import ctypes

    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def _end_as(status: int) -> NoReturn:
    """End by the signal or exit code of the program."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
