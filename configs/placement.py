"""The GPU split: which device of which node belongs to a rollout server or to a learner rank. Pure, no torch.

`shares` reads `placement.split`, or `placement.rollout` and `placement.learner`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from configs.errors import BadPlacement
from configs.infrastructure import Placement

ONLY_NODE = "node0"
"""What the one host of `placement.split` is called."""


@dataclass(frozen=True, slots=True)
class Share:
    """One node's devices. On a CPU the numbers only count processes.

    Example: Share("node0", rollout=(0, 1, 2, 3, 4, 5), learner=(6, 7))
    """

    node: str
    rollout: tuple[int, ...]
    learner: tuple[int, ...]
    teachers: tuple[int, ...] = ()
    is_first: bool = True
    """Its teachers are started by the learner's side, those of other nodes by the rollout side."""

    def devices(self, role: str) -> tuple[int, ...]:
        """Those that the `learner` or the `rollout` side needs."""
        own = self.learner if role == "learner" else self.rollout
        return tuple(sorted({*own, *self.teachers})) if (role == "learner") == self.is_first else own

    def engines(self, tensor_parallel: int) -> list[tuple[int, ...]]:
        """Devices of each rollout server, in blocks of `tensor_parallel`."""
        starts = range(0, len(self.rollout), tensor_parallel)
        return [self.rollout[start : start + tensor_parallel] for start in starts]


def node_devices(spec: str, key: str = "placement") -> Iterator[tuple[str, int]]:
    """Yield (node, device) of a placement such as `node0:6-7; node1:0,2`.

    Raises:
        ConfigError: the spec does not parse; the message shows the part that does not.
    """
    for part in filter(None, (p.strip() for p in spec.split(";"))):
        match = re.fullmatch(r"([A-Za-z0-9._-]+):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)", part)
        if match is None:
            raise BadPlacement(f"{key}: {part!r} is not of the form 'node0:0-5' or 'node0:0,2'")
        for piece in match[2].split(","):
            first, _, last = piece.partition("-")
            if last and int(last) < int(first):
                raise BadPlacement(f"{key}: {piece!r} in {part!r} counts backwards; give the first device first")
            yield from ((match[1], device) for device in range(int(first), int(last or first) + 1))


def shares(placement: Placement, teachers: Sequence[tuple[str, tuple[int, ...]]] = ()) -> tuple[Share, ...]:
    """Each node's devices: the learner's nodes in the order of `placement.learner`, then the others.

    `teachers` are node and devices of each of their processes.

    The first node is the one that replay and the learner's rank 0 run on.

    Raises:
        ConfigError: the keys do not make a placement; the message names them.
    """
    if (placement.rollout is None) != (placement.learner is None):
        missing = "rollout" if placement.rollout is None else "learner"
        raise BadPlacement(f"placement.{missing}: missing; placement.rollout and placement.learner come together")
    if placement.rollout is None or placement.learner is None:
        parts = [_split(placement)]
    else:
        rollout = _by_node("placement.rollout", placement.rollout)
        learner = _by_node("placement.learner", placement.learner)
        parts = [
            Share(node, tuple(rollout.get(node, ())), tuple(learner.get(node, ()))) for node in (learner | rollout)
        ]
    parts += [Share(node, (), ()) for node in dict(teachers).keys() - {part.node for part in parts}]
    of_teachers = {
        part.node: [one for node, devices in teachers if node == part.node for one in devices] for part in parts
    }
    return tuple(
        replace(part, teachers=tuple(of_teachers[part.node]), is_first=not number) for number, part in enumerate(parts)
    )


def check(placement: Placement, *, needs_servers: bool = True) -> None:
    """What needs no machine to be known; without `needs_servers` nothing samples.

    Raises:
        ConfigError: a side without a device, a device given twice, or an engine that does not fit its node.
    """
    parts = shares(placement)
    rollout, ranks = sum(len(part.rollout) for part in parts), sum(len(part.learner) for part in parts)
    if ranks < 1 or (rollout < 1 and placement.local_rollouts and needs_servers):
        raise BadPlacement(
            f"placement.split: {placement.split!r} leaves a side without a device; give each side at least 1"
            " (rollout servers started by hand: placement.local_rollouts=false)"
        )
    for part in parts:
        both = set(part.rollout) & set(part.learner)
        if both and not placement.share_gpus:
            raise BadPlacement(
                f"placement: {part.node}:{min(both)} is given to both sides; rollout and learner devices must be"
                " disjoint, or set placement.share_gpus=true"
            )
        rest = len(part.rollout) % placement.tensor_parallel
        if rest and placement.rollout is None:
            raise BadPlacement(
                f"placement.tensor_parallel: {rollout} rollout devices are not divisible by {placement.tensor_parallel}"
            )
        if rest:
            raise BadPlacement(
                f"placement.rollout: {part.node} has {len(part.rollout)} rollout devices, so an engine of"
                f" placement.tensor_parallel {placement.tensor_parallel} would span nodes; give {part.node} a multiple"
                f" of {placement.tensor_parallel}"
            )


def ranks_of(parts: tuple[Share, ...], node: str) -> range:
    """The learner ranks on a node; they count through the nodes in their order."""
    names = [part.node for part in parts]
    before = sum(len(part.learner) for part in parts[: names.index(node)])
    return range(before, before + len(parts[names.index(node)].learner))


def most_devices(share: Share) -> int:
    """Devices that the node needs: the highest index and one."""
    return max((*share.rollout, *share.learner, *share.teachers), default=-1) + 1


def _split(placement: Placement) -> Share:
    if placement.split is None or not re.fullmatch(r"\d+:\d+", placement.split):
        raise BadPlacement(
            f"placement.split: {placement.split!r} is not of the form 'R:L', such as '6:2' for 6 rollout and 2"
            " learner devices"
        )
    rollout, learner = map(int, placement.split.split(":"))
    first = max(0, rollout - learner) if placement.share_gpus else rollout
    return Share(ONLY_NODE, tuple(range(rollout)), tuple(range(first, first + learner)))


def _by_node(key: str, spec: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node, device in node_devices(spec, key):
        devices = found.setdefault(node, [])
        if device in devices:
            raise BadPlacement(f"{key}: {node}:{device} is given twice")
        devices.append(device)
    if not found:
        raise BadPlacement(f"{key}: {spec!r} names no device; give node:devices, such as 'node0:0-5'")
    return found
