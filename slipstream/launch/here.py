"""One side of a run on this host alone: the learner's launcher, or rollout servers with their GPUs."""

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from configs.errors import BadHosts, BadPlacement, NoRoom
from configs.loading import add_arguments, dump, from_arguments, overrides_of, parse
from configs.placement import ONLY_NODE
from configs.schema import Config
from replay.channel import ChannelError
from replay.status_client import ask_replay
from slipstream.check.checks import shell
from slipstream.launch.machine import this_machine
from slipstream.launch.node import Node, exit_code_of
from slipstream.launch.node_spec import NodeAssignment, NodeSpec
from slipstream.launch.quickstart import make_input
from slipstream.launch.terminal import say
from slipstream.plan.processes import Machine, Plan, Process, assign, uses_gpus
from slipstream.runtime import packages
from slipstream.runtime.program import program

JOIN_S = 300.0
"""How long replay may take to answer a host that joins."""


def become_learner(words: Sequence[str], port: str | None) -> NoReturn:
    """Go on as `python -m learner.main`; with a port, replay has it and rollout servers are elsewhere."""
    settings = ["--set", "placement.local_rollouts=false", "--set", f"network.replay_port={port}"] if port else []
    os.environ.update(packages.environment())
    os.execv(sys.executable, [sys.executable, "-m", "learner.main", *settings, *words])


def run_servers(words: Sequence[str], port: str) -> int:
    """Run `--servers N` rollout servers until the run ends, with restarts; the other words are theirs.

    With the address of replay (`--replay`, or REPLAY) and no `--config` they take the run's configuration from there;
    without an address replay is on this host, at that port.

    Returns:
        As slipstream.launch.node.
    """
    parser = argparse.ArgumentParser(prog=f"{program('slipstream.launch')} rollout", allow_abbrev=False)
    parser.add_argument("--servers", type=_count, default=1, help="how many")
    parser.add_argument("--replay", default=os.environ.get("REPLAY"), help="address of replay (default: this host's)")
    parser.add_argument("--dry-run", action="store_true", help="show them and start nothing")
    chosen, words = parser.parse_known_args(words)
    add_arguments(parser)

    def run() -> int:
        given, replay = parser.parse_known_args(words)[0], chosen.replay or f"tcp://127.0.0.1:{port}"
        joins = chosen.replay is not None and not given.is_config_given
        config = joined(replay, chosen.servers, overrides_of(given)) if joins else from_arguments(given)
        file = Path(config.run_dir) / "launch" / f"{socket.gethostname()}-{os.getpid()}.yaml"
        own = ["--config", str(file)] if joins else words
        for finding in shell(config):
            say(finding.line)
        processes = tuple(_servers(config, chosen.servers, ("--replay", replay), own))
        if chosen.dry_run:
            for process in processes:
                settings = [f"{key}={value}" for key, value in process.environment.items()]
                sys.stdout.write(shlex.join([*settings, *process.command]) + "\n")
            return 0
        if joins:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dump(config), encoding="utf-8")
        else:
            make_input(config, given.config)
        spec = NodeSpec(role="rollout", node=ONLY_NODE, config="", hosts="")
        plan = Plan(processes, ONLY_NODE, {}, replay)
        return Node(NodeAssignment(spec, config, Path(), plan), lifeline=False).run_servers()

    return exit_code_of(run)


def joined(replay: str, servers: int, overrides: Sequence[str]) -> Config:
    """The configuration of the run that listens there, for so many rollout servers on this host.

    Raises:
        ConfigError: the run's configuration does not fit here.
        ChannelError: replay does not answer within JOIN_S, or refuses the keys.
    """
    keys = dict(override.partition("=")[::2] for override in overrides).get("network.keys")
    answer = ask_replay(replay, keys, JOIN_S, "config")
    if answer is None:
        raise ChannelError(
            f"replay at {replay} has not answered for {JOIN_S:g} s; compare the address with `replay listens at` in"
            " the learner's terminal",
            "silent",
        )
    text = answer.state["config"]
    of_run = parse(text, f"replay at {replay}")
    devices = servers * of_run.placement.tensor_parallel
    here = {"placement.rollout": "null", "placement.learner": "null", "placement.split": f"'{devices}:1'"}
    here |= {"network.host": own_address(replay), "network.keys": "null"}
    here |= {f"teachers.{name}.devices": "null" for name, teacher in of_run.teachers.items() if teacher.devices}
    own = [f"{key}={value}" for key, value in here.items()]
    return parse(text, f"replay at {replay}", [*own, *overrides])


def own_address(replay: str) -> str:
    """Of this host on the way to replay; no packet is sent. Raises ChannelError."""
    host, _, port = replay.removeprefix("tcp://").rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ChannelError(f"replay at {replay}: {error.strerror or error}; give tcp://host:port", "closed") from error


def _servers(config: Config, count: int, replay: Sequence[str], words: Sequence[str]) -> Iterator[Process]:
    """Their processes, under names that no other terminal gives."""
    for index in range(count):
        name = f"rollout-{socket.gethostname()}-{os.getpid()}-{index}"
        command = (sys.executable, "-m", "rollout_server.main", *replay, "--server-name", name, *words)
        yield Process(name, "rollout", ONLY_NODE, command, environment_of(config, index))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1 on")
    return int(text)


def environment_of(config: Config, index: int) -> dict[str, str]:
    """Environment of rollout server `index` of this host. On a CPU any number of servers is fine.

    The learner may be elsewhere, so only the server's own GPUs must be here.

    Raises:
        ConfigError: the placement has no such engine or is one of several nodes, or its GPUs are not here.
    """
    if config.placement.rollout is not None:
        raise BadHosts(
            "placement.rollout, placement.learner: this host's part of them is not known; start with --hosts FILE"
        )
    here, placement = this_machine(config), config.placement
    unchecked = Machine(here.address, gpus=None if here.gpus else 0)
    servers = assign(config, {ONLY_NODE: unchecked}, config_file="").of(ONLY_NODE, "rollout")
    if not uses_gpus(config, unchecked) and servers:
        return servers[0].environment
    if index >= len(servers):
        raise BadPlacement(
            f"placement.split: {placement.split!r} has {len(servers)} rollout servers of placement.tensor_parallel"
            f" {placement.tensor_parallel}; ask for no more with --servers"
        )
    return servers[index].environment | visible(here, f"rollout server {index}", servers[index].devices)


def visible(here: Machine, name: str, devices: Sequence[int]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a process with these devices of this host; empty without any. Raises ConfigError."""
    if not devices:
        return {}
    names = here.visible or tuple(map(str, range(here.gpus or 0)))
    if devices[-1] >= len(names):
        raise NoRoom(
            f"placement.split: {name} needs GPU {devices[-1]}, this machine has {len(names)}"
            " (CUDA_VISIBLE_DEVICES counts); ask for fewer with --servers"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[device] for device in devices)}
