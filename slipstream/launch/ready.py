"""The file that a readiness probe looks at: there, and new, while this node's processes take part in the run.

A rollout server takes part when it serves proven weights; a learner node when its ranks have said Hello.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.placement import ranks_of
from slipstream.launch.node_spec import NodeAssignment

LOOK_S = 15.0
"""A node looks at least so often."""


def probe(file: str) -> list[str]:
    """A command that ends with 0 while the file is there and at most a minute old, without a start of Python."""
    return ["sh", "-c", f'test -n "$(find {file} -mmin -1 2>/dev/null)"']


def absent(assignment: NodeAssignment, state: Mapping[str, Any]) -> list[str]:
    """Names of this node's processes that take no part yet, by replay's status; all, where that is empty."""
    present = {
        peer["name"] for peer in state.get("peers", ()) if peer["role"] == "learner" or peer["version"] is not None
    }
    node, role = assignment.spec.node, assignment.spec.role
    if role == "rollout":
        wanted = [process.name for process in assignment.plan.of(node, role)]
    else:
        wanted = [f"learner-{rank}" for rank in ranks_of(assignment.config.shares, node)]
    return [name for name in wanted if name not in present]


def note(file: Path, absent: Sequence[str]) -> None:
    """Make the file new, or take it away where a process takes no part. Raises OSError."""
    if absent:
        file.unlink(missing_ok=True)
    else:
        file.touch()
