"""The machines of a Ray cluster: a placement group with a bundle for each node, and an actor for each node's process.

Ray places the bundles, and ends an actor with its raylet or with this process; a node's process ends with its actor,
which holds its stdin. No data of the run goes through Ray. This is the one file that imports it.
"""

import contextlib
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.errors import BadHosts, BadOption, PackageMissing
from configs.placement import Share
from configs.schema import Config
from slipstream.launch.host_file import Host
from slipstream.launch.reach import Output
from slipstream.launch.reach.actor import NodeActor
from slipstream.launch.terminal import say
from slipstream.plan.processes import Machine, uses_gpus
from slipstream.runtime.ending import how
from slipstream.runtime.lifeline import CANNOT_GO_ON

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayError
    from ray.util import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise PackageMissing(
        f"--ray: needs the package ray ({error}); install the extra on every node: pip install 'slipstream-rl[ray]'"
    ) from error

ACTOR_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""A node's process ends in order when its actor is gone: Ray must not kill it at that moment."""
LOST = 255
"""Exit code of a node whose actor is gone, as of ssh."""
PLACED_S = 5.0
"""A placement that takes longer is shown."""
RPC_S, UNREACHED_S = 5.0, 1.0
"""How long an actor has to kill a process, and until one that Ray does not reach is asked again."""
AGAIN = "start Ray again there, then the run with --resume RUN_DIR"
LOOK_S, HEAD_S = 2.0, 20.0
"""How often Ray's head is looked for, and how long it may be away; after 60 s Ray ends every process of its own."""


class PlacedActor(NodeActor):
    """What runs in a bundle."""

    def place(self) -> tuple[str, str]:
        """The id of this machine in Ray, and its address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor is to start."""

    words: Sequence[str]
    line: str = field(repr=False)
    only_at: str
    """The address at which the other nodes look for it; empty where none does."""
    before: "RayRemote | None"
    """The process that this one follows."""


class RayRemote:
    """The process of a node, in an actor; a thread follows it to its end."""

    def __init__(self, name: str, actor: Any, order: Order, no_more: Callable[[], str]) -> None:
        """`no_more` says why no other actor can follow a lost one; empty where one can."""
        self.output, self.node_id, self.pid = Output(name), "", 0
        self._actor, self._order, self._no_more = actor, order, no_more
        self._code: int | None = None
        self._given_up, self._lost = "", ""
        self._thread = threading.Thread(target=self._run, name=f"actor-of-{name}", daemon=True)
        self._thread.start()

    def exit_code(self) -> int | None:
        """None while it runs, and before Ray has placed it."""
        return self._code

    def how_it_ended(self) -> str:
        """What ended it, and its last line."""
        last = self.output.last_line()
        return self._given_up or self._lost or how(self._code or 0) + (f": {last}" if last else "")

    def close_stdin(self) -> None:
        """Have it end in order."""
        if self._code is None and self.pid:
            self._actor.close_stdin.remote()
        elif self._code is None:
            ray.kill(self._actor)

    def kill(self) -> None:
        """End what is left of it and of its actor."""
        if self._code is not None:
            return
        with contextlib.suppress(RayError):
            ray.get(self._actor.kill.remote(), timeout=RPC_S)
        ray.kill(self._actor)
        self._thread.join(RPC_S)

    def give_up(self, cause: str) -> None:
        """Have it end in order and for good: no other process follows."""
        if self._code is None:
            self._given_up = cause
            if self.pid:
                self.close_stdin()
            else:  # Ray will not place it any more
                self._code = CANNOT_GO_ON

    def _run(self) -> None:
        try:
            code = self._follow()
        except RayError as error:
            code, self._lost = LOST, _said(error)
            self._given_up = self._given_up or self._no_more()
        self._code = CANNOT_GO_ON if self._given_up else code
        ray.kill(self._actor)  # its GPUs are free for the next one

    def _follow(self) -> int:
        order = self._order
        self.node_id, address = ray.get(self._actor.place.remote())
        if order.only_at not in ("", address):
            self._given_up = (
                f"Ray has placed it at {address}, and the other nodes look for it at {order.only_at}: start the run"
                " again with --resume RUN_DIR"
            )
            return CANNOT_GO_ON
        follows = order.before.pid if order.before is not None and order.before.node_id == self.node_id else 0
        words = [*order.words, "--host", address, "--renumber"]
        self.pid = ray.get(self._actor.start.remote(words, order.line, os.getcwd(), follows))
        is_reached = True
        while True:
            try:
                lines, code = ray.get(self._actor.news.remote())
            except ActorUnavailableError:
                if is_reached:
                    say(f"{self.output.name}: Ray does not reach its actor, and finds out whether it is lost [silent]")
                is_reached = False
                time.sleep(UNREACHED_S)
                continue
            is_reached = True
            for line in lines:
                self.output.take(line)
            if code is not None:
                return int(code)


def _said(error: RayError) -> str:
    """The first sentence of what Ray says of a lost actor, behind the lines that describe it."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return f"its actor in Ray is lost: {lines[-1].partition('. ')[0][:200] if lines else type(error).__name__}"


def _nodes(*, alive: bool) -> list[Any]:
    """Ray's records of its nodes."""
    return [node for node in ray.nodes() if node["Alive"] == alive]


class RayReach:
    """The machines of a cluster that this process joins as a driver."""

    shares_files = False

    def __init__(self, address: str) -> None:
        """Raises ConfigError: there is no such cluster, or it has another version of Ray."""
        self._remotes: dict[str, list[RayRemote]] = {}
        """By actor: the process of each start, in order."""
        self._shares: list[Share] = []
        self._on_gpus = self._head_is_lost = False
        self._closed = threading.Event()
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BadHosts(
                f"--ray {address}: joins no cluster of Ray ({' '.join(str(error).split())[:300]}); start one with `ray"
                " start --head`, and run this on one of its machines, or as the command of `ray job submit`"
            ) from error
        self._head, self._own_node = ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_node_id()
        threading.Thread(target=self._watch, name="watch-of-ray", daemon=True).start()

    def hosts(self, config: Config, *, only_rollouts: bool = False) -> dict[str, Host]:
        """The placement's nodes where Ray has placed their bundles. Raises ConfigError."""
        if config.placement.share_gpus:
            raise BadOption("--ray: Ray gives each role GPUs of its own; set placement.share_gpus to false")
        self._shares = [share for share in config.shares if share.devices("rollout") or not only_rollouts]
        self._title, self._first = f"slipstream/{config.run.name}", config.shares[0].node
        has_gpus = any(node["Resources"].get("GPU") for node in _nodes(alive=True))
        self._on_gpus = uses_gpus(config, Machine("", gpus=None if has_gpus else 0))
        wanted = {share.node: self._gpus(share, "learner") + self._gpus(share, "rollout") for share in self._shares}
        bundles = [{"CPU": 1, **({"GPU": gpus} if gpus else {})} for gpus in wanted.values()]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD", name=self._title)
        self._wait_for_placement(config.placement.give_up_after_s, wanted)
        places = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes(alive=True)}
        gpus = None if self._on_gpus else 0
        here = {name: Host(name, addresses[places[i]], places[i], gpus) for i, name in enumerate(wanted)}
        names = [share.node for share in config.shares]
        return {name: here.get(name) or Host(name, f"elsewhere-{name}", "") for name in names}

    def start(self, name: str, host: Host, words: Sequence[str], line: str) -> RayRemote:
        """As Reach.start: an actor in the node's bundle, wherever Ray has it by then."""
        role, number = words[list(words).index("--role") + 1], self._number(host)
        title = f"{self._title}/{name}-{role}"
        earlier = self._remotes.setdefault(title, [])
        actor = (
            ray.remote(PlacedActor)
            .options(
                name=f"{title}.{len(earlier)}" if earlier else title,
                max_concurrency=3,
                num_cpus=0,
                num_gpus=self._gpus(self._shares[number], role),
                runtime_env={"env_vars": ACTOR_ENVIRONMENT},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number),
            )
            .remote()
        )
        only_at = host.address if role == "learner" and host.name == self._first else ""
        order = Order(words, line, only_at, earlier[-1] if earlier else None)
        earlier.append(RayRemote(name, actor, order, self._raylet_is_lost))
        return earlier[-1]

    def shown(self, host: Host, words: Sequence[str]) -> str:
        """As Reach.shown."""
        return f"in an actor of Ray, bundle {self._number(host)}: {shlex.join(words)}"

    def close(self) -> None:
        """Leave the cluster, which ends the actors and gives back the bundles."""
        self._closed.set()
        if not self._head_is_lost:
            ray.shutdown()

    def _number(self, host: Host) -> int:
        return next(number for number, share in enumerate(self._shares) if share.node == host.name)

    def _gpus(self, share: Share, role: str) -> int:
        """GPUs of a role on a node: the only ones that Ray shows to its actor."""
        return len(share.devices(role)) if self._on_gpus else 0

    def _wait_for_placement(self, limit_s: float, wanted: Mapping[str, int]) -> None:
        nodes = ", ".join(f"{name} ({gpus} GPUs)" if gpus else name for name, gpus in wanted.items())
        what = f"--ray: Ray has no room yet for {nodes}, each on a machine of its own with a CPU"
        if self._group.wait(PLACED_S):
            return
        say(f"{what}; waits for up to {limit_s:g} s (placement.give_up_after_s)")
        if not self._group.wait(limit_s):
            raise BadHosts(f"{what}; `ray status` shows what it has: add machines, or correct the placement")

    def _watch(self) -> None:
        """End every node in order where Ray would end them, and this process."""
        seen, cause = time.monotonic(), ""
        while not cause and not self._closed.wait(LOOK_S):
            if self._head_answers():
                seen, cause = time.monotonic(), self._raylet_is_lost()
            elif time.monotonic() - seen > HEAD_S:
                self._head_is_lost = True
                cause = f"Ray's head at {self._head} has been away for {HEAD_S:g} s [closed]; {AGAIN}"
        if cause:
            say(f"--ray: {cause}; the nodes are ended in order")
            for remote in [remote for starts in [*self._remotes.values()] for remote in starts]:
                remote.give_up(cause)

    def _raylet_is_lost(self) -> str:
        """Why Ray ends the actors of this process and starts no other; empty where it does not."""
        if not (self._head_answers() and any(node["NodeID"] == self._own_node for node in _nodes(alive=False))):
            return ""
        return f"the raylet that this command joined Ray by is lost, and its actors with it [closed]; {AGAIN}"

    def _head_answers(self) -> bool:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), RPC_S).close()
        except OSError:
            return False
        return True
