"""The file system of an isolated program: a bounded one in memory, with a few folders of the machine read-only.

Linux 5.12 or newer (mount_setattr). ctypes, because Python has no calls for mounts; standard library alone, because a
program waits for this module's import.
"""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable
from typing import NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
"""Its number of system call; glibc has no function for it."""
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_MOUNT_F_EMPTY_PATH = 1, os.O_CLOEXEC, 4
RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
"""The same numbers as MS_... and MOUNT_ATTR_..."""
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 1 << 18, 2
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
WORK = "/box"
"""Where the program is, and may write."""


def build(folder: str, visible: Iterable[str], size_bytes: int, user: int, become: int) -> None:
    """Make the file system at `folder` and enter it, in a mount namespace of one's own.

    Args:
        folder: an empty one, for the mount to lie on.
        visible: absolute paths that the program may read; links are made again, what is not there is left out.
        size_bytes: what all files that the program writes may take.
        user: of the program, in its user namespace; it owns what is made here.
        become: the user to make folders as; the machine's folders are found as the present one.

    Raises:
        OSError: the kernel refused a part; nothing may be run then.
    """
    if platform.machine() not in PIVOT_ROOT:
        raise OSError(f"pivot_root has no known number on {platform.machine()}")
    _mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    trees = [(path, _tree(path, RDONLY | NOSUID | NODEV)) for path in visible if not os.path.islink(path)]
    links = [(path, os.readlink(path)) for path in visible if os.path.islink(path)]
    devices = [(path, _tree(path, NOSUID | NOEXEC)) for path in DEVICES]
    options = f"size={size_bytes},nr_inodes=4096,mode=755,uid={user},gid={user}"
    _mount("box", folder, "tmpfs", NOSUID | NODEV, options)
    top = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.setresuid(become, become, become)
    os.fchdir(top)
    for name in ("proc", "dev", "dev/shm", "tmp", WORK[1:]):
        os.mkdir(name)
    for path, tree in [*trees, *devices]:
        _place(path[1:], tree)
    for path, target in links:
        os.makedirs(os.path.dirname(path[1:]) or ".", exist_ok=True)
        os.symlink(target, path[1:])
    with contextlib.suppress(PermissionError):  # where a container hides parts of /proc: then there is none inside
        # its processes alone: nothing of the kernel's keys, modules and numbers
        _mount("proc", "proc", "proc", NOSUID | NODEV | NOEXEC, "subset=pid")
    _check(LIBC.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(LIBC.umount2(b".", MNT_DETACH), "umount of the machine's root")
    os.chdir(WORK)


def _tree(path: str, attributes: int) -> int:
    """A copy of what is mounted at a path and below, with these attributes; nowhere yet."""
    tree: int = LIBC.syscall(OPEN_TREE, AT_FDCWD, path.encode(), OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE)
    _check(tree, f"open_tree of {path}")
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    done = LIBC.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, wanted, ctypes.sizeof(wanted))
    _check(done, f"mount_setattr of {path}")
    return tree


def _place(path: str, tree: int) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if os.path.isdir(tree):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
    _check(LIBC.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, path.encode(), MOVE_MOUNT_F_EMPTY_PATH), f"mount on /{path}")
    os.close(tree)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    done = LIBC.mount(*texts, ctypes.c_ulong(flags), None if options is None else options.encode())
    _check(done, f"mount of {kind or 'nothing'} on {target}")


def _check(result: int, what: str) -> None:
    if result < 0:
        refused(what)


def refused(what: str) -> NoReturn:
    """Raises OSError, or PermissionError: why the last call of LIBC has failed."""
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
