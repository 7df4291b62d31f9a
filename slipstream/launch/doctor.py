"""`slipstream doctor --config P`: what would stop or spoil a run, and what mends it.

It makes the checks of a start, and looks closer: packages and environment of each role side by side, GPUs and their
links, ports and clocks, and test groups of the weight bus between the learner's node and every rollout node. With
--hosts it does so over ssh on all machines of the placement, as `slipstream launch` goes there, with --slurm by steps
of srun on those of the allocation that it runs in; with --replay ADDRESS it looks at this machine as one for rollout
servers of a run that listens there.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from configs.errors import BadHosts
from configs.loading import ConfigError, Parser, add_arguments, dump, from_arguments
from configs.schema import Config
from slipstream.check import checks, facts, links
from slipstream.check.examination import of_places
from slipstream.check.finding import Finding, as_json, ok, refused, report, stop, verdict
from slipstream.check.places import Place
from slipstream.check.probe import unreachable
from slipstream.launch.host_file import FORM
from slipstream.launch.machine import this_machine
from slipstream.launch.node_spec import ROLES, config_of
from slipstream.launch.quickstart import input_is_missing
from slipstream.launch.reach.commands import Commands, Ssh
from slipstream.launch.reach.srun import of_this_process
from slipstream.plan.processes import Process, assign
from slipstream.runtime.program import program

DEFAULT_PORT = 5757
PYTHON = "SLIPSTREAM_PYTHON"
NONE = "none"
Way = Callable[[Sequence[str]], list[str]]
"""A command on another machine, as a command of this one."""
STYLES = {"stop": "bold red", "warn": "bold", "ok": "dim"}
"""Readable on dark and on light."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit code 1: a run would stop, 0: it can start, 2: bad arguments."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="slipstream: %(message)s")
    started = time.monotonic()
    seen: dict[str, object] = {}
    try:
        config = from_arguments(args)
    except ConfigError as error:
        found = [stop("configuration", line) for line in str(error).splitlines()]
    else:
        found, seen = _examined(args, config)
    if args.json:
        sys.stdout.write(as_json(found, seen) + "\n")
    else:
        show(found, f"{verdict(found)} ({time.monotonic() - started:.1f} s)")
    return int(any(each.severity == "stop" for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=program("slipstream.launch.doctor"), description=__doc__)
    add_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="FILE", type=Path, help="all machines of the placement, over ssh")
    where.add_argument("--slurm", action="store_true", help="the same inside an allocation of Slurm, by srun")
    where.add_argument("--replay", metavar="ADDRESS", help="this machine is for rollout servers of that run")
    parser.add_argument("--brief", action="store_true", help="only what every start looks at")
    parser.add_argument(
        "--backends",
        metavar="A,B",
        type=_backends,
        help="of test groups: gloo, nccl, ucc, none (default: the run's, and gloo)",
    )
    parser.add_argument("--rollout-python", metavar="PATH", help=f"interpreter of rollout servers (default: ${PYTHON})")
    parser.add_argument("--json", action="store_true", help="one object of JSON in place of lines")
    return parser


def _backends(text: str) -> list[str]:
    names = [name for name in text.split(",") if name != NONE]
    if strange := [name for name in names if name not in links.MEND]:
        raise argparse.ArgumentTypeError(f"{strange[0]!r} is none of {', '.join(links.MEND)}, {NONE}")
    return names


def _examined(args: argparse.Namespace, config: Config) -> tuple[list[Finding], dict[str, object]]:
    if args.replay is not None:
        return beside(config, args.replay), {}
    has_input = not input_is_missing(config, args.config)
    if args.brief:
        return list(checks.found(config, checks.AT_START, has_input=has_input)), {}
    found = list(checks.found(config, (*checks.OF_THE_RUN, checks.run_folder, checks.packages), has_input=has_input))
    try:
        places = _places(args, config)
    except ConfigError as error:
        return [*found, refused("placement", error)], {}
    tested = links.backends(config) if args.backends is None else args.backends
    more, seen = of_places(config, places, tested, has_input=has_input)
    return found + more, seen


def _places(args: argparse.Namespace, config: Config) -> list[Place]:
    """Raises ConfigError."""
    reach = of_this_process(config) if args.slurm else Ssh(args.hosts) if args.hosts is not None else None
    return places_of(config, reach, args.rollout_python or _rollout_python(config))


def _rollout_python(config: Config) -> str:
    """The launcher starts its rollout servers with its own interpreter, the start scripts with SLIPSTREAM_PYTHON."""
    return sys.executable if config.placement.local_rollouts else os.environ.get(PYTHON, sys.executable)


def beside(config: Config, address: str) -> list[Finding]:
    """This machine for rollout servers of a run elsewhere."""
    problem = unreachable(address, config)
    if problem is None:
        link = ok("link", f"replay answers at {address}")
    else:
        mend = "" if "network.keys" in problem else "compare with `replay ready at` in logs/replay.log; open the port"
        link = stop("link", problem, why="a rollout server would wait for it, and end", mend=mend)
    its = facts.fingerprint(config.model.path, config.model.chat_template)
    model = stop("model", its["error"]) if "error" in its else ok("model", json.dumps(its))
    return [link, model, *checks.shell(config, "stop"), *checks.found(config, (checks.limits, checks.versions))]


def show(found: Sequence[Finding], last: str) -> None:
    """Lines on standard output: coloured and wrapped on a terminal, else one line a finding and its reason."""
    console = Console(highlight=False, soft_wrap=True)
    width = shutil.get_terminal_size().columns if console.is_terminal else None
    for severity, line in report(found, width):
        console.print(Text(line, style=STYLES[severity]))
    console.print(Text(last))


# ---- places -----------------------------------------------------------------------------------------------


def places_of(config: Config, reach: Commands | None, rollout_python: str) -> list[Place]:
    """A place for each node and role, the learner's first.

    Args:
        config: of the run.
        reach: how commands get to the machines of the placement; none is this one alone.
        rollout_python: interpreter of rollout servers.

    Raises ConfigError.
    """
    if reach is None:
        nodes = [share.node for share in config.shares]
        if len(nodes) > 1:
            raise BadHosts(
                f"placement: {', '.join(nodes)} are several machines, and doctor looks at others over ssh; give --hosts"
                f" FILE with lines `{FORM}`, or --slurm inside an allocation"
            )
        ways, machines, configs = {}, {nodes[0]: this_machine(config)}, {nodes[0]: config}
    else:
        if config.network.replay_port == 0:
            config = config_of(dump(config), [f"network.replay_port={DEFAULT_PORT}"])
        hosts = reach.hosts(config)
        machines = {node: host.machine() for node, host in hosts.items()}
        configs = {node: config_of(dump(config), [f"network.host={host.address}"]) for node, host in hosts.items()}
        ways = {node: partial(reach.command, host) for node, host in hosts.items()}
    plan = assign(config, machines, config_file="")
    return [
        _place(plan.of(node, role), plan.of(node, "replay"), configs[node], ways.get(node), rollout_python)
        for role in ROLES
        for node in machines
        if plan.of(node, role)
    ]


def _place(
    processes: Sequence[Process], replay: Sequence[Process], config: Config, way: Way | None, python: str
) -> Place:
    """The place of these processes of one role; `python` is the interpreter of rollout servers."""
    first, keys = processes[0], {"replay": "network.replay_port", "weight bus": "weight_bus.port"}
    keys["rendezvous"] = "placement.rendezvous_port"
    listening = [*processes, *replay] if first.role == "learner" else processes
    ports = {keys[what]: port for process in listening for what, port in process.ports.items()}
    words = [python if first.role == "rollout" else sys.executable, "-m", "slipstream.check.probe"]
    if way is not None:
        settings = [f"{name}={value}" for name, value in first.environment.items()]
        words = way(["env", *settings, *words])
    planned = frozenset(first.environment) - config.network.env.keys()
    return Place(first.node, first.role, config, ports, tuple(words), first.environment, planned, is_here=way is None)


if __name__ == "__main__":
    sys.exit(main())
