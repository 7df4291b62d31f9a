"""Ports of this machine: whether one can be bound, and by which process it is held. No torch."""

import socket
from pathlib import Path

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


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
    inodes = set()
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/net/{name}")
        rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]] if table.exists() else []
        inodes |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port
        }
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(str(link.readlink()) in inodes for link in folder.iterdir()):
                words = (folder.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                return f" by pid {folder.parent.name} ({words.strip()[:60]})"
        except OSError:  # it has ended, or is another user's
            continue
    return ""
