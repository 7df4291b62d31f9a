"""Learner ranks of one node: started plainly, each with a log of its own, and ended together.

A rank learns its place from its environment (learner/ranks.py), and dies with the process that started it.
"""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.launch import children
from slipstream.launch.children import Child, ending_of
from slipstream.runtime import ending
from slipstream.runtime.ending import Ending
from slipstream.runtime.lifeline import CANNOT_GO_ON, PARENT


@dataclass(slots=True)
class RankGroup:
    """The ranks of this node that belong to one start of all ranks; none before the first one."""

    generation: int = 0
    children: list[Child] = field(default_factory=list)
    _port: socket.socket | None = None

    @classmethod
    def start(
        cls, generation: int, command: Sequence[str], places: Iterable[tuple[str, Mapping[str, str]]], logs: Path
    ) -> "RankGroup":
        """Start them.

        Args:
            generation: number of this start.
            command: of each rank.
            places: name and environment of each; without MASTER_PORT they meet at a free one, so on this host alone.
            logs: folder of logs and endings.
        """
        group = cls(generation)
        own = {PARENT: str(os.getpid()), ending.GENERATION: str(generation)}
        for name, place in places:
            meeting = {} if "MASTER_PORT" in place else {"MASTER_PORT": str(group._free_port())}
            group.children.append(children.start(name, command, logs / f"{name}.log", {**own, **meeting, **place}))
        return group

    def _free_port(self) -> int:
        """One that rank 0 can listen at, and that the kernel gives to nothing else while this group has it."""
        if self._port is None:
            self._port = socket.socket()
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("", 0))  # it never listens: the store of rank 0, which reuses addresses as well, does
        return int(self._port.getsockname()[1])

    @property
    def is_done(self) -> bool:
        """Whether all have made all steps."""
        return bool(self.children) and all(child.exit_code() == 0 for child in self.children)

    @property
    def is_running(self) -> bool:
        """Whether any of them is there."""
        return any(child.exit_code() is None for child in self.children)

    def note_failures(self) -> None:
        """Note in its place how a rank has ended that could not do so itself: nodes read it in the run folder."""
        for child in self.children:
            if (code := child.exit_code()) and child.ending is None:
                rank = child.name.removeprefix("learner-")
                text = f"was {ending.how(code)}" if code < 0 else f"ended: {child.how_it_ended()}"
                symptom = "closed" if code < 0 else ""
                noted = Ending(code, f"learner rank {rank} (pid {child.pid}) {text}", pid=child.pid, symptom=symptom)
                path = ending_of(child.log_path)
                ending.write_file(path, replace(noted, rank=int(rank), generation=self.generation))

    def end(self) -> None:
        """End what is left of them."""
        children.stop(self.children)
        if self._port is not None:
            self._port.close()


def cause(failures: Sequence[Ending]) -> Ending | None:
    """The rank that a signal ended, or else the first that stopped: others fail in consequence.

    Returns:
        Its ending; the code is CANNOT_GO_ON where any rank refuses to go on.
    """
    refused = [one for one in failures if one.code == CANNOT_GO_ON]
    killed = ending.first(one for one in failures if one.code < 0)
    if killed is not None:
        return replace(killed, code=CANNOT_GO_ON) if refused else killed
    return ending.first(refused or failures)
