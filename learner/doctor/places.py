"""Where the roles of a run are, and a probe at each: here, or over ssh or srun as the start scripts go there."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.errors import BadHosts, SlipstreamError
from configs.loading import dump
from configs.plan import Plan, assign
from configs.schema import Config
from learner.doctor.probe import MARK
from learner.launch.children import wait_or_kill
from learner.launch.hosts.host_file import FORM, Host
from learner.launch.hosts.node_spec import config_of, hosts_of
from learner.launch.hosts.ssh import over_ssh
from learner.launch.machine import this_machine

ROLES = ("learner", "rollout")
CLOSE_S = 3.0
LAST_LINES = 20
DEFAULT_PORT = 5757


class ProbeFailed(
    SlipstreamError,
    RuntimeError,
    code="SLIP-DOCTOR-01",
    cause="A host cannot be reached, Slipstream does not start there, or an examination breaks off or takes too long.",
    mend="Run the command of the message on that host by hand; docs/howto/doctor.md.",
):
    """A probe could not be started, did not answer in time, or could not do what it was asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One role on one node."""

    node: str
    role: str
    config: Config
    """With this node's network.host."""
    ports: Mapping[str, int]
    """What its processes listen at, by key; 0 is a free one."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    planned: frozenset[str]
    """Variables that the plan sets, differently for each role if at all."""
    host: Host | None = None
    """None: this machine."""

    def __str__(self) -> str:
        return f"{self.role} of {self.node}"


Over = Callable[[Host, Sequence[str]], list[str]]
"""A command on a host, as a command of this machine."""


def places_of(
    config: Config, known: Mapping[str, Host] | None, rollout_python: str, over: Over = over_ssh
) -> list[Place]:
    """A place for each node and role, the learner's first.

    Args:
        config: of the run.
        known: machines by the names of nodes; none is this one alone.
        rollout_python: interpreter of rollout servers.
        over: how commands get to those machines.

    Raises ConfigError.
    """
    hosts: dict[str, Host] | None = None
    if known is None:
        nodes = [share.node for share in config.shares]
        if len(nodes) > 1:
            raise BadHosts(
                f"placement: {', '.join(nodes)} are several machines, and doctor looks at others over ssh; give --hosts"
                f" FILE with lines `{FORM}`, or --slurm inside an allocation"
            )
        plan = assign(config, {nodes[0]: this_machine(config)}, config_file="")
        configs = {nodes[0]: config}
    else:
        if config.network.replay_port == 0:
            config = config_of(dump(config), [f"network.replay_port={DEFAULT_PORT}"])
        hosts = hosts_of(config, known)
        plan = assign(config, {name: host.machine() for name, host in hosts.items()}, config_file="")
        configs = {n: config_of(dump(config), [f"network.host={host.address}"]) for n, host in hosts.items()}
    return [
        _place(plan, node, role, own, None if hosts is None else (hosts[node], over), rollout_python)
        for role in ROLES
        for node, own in configs.items()
        if _processes(plan, node, role)
    ]


def _processes(plan: Plan, node: str, role: str) -> list[Any]:
    roles = ("learner", "replay") if role == "learner" else ("rollout", "reward")
    return [process for process in plan.processes if process.node == node and process.role in roles]


def _place(
    plan: Plan, node: str, role: str, config: Config, reached: tuple[Host, Over] | None, rollout_python: str
) -> Place:
    processes = _processes(plan, node, role)
    first = next(process for process in processes if process.role == role) if plan.of(node, role) else processes[0]  # type: ignore[arg-type]
    keys = {"replay": "network.replay_port", "weight bus": "weight_bus.port"}
    keys |= {"rendezvous": "placement.rendezvous_port", "reward": "network.reward_port"}
    ports = {keys[what]: port for process in processes for what, port in process.ports.items()}
    python = rollout_python if role == "rollout" else sys.executable
    words = [python, "-m", "learner.doctor.probe"]
    host = None
    if reached is not None:
        host, over = reached
        settings = [f"{name}={value}" for name, value in first.environment.items()]
        words = over(host, ["env", *settings, *words])
    planned = frozenset(first.environment) - config.network.env.keys()
    return Place(node, role, config, ports, tuple(words), first.environment, planned, host)


@dataclass(slots=True)
class Asked:
    """A probe that runs at a place; used by one thread."""

    place: Place
    process: "subprocess.Popen[str]"
    answers: "queue.Queue[dict[str, Any] | None]" = field(default_factory=queue.Queue)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    @classmethod
    def at(cls, place: Place) -> "Asked":
        """Start it and give it the configuration. Raises ProbeFailed."""
        environment = {**os.environ, **place.environment} if place.host is None else dict(os.environ)
        try:
            process = subprocess.Popen(
                place.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ProbeFailed(f"{place.command[0]} cannot be started: {error.strerror}") from error
        asked = cls(place, process)
        threading.Thread(target=asked._read, name=f"doctor-{place.node}-{place.role}", daemon=True).start()
        asked.send("take", config=dump(place.config))
        return asked

    def send(self, what: str, **arguments: Any) -> None:
        """Give an order; `answer` takes its result, in order."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says so
            self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self.process.stdin.flush()

    def answer(self, limit_s: float) -> Any:
        """The result of the oldest order without one. Raises ProbeFailed."""
        started = time.monotonic()
        try:
            answer = self.answers.get(timeout=limit_s)
        except queue.Empty as error:
            self.process.kill()
            raise ProbeFailed(f"no answer within {time.monotonic() - started:.0f} s [silent]") from error
        if answer is None:
            self.answers.put(None)
            last = next((line for line in reversed(self.last_lines) if line.strip()), "it said nothing")
            raise ProbeFailed(f"its probe ended with exit code {self._code()}: {last}")
        if "error" in answer:
            raise ProbeFailed(str(answer["error"]))
        return answer["found"]

    def ask(self, what: str, limit_s: float, **arguments: Any) -> Any:
        """One order and its result. Raises ProbeFailed."""
        self.send(what, **arguments)
        return self.answer(limit_s)

    def _code(self) -> int:
        wait_or_kill([self.process], CLOSE_S)  # type: ignore[list-item]  # text or bytes is all one here
        return self.process.returncode

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line.removeprefix(MARK)))
            else:
                self.last_lines.append(line.rstrip())
        self.answers.put(None)


@contextlib.contextmanager
def ended(probes: Sequence[Asked]) -> Iterator[None]:
    """End all of them, whatever happens: their stdin first, then by pid."""
    try:
        yield
    finally:
        for probe in probes:
            assert probe.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                probe.process.stdin.close()
        wait_or_kill([probe.process for probe in probes], CLOSE_S)  # type: ignore[misc]
