"""What this machine can cut off, found by a program that tries to get out of the sandbox."""

import functools
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from rollout_server.tasks.sandbox import SandboxError
from rollout_server.tasks.sandbox.box import ResourceLimits, run

ATTEMPTS = {
    "files": "read and write files of this user",
    "network": "connect to other programs and machines",
    "processes": "see and signal processes of this user",
    "secrets": "read the environment of other processes",
    "hypervisor": "connect to the host of this virtual machine",
    "memory": "hold memory that no limit counts",
}
"""What a program may be able to do, in words."""
PROGRAM = """
import json, os, socket, sys
order = json.load(sys.stdin)
def tried(attempt):
    try:
        return bool(attempt())
    except OSError:
        return False
def connect():
    with socket.create_connection(("127.0.0.1", order["port"]), timeout=1):
        return True
def signal():
    os.kill(order["pid"], 0)
    return True
print(json.dumps({
    "files": tried(lambda: open(order["file"]).read() and open(order["file"], "r+")),
    "network": tried(connect),
    "processes": tried(signal),
    "secrets": tried(lambda: order["secret"].encode() in open(f"/proc/{order['pid']}/environ", "rb").read())
    or order["secret"] in os.environ.values(),
    "hypervisor": tried(lambda: socket.socket(socket.AF_VSOCK)),
    "memory": tried(lambda: os.memfd_create("probe") + 1),
}))
"""
LIMITS = ResourceLimits(seconds=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What programs can and cannot do on this machine."""

    is_whole: bool
    """Nothing of ATTEMPTS succeeds: programs are run in namespaces of their own."""
    possible: tuple[str, ...] = ()
    """Those of ATTEMPTS that would succeed."""
    reason: str = ""
    """Why namespaces are not to be had."""

    def __str__(self) -> str:
        if self.is_whole:
            return "programs are isolated: no files, network, processes or secrets of this machine"
        what = "; ".join(ATTEMPTS[name] for name in self.possible)
        return f"programs cannot be isolated here ({self.reason}): they may {what}"


@functools.cache
def isolation() -> Isolation:
    """Try to get out, isolated and, where that cannot be had, as programs would be run instead.

    Raises SandboxError: programs cannot be run at all.
    """
    try:
        possible = _escapes(isolated=True)
    except SandboxError as error:
        return Isolation(is_whole=False, possible=_escapes(isolated=False), reason=str(error))
    if possible:
        return Isolation(is_whole=False, possible=possible, reason="namespaces do not hold them")
    return Isolation(is_whole=True)


def require(*, allow_unisolated: bool, key: str) -> None:
    """Say what this machine isolates. Raises SandboxError: too little to run programs, unless `key` allows that."""
    try:
        found = isolation()
    except SandboxError as error:
        raise SandboxError(f"programs cannot be run here: {error}") from error
    if not found.is_whole and not allow_unisolated:
        raise SandboxError(
            f"{found}; allow user namespaces on this machine (in a container: without the seccomp filter that forbids"
            f" unshare), or accept it with {key}"
        )
    sys.stderr.write(f"{'' if found.is_whole else 'WARNING: '}{found}\n")


def _escapes(*, isolated: bool) -> tuple[str, ...]:
    """What a program gets at, of the things that are put in its way."""
    secret = secrets.token_hex(16)
    with (
        tempfile.NamedTemporaryFile("w") as file,
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={"SLIPSTREAM_PROBE": secret}
        ) as other,
    ):
        file.write(secret)
        file.flush()
        order = {"pid": other.pid, "file": file.name, "port": server.getsockname()[1], "secret": secret}
        try:
            ended = run({"main.py": PROGRAM}, ["main.py"], json.dumps(order).encode(), LIMITS, isolated=isolated)
        finally:
            other.kill()
    try:
        found = json.loads(ended.out)
    except ValueError as error:
        said = ended.err.decode("utf-8", "replace").strip()[-300:]
        raise SandboxError(f"the program that tries to get out {ended.how} with {ended.code}: {said}") from error
    return tuple(name for name in ATTEMPTS if found.get(name))
