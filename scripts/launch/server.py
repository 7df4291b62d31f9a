"""`python -m scripts.launch.server --index I -- ARGUMENTS`: a rollout server of this host, with its GPUs.

It finds the GPUs and the environment of engine I and becomes `python -m rollout_server.main ARGUMENTS`.
"""

import argparse
import os
import sys

from configs.loading import ConfigError, add_arguments, from_arguments
from configs.placement import ONLY_NODE, PlacementError
from configs.plan import Process, assign
from configs.schema import Config
from learner.launch.machine import this_machine
from replay.lifeline import CANNOT_START


def main() -> int:
    """Entry point; returns only when the server is refused."""
    parser = argparse.ArgumentParser(prog="python -m scripts.launch.server", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="which engine of the placement")
    args, arguments = parser.parse_known_args()
    arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
    of_server = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(of_server)
    try:
        config = from_arguments(of_server.parse_known_args(arguments)[0])
        process = engine(config, args.index)
    except (ConfigError, PlacementError) as error:
        sys.stderr.write(f"slipstream: refused: {error}\n")
        return CANNOT_START
    command = [sys.executable, "-m", "rollout_server.main", *arguments]
    os.execve(sys.executable, command, os.environ | process.environment)


def engine(config: Config, index: int) -> Process:
    """Server `index` of this host as the placement has it. On a CPU any number of servers is fine.

    Raises:
        PlacementError: the placement has no such engine, or is one of several nodes.
    """
    if config.placement.rollout is not None:
        raise PlacementError(
            "placement.rollout, placement.learner: this host's part of them is not known; start with --hosts FILE"
        )
    machine = this_machine(config)
    servers = assign(config, {ONLY_NODE: machine}, config_file="").of(ONLY_NODE, "rollout")
    if not machine.gpus and servers:
        return servers[0]
    if index >= len(servers):
        raise PlacementError(
            f"placement.split: {config.placement.split!r} has {len(servers)} rollout servers of"
            f" placement.tensor_parallel {config.placement.tensor_parallel}; ask for no more with --servers"
        )
    return servers[index]


if __name__ == "__main__":
    sys.exit(main())
