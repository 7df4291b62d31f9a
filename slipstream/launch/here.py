"""One side of a run on this host alone: the learner's launcher, or rollout servers with their GPUs."""

import argparse
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from configs.errors import BadHosts, BadPlacement, NoRoom
from configs.loading import ConfigError, add_arguments, from_arguments
from configs.placement import ONLY_NODE
from configs.schema import Config
from slipstream.check.checks import shell
from slipstream.launch.children import wait_or_kill
from slipstream.launch.machine import this_machine
from slipstream.launch.quickstart import make_input
from slipstream.launch.terminal import Interrupted, catch_signals, ignore_signals, say
from slipstream.plan.processes import Machine, assign, uses_gpus
from slipstream.runtime import packages
from slipstream.runtime.lifeline import CANNOT_START
from slipstream.runtime.program import program

POLL_S = 0.1
PATIENCE_S = 15.0
"""A rollout server that is ended leaves the run in order within this time."""


def become_learner(words: Sequence[str], port: str | None) -> NoReturn:
    """Go on as `python -m learner.main`; with a port, replay has it and rollout servers are elsewhere."""
    settings = ["--set", "placement.local_rollouts=false", "--set", f"network.replay_port={port}"] if port else []
    os.environ.update(packages.environment())
    os.execv(sys.executable, [sys.executable, "-m", "learner.main", *settings, *words])


def run_servers(words: Sequence[str], replay: str) -> int:
    """Run `--servers N` rollout servers until the run ends; the other words are theirs, and may name another replay.

    Returns:
        0 when all ended well, 78 when they cannot start, 130 after a signal, or else the exit code of one that failed.
    """
    parser = argparse.ArgumentParser(prog=f"{program('slipstream.launch')} rollout", allow_abbrev=False)
    parser.add_argument("--servers", type=_count, default=1, help="how many")
    parser.add_argument("--dry-run", action="store_true", help="show them and start nothing")
    chosen, words = parser.parse_known_args(words)
    add_arguments(parser)
    try:
        given = parser.parse_known_args(words)[0]
        config = from_arguments(given)
        for finding in shell(config):
            say(finding.line)
        if not chosen.dry_run:
            make_input(config, given.config)
        environments = [environment_of(config, index) for index in range(chosen.servers)]
    except ConfigError as error:
        say(f"refused: {error}")
        return CANNOT_START
    parent = str(os.getpid())
    name = f"rollout-{socket.gethostname()}-{parent}"
    command = [sys.executable, "-m", "rollout_server.main", "--replay", replay, "--parent", parent, "--server-name"]
    if chosen.dry_run:
        for index, environment in enumerate(environments):
            settings = [f"{key}={value}" for key, value in environment.items()]
            sys.stdout.write(shlex.join([*settings, *command, f"{name}-{index}", *words]) + "\n")
        return 0
    started: list[subprocess.Popen[bytes]] = []
    own = os.environ | packages.environment()
    catch_signals()
    try:
        for index, environment in enumerate(environments):
            started.append(subprocess.Popen([*command, f"{name}-{index}", *words], env=own | environment))
        while any(process.poll() is None for process in started):
            time.sleep(POLL_S)
        return max((process.returncode for process in started), key=abs)
    except Interrupted:
        return 130
    finally:
        ignore_signals()
        for process in started:
            process.terminate()
        wait_or_kill(started, PATIENCE_S)


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
