"""Starts of the learner over several nodes, by files of the run folder that all learner nodes share.

    launch/start.json         the launcher: which generation of ranks shall run, and whether it resumes
    launch/NODE.ranks.json    each other learner node: which generation its ranks are of, and their pids

The launcher begins a generation when a rank or a node has failed; a node then ends its ranks, and starts those of the
new one as soon as replay answers it. Nothing is deleted: a later start of the run counts on.
"""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import Config
from learner.checkpoints.folders import replace_json
from slipstream.runtime import processes

START = "launch/start.json"


@dataclass(frozen=True, slots=True)
class Start:
    """What the launcher wants. Example: Start(generation=2, resumes=True)."""

    generation: int
    resumes: bool


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """What a learner node runs. Example: NodeRanks(generation=2, ranks={"learner-1": 471}, process="host1 71 817")."""

    generation: int
    """0 of a node's process that has taken the place of another one, and runs nothing yet."""
    ranks: Mapping[str, int]
    """Pid by name."""
    process: str
    """Of the node that wrote this."""


def this_process() -> str:
    """Which process of which host this is."""
    found = processes.of(os.getpid())
    return f"{socket.gethostname()} {os.getpid()} {found.started if found is not None else 0}"


def write_start(run_dir: Path, start: Start) -> None:
    """Tell the other learner nodes. Raises OSError."""
    (run_dir / START).parent.mkdir(parents=True, exist_ok=True)
    replace_json(run_dir / START, asdict(start))


def read_start(run_dir: Path) -> Start | None:
    """None where it cannot be read at the moment."""
    found = _read(run_dir / START)
    return Start(**found) if found is not None else None


def write_ranks(run_dir: Path, node: str, ranks: NodeRanks) -> None:
    """Tell the launcher. Raises OSError."""
    replace_json(_of_node(run_dir, node), asdict(ranks))


def read_ranks(run_dir: Path, node: str) -> NodeRanks | None:
    """None where it cannot be read at the moment."""
    found = _read(_of_node(run_dir, node))
    return NodeRanks(**found) if found is not None else None


def _of_node(run_dir: Path, node: str) -> Path:
    return run_dir / "launch" / f"{node}.ranks.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


@dataclass(slots=True)
class Generations:
    """The launcher's side: the present generation, and which nodes take part in it."""

    config: Config
    number: int = 0
    all_came: bool = False
    """Every other learner node has started its ranks of the present generation."""
    _nodes: dict[str, NodeRanks] = field(default_factory=dict)

    def begin(self, *, resumes: bool) -> None:
        """Want another generation than the last, which an earlier launcher of this run may have begun."""
        run_dir = Path(self.config.run_dir)
        if self.number == 0 and (before := read_start(run_dir)) is not None:
            self.number = before.generation
        self.number, self.all_came = self.number + 1, False
        if len(self.config.learner_nodes) > 1:
            write_start(run_dir, Start(self.number, resumes))

    def missing(self) -> list[str]:
        """Other learner nodes whose ranks are not of this generation: they have not come, or were started again."""
        run_dir, others = Path(self.config.run_dir), self.config.learner_nodes[1:]
        found = {node: read_ranks(run_dir, node) for node in others}
        self._nodes |= {node: ranks for node, ranks in found.items() if ranks is not None}
        missing = [node for node in others if node not in self._nodes or self._nodes[node].generation != self.number]
        self.all_came = self.all_came or not missing
        return missing

    @property
    def pids(self) -> set[tuple[str, int]]:
        """Name and pid of the ranks of the other nodes in this generation."""
        present = [node for node in self._nodes.values() if node.generation == self.number]
        return {(name, pid) for node in present for name, pid in node.ranks.items()}
