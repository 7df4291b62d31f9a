"""Programs in the sandbox that try to get out, take too much or forge how they ended; and a machine that isolates
nothing.

What only reads is tried by a plain child process too, where it has to succeed.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_server.tasks.sandbox import SandboxError, box, memory, probe
from rollout_server.tasks.sandbox.box import Ended, ResourceLimits, run
from tests.rollout_server.reward_runs import alive, needs_isolation

SECRET = "slipstream-test-secret-f2b1"
LIMITS = ResourceLimits(seconds=2.0)
MARK = f"of-{os.getpid()}"
"""An argument of every program."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def isolated() -> None:
    needs_isolation()


def boxed(program: str, stdin: str = "", limits: ResourceLimits = LIMITS, *, isolated: bool = True) -> Ended:
    return run({"main.py": program}, ["main.py", MARK], stdin.encode(), limits, isolated=isolated)


READS = """
import ctypes, json, os, socket, subprocess, sys
order = json.load(sys.stdin)
pid, found = order["pid"], {}
def tried(name, attempt):
    try:
        found[name] = repr(attempt())[:200]
    except (OSError, ValueError, KeyError, ImportError, StopIteration):
        pass
def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(1)
        s.connect(address)
        return "connected"
tried("read a file of the user", lambda: open(order["file"]).read())
tried("list the project", lambda: os.listdir(os.path.dirname(order["project"])))
tried("read /etc/passwd", lambda: open("/etc/passwd").read())
tried("read the project", lambda: open(order["project"]).read())
tried("reach a program on loopback", lambda: connect(socket.AF_INET, ("127.0.0.1", order["port"])))
tried("reach an abstract socket", lambda: connect(socket.AF_UNIX, "\\0" + order["abstract"]))
tried("see its parent", lambda: os.listdir(f"/proc/{pid}"))
tried("read its parent's environment", lambda: open(f"/proc/{pid}/environ").read())
tried("secret in the environment", lambda: next(v for v in os.environ.values() if order["secret"] in v))
"""
"""What any child process may do, and a program in the sandbox may not. Only these are tried outside of it as well."""
ATTACKS = """
if (os.getcwd(), os.getpid()) != ("/box", 1):
    raise SystemExit("this is not the sandbox")
def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)
    return "allowed"
def user_by_su():
    command = ["su", "-c", "id -u"]
    return {"0": 1}[subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.strip()]
tried("write a file of the user", lambda: open(order["file"], "r+").write("x"))
tried("write into the interpreter", lambda: open(os.path.join(sys.prefix, "x"), "w"))
tried("write into /usr", lambda: open("/usr/x", "w"))
tried("reach the internet", lambda: connect(socket.AF_INET, ("198.51.100.1", 80)))
tried("signal its parent", lambda: os.kill(pid, 0))
tried("signal others", lambda: os.kill(-1, 0))
tried("read its parent's memory", lambda: open(f"/proc/{pid}/mem", "rb"))
tried("ptrace its parent", lambda: call("ptrace", 16, pid, 0, 0))
tried("mount", lambda: call("mount", b"x", b"/box", b"tmpfs", 0, None))
tried("make /usr writable", lambda: call("mount", None, b"/usr", None, 32 | 4096, None))
tried("unmount", lambda: call("umount2", b"/dev/null", 0))
tried("leave by chroot", lambda: os.chroot("/box"))
tried("be root", lambda: os.setuid(0))
tried("make a namespace", lambda: call("unshare", 0x10000000))
tried("enter a namespace", lambda: os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY))
tried("gain rights by a setuid program", user_by_su)
def system(x86, arm, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(arm if os.uname().machine == "aarch64" else x86, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "system call")
    return "allowed"
def spared():
    return {True: "spared"}[int(open("/proc/self/oom_score_adj").read()) < 1000 or os.nice(0) < 10]
tried("hold memory in a memfd", lambda: os.memfd_create("x"))
tried("hold memory in a secret memfd", lambda: system(447, 447, 0))
tried("hold memory in System V segments", lambda: system(29, 194, 0, 1 << 20, 0o1600))
tried("reach the hypervisor", lambda: socket.socket(socket.AF_VSOCK))
tried("ask the kernel by netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
tried("use the kernel's cryptography", lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))
tried("have an io_uring", lambda: system(425, 425, 4, ctypes.create_string_buffer(120)))
tried("read the kernel's keys", lambda: open("/proc/keys").read())
tried("add a key", lambda: system(248, 217, b"user", b"x", b"y", 1, -1))
tried("handle page faults", lambda: system(323, 282, 1))
tried("load a program into the kernel", lambda: system(321, 280, 0, None, 0))
tried("count events", lambda: system(298, 241, None, 0, -1, -1, 0))
tried("make a namespace by clone3", lambda: system(435, 435, (ctypes.c_uint64 * 11)(0x10000000), 88))
tried("read of the machine", lambda: open("/proc/meminfo").read())
tried("outlive the engine without memory", spared)
tried("have files of its caller", lambda: next(fd for fd in range(3, 64) if os.fstat(fd)))
"""
"""Tried inside alone, and harmless where one succeeds: nothing is mounted on, or taken from, a path of the machine."""
TELL = "print(json.dumps(found))"


@pytest.fixture
def around() -> Iterator[dict[str, object]]:
    """What a program may try to reach: a file, two listeners, and this process with a secret in its environment."""
    abstract = f"slipstream-{os.getpid()}"
    with (
        tempfile.NamedTemporaryFile("w") as file,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind(f"\0{abstract}")
        unix.listen()
        file.write("kept")
        file.flush()
        yield {
            "file": file.name,
            "project": str(Path(__file__)),
            "port": server.getsockname()[1],
            "abstract": abstract,
            "secret": SECRET,
            "pid": os.getpid(),
        }


def test_every_escape_fails(isolated: None, around: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TEST_KEY", SECRET)
    command = [sys.executable, "-c", READS + TELL]
    plain = subprocess.run(command, input=json.dumps(around), capture_output=True, text=True, timeout=150)
    assert len(json.loads(plain.stdout)) == READS.count("tried(") - 1, plain.stdout + plain.stderr
    ended = boxed(READS + ATTACKS + TELL, json.dumps(around), ResourceLimits(seconds=20.0))
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == {}
    assert Path(str(around["file"])).read_text() == "kept"


def test_a_program_sees_a_fresh_folder_and_leaves_nothing(
    isolated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os; print(os.listdir('.'), os.getcwd(), os.getpid(), input()); open('kept', 'w').write('x')"
    for _ in range(2):
        assert boxed(program, "hello").out == b"['main.py'] /box 1 hello\n"
    assert list(tmp_path.iterdir()) == []


def test_a_fork_bomb_is_bounded_and_gone(isolated: None) -> None:
    bomb = """
import os, sys, time
started = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        started += 1
except OSError:
    print(started, flush=True)
    time.sleep(60)
"""
    start = time.monotonic()
    ended = boxed(bomb, limits=ResourceLimits(seconds=3.0, processes=12))
    assert (ended.how, ended.code) == ("timed_out", None) and time.monotonic() - start < 15
    assert 0 < int(ended.out) <= 12
    assert not alive(sleepers())


def sleepers() -> list[int]:
    """Processes that a program of this file has started, not those of other tests that run now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"\0-I\0main.py\0{MARK}".encode() in command:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("program", "how", "code"),
    [
        ("while True: pass", "timed_out", None),
        ("import time; time.sleep(60)", "timed_out", None),
        (
            "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (15, 2, 1)]; time.sleep(60)",
            "timed_out",
            None,
        ),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "flooded", None),
        ("import os\nwhile True: os.write(2, b'x' * 65536)", "flooded", None),
        ("import os; os._exit(0)", "ended", 0),
        ("import os; os._exit(7)", "ended", 7),
        ("x = bytearray(10**9)", "ended", 1),
        ("open('big', 'wb').write(b'x' * 10**8)", "ended", 1),
        ("import os\nfor n in range(9): open(str(n), 'wb').write(b'x' * 10**7)", "ended", 1),
        ("import socket; [socket.socket() for _ in range(999)]", "ended", 1),
    ],
)
def test_what_takes_too_much_is_stopped(isolated: None, program: str, how: str, code: int | None) -> None:
    seconds = 0.4 if how == "timed_out" else 20.0
    limits = ResourceLimits(seconds=seconds, memory_bytes=256 * 1024**2, file_bytes=32 * 1024**2, output_bytes=200_000)
    ended = boxed(program, limits=limits)
    assert (ended.how, ended.code) == (how, code), ended.err
    assert len(ended.out) + len(ended.err) < 2 * 200_000 + 2 * box.CHUNK


@pytest.mark.parametrize(("held", "own", "seconds", "how"), [(0, 150, 60, "ran_out_of_memory"), (150, 0, 0.5, "ended")])
def test_the_memory_of_all_processes_is_bounded(
    isolated: None, monkeypatch: pytest.MonkeyPatch, held: int, own: int, seconds: float, how: str
) -> None:
    """Three forks, each within its own limit; what a fork shares with its parent counts once."""
    monkeypatch.setattr(memory, "place_of_groups", lambda: None)
    program = f"""
import os, time
held = bytearray({held} * 2**20)
for _ in range(3):
    if os.fork() == 0:
        own = bytearray({own} * 2**20)
        time.sleep({seconds})
        os._exit(0)
for _ in range(3):
    os.wait()
"""
    limits = ResourceLimits(seconds=30.0, memory_bytes=256 * 1024**2, total_bytes=300 * 1024**2)
    assert (ended := boxed(program, limits=limits)).how == how, ended.err


def test_not_isolated_a_program_has_limits_and_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemons end too, and the time; what it may read is not bounded, which start-up says."""
    monkeypatch.setenv("SLIPSTREAM_TEST_KEY", SECRET)
    program = """
import os, resource, time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
print(sorted(os.environ), resource.getrlimit(resource.RLIMIT_AS)[0], os.listdir("."), flush=True)
"""
    ended = boxed(program, limits=ResourceLimits(seconds=2.0, memory_bytes=10**9), isolated=False)
    names, rest = ended.out.decode().split("] ", 1)
    assert "SLIPSTREAM_TEST_KEY" not in names and rest == "1000000000 ['main.py']\n"
    assert not alive(sleepers())
    stays = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\nwhile True: pass"
    assert boxed(stays, limits=ResourceLimits(seconds=1.0), isolated=False).how == "timed_out"  # it has forked by then
    assert not alive(sleepers())


def test_a_sandbox_that_cannot_be_set_up_is_no_verdict_on_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program cannot say so itself: it does not have the pipe."""
    monkeypatch.setattr(box, "visible_paths", lambda: ["/no/such/folder"])
    with pytest.raises(SandboxError, match="open_tree of /no/such/folder"):
        boxed("print(1)")
    monkeypatch.undo()
    forged = (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'PermissionError: unshare')\n  except OSError: pass"
    )
    assert boxed(forged).code == 0


def test_where_namespaces_are_refused_it_is_said_what_programs_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose seccomp filter forbids unshare."""
    isolated = box.run

    def refused(*arguments: object, isolated: bool, **keys: object) -> Ended:
        if isolated:
            raise SandboxError("OSError: [Errno 1] unshare of user, mount: Operation not permitted")
        return unchanged(*arguments, isolated=False, **keys)  # type: ignore[arg-type]

    unchanged = isolated
    monkeypatch.setattr(probe, "run", refused)
    found = probe.isolation.__wrapped__()
    assert not found.is_whole and set(found.possible) == {"files", "network", "processes", "secrets"}, found
    assert "unshare" in str(found) and "they may read and write files" in str(found)


def test_where_nothing_is_refused_the_probe_finds_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(files: dict[str, str], _arguments: object, order: bytes, *_: object, **__: object) -> Ended:
        command = [sys.executable, "-c", files["main.py"]]
        ended = subprocess.run(command, input=order, capture_output=True, timeout=150, check=False)
        return Ended(how="ended", code=ended.returncode, out=ended.stdout, err=ended.stderr, seconds=0.0)

    expected = set(probe.ATTEMPTS)
    try:
        socket.socket(socket.AF_VSOCK).close()
    except OSError:  # this kernel has none
        expected.remove("hypervisor")
    monkeypatch.setattr(probe, "run", plain)
    found = probe.isolation.__wrapped__()
    assert not found.is_whole and set(found.possible) == expected, found


def test_a_control_group_is_made_where_one_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "slice" / "server"
    own.mkdir(parents=True)
    for folder, controllers in ((own, ""), (own.parent, "cpu memory\n")):
        (folder / "cgroup.subtree_control").write_text(controllers)
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    monkeypatch.setattr(memory, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text("4:memory:/x\n0::/slice/server\n")
    assert memory.place_of_groups() == own.parent
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)  # of a real group its files vanish with it
    with memory.bounded("box", 1 << 30, 18) as group:
        assert group == str(own.parent / "box" / "cgroup.procs")
        assert (own.parent / "box" / "memory.max").read_text() == str(1 << 30)
    assert not (own.parent / "box").exists()
    (own.parent / "cgroup.subtree_control").write_text("cpu")
    with memory.bounded("box", 1 << 30, 18) as group:
        assert group == ""
