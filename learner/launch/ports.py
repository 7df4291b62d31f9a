"""Ports of this machine: whether one can be bound, and by which process it is held. No torch."""

import socket
from contextlib import suppress

import psutil


def problem_with_port(host: str, port: int) -> str:
    """Why the port cannot be bound, and by which process it is held; empty where it can be, and for port 0."""
    if port == 0:
        return ""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"{error.strerror}{holder(port)}"
    return ""


def holder(port: int) -> str:
    """` by pid 71 (python -m replay.main)`; empty where it cannot be seen, as with a process of another user."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None:
            with suppress(psutil.Error):  # it has ended
                return f" by pid {one.pid} ({' '.join(psutil.Process(one.pid).cmdline())[:60]})"
    return ""
