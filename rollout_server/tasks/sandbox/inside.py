"""`python -S -m rollout_server.tasks.sandbox.inside <pid of its parent> <fd> <fd>`: cuts itself off for the program.

The first fd has the order in JSON. The second one gets READY right before the program takes the place of this process,
or the reason why it does not. The program has neither.

supervisor (ends all that is left) -> setup (own session, new namespaces) -> process 1 of them, which is the program:
there is no process of ours beside it that it could attack, and its end is the end of all that it has started.
"""

import json
import os
import platform
import resource
import signal
import sys
from typing import Any, NoReturn

from rollout_server.tasks.sandbox.root import LIBC, build, refused
from rollout_server.tasks.sandbox.syscalls import refuse
from rollout_server.tasks.workers.supervisor import PR_SET_PDEATHSIG, end_as, limit, supervise

READY = b"\0ready"
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
    given, status = int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(status, False)
    try:
        with open(given, encoding="utf-8") as file:
            order = json.load(file)
        _become_the_program(order, status)
    except (OSError, ValueError, KeyError) as error:
        os.write(status, f"{type(error).__name__}: {error}".encode()[:4000])
    os._exit(125)


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
    _confine(limits, is_isolated)
    os.umask(0o077)
    refuse()
    os.write(status, READY)
    os.execve(order["argv"][0], order["argv"], order["environment"])


def _confine(limits: dict[str, Any], is_isolated: bool) -> None:
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CPU: int(limits["seconds"]) + 2,
    }
    if is_isolated and _counts_processes():
        wanted[resource.RLIMIT_NPROC] = limits["processes"]
    for kind, value in wanted.items():
        limit(kind, value)


def _counts_processes() -> bool:
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
        refused(f"unshare of {', '.join(names)}")
    os.write(go, b"g")
    os.close(go)
    if os.waitpid(mapper, 0)[1] != 0:
        raise OSError("the users of the namespace could not be mapped")
    os.setresgid(USER, USER, USER)
    first = os.fork()
    if first:
        end_as(os.waitpid(first, 0)[1])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _map_users(process: int, outside: tuple[int, int]) -> int:
    maps = {"setgroups": "deny", "uid_map": f"{USER} {outside[0]} 1", "gid_map": f"{USER} {outside[1]} 1"}
    try:
        for name, text in maps.items():
            with open(f"/proc/{process}/{name}", "w") as file:
                file.write(text)
    except OSError:
        return 1
    return 0


if __name__ == "__main__":
    main()
