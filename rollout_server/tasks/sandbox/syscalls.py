"""System calls that a program in the sandbox is refused: memory that no limit counts, and doors to the machine.

A seccomp filter in the kernel's classic BPF (linux/seccomp.h, linux/filter.h). Standard library alone, as root.py.
"""

import ctypes
import errno
import platform
import socket
import struct
from typing import NamedTuple

from rollout_server.tasks.sandbox.root import LIBC, refused

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; the lower half of an argument on a little-endian machine."""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEWEST = 450
"""From this number on system calls are newer than this list, and do not exist inside (nor do those of x32)."""
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Of sockets, within a network of their own; no AF_VSOCK, which knows no network namespaces, no netlink, no AF_ALG."""
NAMESPACES = 0x7E020080
"""CLONE_NEW... of clone; clone3 is absent, because a filter cannot read its arguments, and the C library then takes
clone."""


class DeniedSyscall(NamedTuple):
    """Numbers of a system call on x86_64 and aarch64, and what it answers."""

    x86_64: int
    aarch64: int
    answer: int = errno.EPERM


REFUSED = {
    # memory outside of RLIMIT_AS and of the files' limit
    "memfd_create": DeniedSyscall(319, 279),
    "memfd_secret": DeniedSyscall(447, 447),
    "shmget": DeniedSyscall(29, 194),
    "msgget": DeniedSyscall(68, 186),
    "semget": DeniedSyscall(64, 190),
    "mq_open": DeniedSyscall(240, 180),
    # much of the kernel for few programs
    "io_uring_setup": DeniedSyscall(425, 425, errno.ENOSYS),
    "bpf": DeniedSyscall(321, 280),
    "perf_event_open": DeniedSyscall(298, 241),
    "userfaultfd": DeniedSyscall(323, 282),
    "add_key": DeniedSyscall(248, 217),
    "request_key": DeniedSyscall(249, 218),
    "keyctl": DeniedSyscall(250, 219),
    "clone3": DeniedSyscall(435, 435, errno.ENOSYS),
    "unshare": DeniedSyscall(272, 97),
    "setns": DeniedSyscall(308, 268),
    "mount": DeniedSyscall(165, 40),
    "fsopen": DeniedSyscall(430, 430),
    "open_tree": DeniedSyscall(428, 428),
    "ptrace": DeniedSyscall(101, 117),
    "pidfd_getfd": DeniedSyscall(438, 438),
    "open_by_handle_at": DeniedSyscall(304, 265),
    "fanotify_init": DeniedSyscall(300, 262),
    "kexec_load": DeniedSyscall(246, 104),
}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""Numbers of socket and socketpair."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse() -> None:
    """Filter the system calls of this process and of all that it starts, for good.

    Needs PR_SET_NO_NEW_PRIVS. Raises OSError: the kernel has no filters, or the machine's calls have no known numbers.
    """
    machine = platform.machine()
    if machine not in AUDIT:
        raise OSError(f"system calls of {machine} have no known numbers")
    program = _program(machine)
    order = _Program(len(program) // 8, program)
    if LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(order), 0, 0) != 0:
        refused("seccomp filter")


def _program(machine: str) -> bytes:
    """Instructions: each condition jumps over the verdict behind it where it does not hold."""
    code = [_step(LOAD, ARCHITECTURE), _step(IF_EQUAL, AUDIT[machine], 1, 0), _step(RETURN, KILL)]
    code += [_step(LOAD, NUMBER), *_verdict(IF_AT_LEAST, NEWEST, errno.ENOSYS)]
    for one in REFUSED.values():
        code += _verdict(IF_EQUAL, one.x86_64 if machine == "x86_64" else one.aarch64, one.answer)
    clone = [_step(LOAD, FIRST_ARGUMENT), *_verdict(IF_ANY_BIT, NAMESPACES, errno.EPERM), _step(RETURN, ALLOW)]
    code += [_step(IF_EQUAL, CLONE[machine], 0, len(clone)), *clone]
    first, second = SOCKET[machine]
    code += [_step(IF_EQUAL, first, 2, 0), _step(IF_EQUAL, second, 1, 0), _step(RETURN, ALLOW)]
    code += [_step(LOAD, FIRST_ARGUMENT)]
    for family in FAMILIES:
        code += [_step(IF_EQUAL, family, 0, 1), _step(RETURN, ALLOW)]
    return b"".join([*code, _step(RETURN, ERRNO | errno.EAFNOSUPPORT)])


def _verdict(condition: int, value: int, answer: int) -> list[bytes]:
    return [_step(condition, value, 0, 1), _step(RETURN, ERRNO | answer)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
