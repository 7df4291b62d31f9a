"""From a configuration and its machines to processes: GPUs, ports, environment and command of each. Pure, no torch.

The launcher and the start scripts run what stands here, and `--dry-run` prints it.
"""

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from configs.errors import BadHosts, BadPlacement, Contradiction, NoRoom
from configs.machine import DETERMINISTIC, NCCL_DEFAULTS
from configs.placement import Share, most_devices, ranks_of
from configs.schema import Config, is_loopback

Role = Literal["replay", "learner", "rollout", "teacher"]
EVERYTHING: tuple[Role, ...] = ("replay", "learner", "rollout", "teacher")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of the machine behind a node's name.

    Example: Machine("10.0.0.1", gpus=8)
    """

    address: str
    gpus: int | None = None
    """None: not known from here."""
    visible: tuple[str, ...] | None = None
    """CUDA_VISIBLE_DEVICES that the user has set; the placement's indices count within it."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process (for `learner`: one a device, which are alike but for their rank)."""

    name: str
    role: Role
    node: str
    command: tuple[str, ...]
    environment: dict[str, str]
    devices: tuple[int, ...] = ()
    """GPUs of the node, as the placement counts them; empty on a CPU."""
    ports: dict[str, int] = field(default_factory=dict)
    """What it listens at; 0 is a free port."""
    ranks: range = range(0)
    """Of the learner."""

    @property
    def of_ranks(self) -> list[tuple[str, dict[str, str]]]:
        """Name and environment of each learner rank."""
        return [
            (f"learner-{rank}", {**self.environment, "RANK": str(rank), "LOCAL_RANK": str(local)})
            for local, rank in enumerate(self.ranks)
        ]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every process of a run, node by node."""

    processes: tuple[Process, ...]
    first_node: str
    """Where replay and rank 0 run."""
    machines: dict[str, Machine]
    replay: str
    """Address of replay."""

    def side(self, process: Process) -> Literal["learner", "rollout"]:
        """Which side of its node starts it: the launcher starts the teachers of the first node."""
        is_first_s = process.role == "teacher" and process.node == self.first_node
        return "learner" if process.role in ("replay", "learner") or is_first_s else "rollout"

    def nodes(self, side: str) -> list[str]:
        """Nodes with a process of this side, in order of their first one."""
        return list(dict.fromkeys(process.node for process in self.processes if self.side(process) == side))

    def of(self, node: str, role: Role) -> list[Process]:
        """This node's processes of one role, in order."""
        return [process for process in self.processes if process.node == node and process.role == role]


def assign(
    config: Config,
    machines: Mapping[str, Machine],
    *,
    config_file: str,
    python: str = "python",
    replay: str | None = None,
    resume: bool = False,
    only: str | None = None,
    learner_module: str = "learner.train",
    server_command: Sequence[str] = ("rollout_server.main",),
    teacher_command: Sequence[str] = ("rollout_server.teacher",),
) -> Plan:
    """Devices, ports, environments and commands.

    Args:
        config: of the run.
        machines: by node: those of the placement, or with `only` that one and the first learner node.
        config_file: what every process gets as --config.
        python: the interpreter, on every node.
        replay: its address; none makes it of the first learner node and network.replay_port.
        resume: replay goes on from its journal, the learner from its newest checkpoint.
        only: plan the processes of this node alone.
        learner_module: what ranks run; `server_command` is the same of rollout servers, with its first arguments, and
            `teacher_command` of teachers.

    Raises:
        ConfigError: a node is unknown or has too few GPUs, or nodes cannot reach each other.
    """
    shares = config.shares
    wanted = [share for share in shares if only in (None, share.node)]
    if not wanted:
        nodes = ", ".join(share.node for share in shares)
        raise BadPlacement(f"placement: no process of this run belongs to {only!r}; its nodes are {nodes}")
    for share in wanted:
        if share.node not in machines:
            raise BadHosts(
                f"placement: {share.node!r} is not among the hosts ({', '.join(sorted(machines))}); add it to the host"
                " file or correct placement.rollout, placement.learner"
            )
        _fits(config, share, machines[share.node])
    if len(shares) > 1:
        _reachable(config, wanted, machines)
    first = shares[0].node
    address = replay or replay_address(config, machines[first])
    words = _Words(config, machines, python, config_file, address, resume)
    processes = (
        *(words.replay(share.node) for share in wanted if share.node == first),
        *(words.learner(share, learner_module) for share in wanted if share.learner),
        *(server for share in wanted for server in words.servers(share, tuple(server_command))),
        *(teacher for share in wanted for teacher in words.teachers(share.node, first, tuple(teacher_command))),
    )
    return Plan(processes, first, dict(machines), address)


def uses_gpus(config: Config, machine: Machine) -> bool:
    """Whether processes of this machine run on GPUs; `auto` is cuda unless the machine is known to have none."""
    return config.placement.device == "cuda" or (config.placement.device == "auto" and machine.gpus != 0)


def replay_address(config: Config, first: Machine) -> str:
    """Of replay on the first learner node; IPv6 in brackets."""
    host = f"[{first.address}]" if ":" in first.address else first.address
    return f"tcp://{host}:{config.network.replay_port}"


@dataclass(frozen=True, slots=True)
class _Words:
    """Commands and environments."""

    config: Config
    machines: Mapping[str, Machine]
    python: str
    config_file: str
    address: str
    """Of replay."""
    resume: bool

    def replay(self, node: str) -> Process:
        command = (*self._command("replay.main", node), *(["--recover"] if self.resume else []))
        return self._process("replay", "replay", node, command, 1, (), {"replay": self.config.network.replay_port})

    def learner(self, share: Share, module: str) -> Process:
        config, ranks = self.config, ranks_of(self.config.shares, share.node)
        command = self._command(module, share.node, "--replay", self.address, *(["--resume"] if self.resume else []))
        ports = {"weight bus": config.weight_bus.port} if ranks[0] == 0 else {}
        place = {"WORLD_SIZE": str(config.num_learner_ranks), "LOCAL_WORLD_SIZE": str(len(ranks))}
        place |= {"MASTER_ADDR": self.machines[config.learner_nodes[0]].address}
        if len(config.learner_nodes) > 1:
            place |= {"MASTER_PORT": str(config.placement.rendezvous_port)}
            ports |= {"rendezvous": config.placement.rendezvous_port} if ranks[0] == 0 else {}
        name = f"learner ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"learner rank {ranks[0]}"
        made = self._process(name, "learner", share.node, command, config.learner.num_threads, share.learner, ports)
        return replace(made, environment=made.environment | place, ranks=ranks)

    def servers(self, share: Share, words: tuple[str, ...]) -> Iterator[Process]:
        node, threads = share.node, self.config.rollout.num_threads
        engines = share.engines(self.config.placement.tensor_parallel) if self.config.needs_servers else []
        for number, devices in enumerate(engines):
            name = f"rollout-{number}" if len(self.config.shares) == 1 else f"rollout-{node}-{number}"
            command = self._command(words[0], node, *words[1:], "--replay", self.address, "--server-name", name)
            yield self._process(name, "rollout", node, command, threads, devices, {})

    def teachers(self, node: str, first: str, words: tuple[str, ...]) -> Iterator[Process]:
        """Of this node; one without devices is on the first."""
        threads = self.config.rollout.num_threads
        for label, teacher in self.config.teachers.items():
            places = teacher.processes or [(first, ())]
            for number, (place, devices) in enumerate(places if teacher.has_process else []):
                if place == node:
                    name = f"teacher-{label}" + (f"-{number}" if len(places) > 1 else "")
                    own = ("--teacher", label, "--process-name", name, "--tensor-parallel", str(max(1, len(devices))))
                    command = self._command(words[0], node, *words[1:], "--replay", self.address, *own)
                    yield self._process(name, "teacher", node, command, threads, devices, {})

    def _process(
        self,
        name: str,
        role: Role,
        node: str,
        command: tuple[str, ...],
        threads: int,
        devices: tuple[int, ...],
        ports: dict[str, int],
    ) -> Process:
        machine, environment = self.machines[node], {"OMP_NUM_THREADS": str(threads)}
        if on_gpus := uses_gpus(self.config, machine):
            environment |= NCCL_DEFAULTS
        if role == "learner" and self.config.learner.deterministic:
            environment |= DETERMINISTIC
        environment |= self.config.network.env
        if on_gpus and devices:
            names = [machine.visible[device] if machine.visible else str(device) for device in devices]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
        return Process(name, role, node, command, environment, devices if on_gpus else (), ports)

    def _command(self, module: str, node: str, *arguments: str) -> tuple[str, ...]:
        host = self.machines[node].address
        own_host = () if host == self.config.network.host else ("--set", f"network.host={host}")
        return (self.python, "-m", module, "--config", self.config_file, *own_host, *arguments)


def _fits(config: Config, share: Share, machine: Machine) -> None:
    if "CUDA_VISIBLE_DEVICES" in config.network.env:
        raise Contradiction(
            "network.env: CUDA_VISIBLE_DEVICES is set by the placement, per process; leave it out, or export it in the"
            " shell to restrict what the placement counts"
        )
    if not uses_gpus(config, machine):
        return
    there, source = machine.gpus, f"{share.node} has"
    if machine.visible is not None:
        there, source = len(machine.visible), f"CUDA_VISIBLE_DEVICES={','.join(machine.visible)} shows"
    wanted, split = most_devices(share), config.placement.split
    if there is not None and wanted > there:
        named = config.placement.rollout is not None
        key = f"placement: {share.node}:{wanted - 1}" if named else f"placement.split: {split!r}"
        raise NoRoom(
            f"{key} needs {wanted} GPU{'s' if wanted > 1 else ''}, {source} {there}; take fewer, or set"
            " placement.device=cpu"
        )


def _reachable(config: Config, wanted: Sequence[Share], machines: Mapping[str, Machine]) -> None:
    for share in wanted:
        if is_loopback(machines[share.node].address):
            other = next(other.node for other in config.shares if other.node != share.node)
            raise BadHosts(
                f"network.host: {machines[share.node].address!r} of {share.node} cannot be reached from {other}; start"
                " with slipstream launch run --hosts FILE, which gives every node its own address"
            )
    if config.network.replay_port == 0:
        raise Contradiction("network.replay_port: 0 is unknown to the other nodes; give a port, such as 5757")
    ports = {
        "network.replay_port": config.network.replay_port,
        "weight_bus.port": config.weight_bus.port,
        "placement.rendezvous_port": config.placement.rendezvous_port,
    }
    for (key, port), (other, taken) in itertools.combinations(ports.items(), 2):
        if port and port == taken:
            raise Contradiction(f"{key}: {port} is {other} as well, on the same node; give each its own")


def table(plan: Plan, roles: tuple[Role, ...] = EVERYTHING) -> str:
    """What would run where: a line for each process, then the environment and command of each."""
    order = list(dict.fromkeys(process.node for process in plan.processes))
    chosen = sorted((p for p in plan.processes if p.role in roles), key=lambda process: order.index(process.node))
    rows = [("node", "address", "process", "GPUs", "listens at")]
    for process in chosen:
        ports = ", ".join(f"{what} {port or '(free port)'}" for what, port in process.ports.items())
        address = plan.machines[process.node].address
        rows.append((process.node, address, process.name, ranges(process.devices) or "-", ports or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for process in chosen:
        environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in process.environment.items())
        command = shlex.join(process.command)
        lines += ["", f"{process.node}: {process.name}", f"  env  {environment}", f"  run  {command}"]
    return "\n".join(lines)


def ranges(numbers: tuple[int, ...]) -> str:
    """`0-5,7` for 0, 1, 2, 3, 4, 5, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
