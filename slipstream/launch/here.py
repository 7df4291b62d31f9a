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
from configs.loading import add_arguments, from_arguments
from configs.placement import ONLY_NODE
from configs.schema import Config
from slipstream.check.checks import shell
from slipstream.launch.machine import this_machine
from slipstream.launch.node import Node, exit_code_of
from slipstream.launch.node_spec import NodeAssignment, NodeSpec
from slipstream.launch.quickstart import make_input
from slipstream.launch.terminal import say
from slipstream.plan.processes import Machine, Plan, Process, assign, uses_gpus
from slipstream.runtime import packages
from slipstream.runtime.program import program


def become_learner(words: Sequence[str], port: str | None) -> NoReturn:
    """Go on as `python -m learner.main`; with a port, replay has it and rollout servers are elsewhere."""
    settings = ["--set", "placement.local_rollouts=false", "--set", f"network.replay_port={port}"] if port else []
    os.environ.update(packages.environment())
    os.execv(sys.executable, [sys.executable, "-m", "learner.main", *settings, *words])


def run_servers(words: Sequence[str], replay: str) -> int:
    """Run `--servers N` rollout servers until the run ends, with restarts; the other words are theirs.

    Returns:
        As slipstream.launch.node.
    """
    parser = argparse.ArgumentParser(prog=f"{program('slipstream.launch')} rollout", allow_abbrev=False)
    parser.add_argument("--servers", type=_count, default=1, help="how many")
    parser.add_argument("--replay", default=replay, help="address of replay (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="show them and start nothing")
    chosen, words = parser.parse_known_args(words)
    add_arguments(parser)

    def run() -> int:
        given = parser.parse_known_args(words)[0]
        config = from_arguments(given)
        for finding in shell(config):
            say(finding.line)
        processes = tuple(_servers(config, chosen.servers, ("--replay", chosen.replay), words))
        if chosen.dry_run:
            for process in processes:
                settings = [f"{key}={value}" for key, value in process.environment.items()]
                sys.stdout.write(shlex.join([*settings, *process.command]) + "\n")
            return 0
        make_input(config, given.config)
        spec = NodeSpec(role="rollout", node=ONLY_NODE, config="", hosts="")
        plan = Plan(processes, ONLY_NODE, {}, chosen.replay)
        return Node(NodeAssignment(spec, config, Path(), plan), lifeline=False).run_servers()

    return exit_code_of(run)


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
