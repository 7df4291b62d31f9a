"""`python -m learner.doctor --config P`: what would stop or spoil a run here, and what mends it.

It looks at what the start of a run looks at, and closer: packages and environment of each role side by side, GPUs and
their links, disks, ports and clocks, and test groups of the weight bus between the learner's node and every rollout
node. With --hosts it does so over ssh on all machines of the placement, as `slipstream launch` goes there, with --slurm
by steps of srun on those of the allocation that it runs in; with --replay ADDRESS it looks at this machine as one for
rollout servers of a run that listens there.
"""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from configs.command import program
from configs.loading import ConfigError, Parser, add_arguments, from_arguments
from configs.schema import Config
from learner.doctor import facts, findings, links
from learner.doctor.brief import at_start, by_hand
from learner.doctor.examination import CLOSER, of_places, of_start
from learner.doctor.findings import Finding, refused
from learner.doctor.places import Place, places_of
from learner.doctor.reach import unreachable
from learner.launch.hosts.allocation import of_this_process
from learner.launch.hosts.host_file import read_hosts
from learner.launch.preflight import input_is_missing

PYTHON = "SLIPSTREAM_PYTHON"
NONE = "none"
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
        found = [Finding("stop", "configuration", line, mend=way_out(line)) for line in str(error).splitlines()]
    else:
        found, seen = _examined(args, config)
    if args.json:
        sys.stdout.write(findings.as_json(found, seen) + "\n")
    else:
        show(found, f"{findings.verdict(found)} ({time.monotonic() - started:.1f} s)")
    return findings.exit_code(found)


def way_out(line: str) -> str:
    """What mends a value that is out of bounds; empty where the line says it itself."""
    match = re.search(r" ([a-z_]+)\.([a-z_]+): Input should be ", line)
    section = Config.model_fields[match[1]].annotation if match is not None else None
    if match is None or not (isinstance(section, type) and issubclass(section, BaseModel)):
        return ""
    field = section.model_fields[match[2]]
    out = "" if field.is_required() else f", or leave {match[1]}.{match[2]} out: its default is {field.get_default()}"
    return f"give such a value{out}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=program("learner.doctor"), description=__doc__)
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
    found = list(of_start(config, has_input=has_input))
    if args.brief:
        return found, {}
    found = [finding for finding in found if finding.check not in CLOSER]
    try:
        places = _places(args, config)
    except ConfigError as error:
        return [*found, refused("placement", error)], {}
    tested = links.backends(config) if args.backends is None else args.backends
    more, seen = of_places(config, places, tested, has_input=has_input)
    return found + more, seen


def _places(args: argparse.Namespace, config: Config) -> list[Place]:
    """Raises ConfigError."""
    python = args.rollout_python or _rollout_python(config)
    if args.slurm:
        allocated = of_this_process(config)
        return places_of(config, allocated.hosts(config), python, allocated.over_srun)
    return places_of(config, None if args.hosts is None else read_hosts(args.hosts), python)


def _rollout_python(config: Config) -> str:
    """The launcher starts its rollout servers with its own interpreter, the start scripts with SLIPSTREAM_PYTHON."""
    return sys.executable if config.placement.local_rollouts else os.environ.get(PYTHON, sys.executable)


def beside(config: Config, address: str) -> list[Finding]:
    """This machine for rollout servers of a run elsewhere."""
    problem = unreachable(address, config)
    if problem is None:
        link = Finding("ok", "link", f"replay answers at {address}")
    else:
        mend = "" if "network.keys" in problem else "compare with `replay ready at` in logs/replay.log; open the port"
        link = Finding("stop", "link", problem, why="a rollout server would wait for it, and end", mend=mend)
    its = facts.fingerprint(config.model.path, config.model.chat_template)
    model = Finding("stop", "model", its["error"]) if "error" in its else Finding("ok", "model", json.dumps(its))
    return [
        link,
        model,
        *by_hand(config, "stop"),
        *(each for each in at_start(config) if each.check in ("limits", "versions")),
    ]


def show(found: Sequence[Finding], verdict: str) -> None:
    """Lines on standard output: coloured and wrapped on a terminal, else one line a finding and its reason."""
    console = Console(highlight=False, soft_wrap=True)
    width = shutil.get_terminal_size().columns if console.is_terminal else None
    for severity, line in findings.report(found, width):
        console.print(Text(line, style=STYLES[severity]))
    console.print(Text(verdict))


if __name__ == "__main__":
    sys.exit(main())
