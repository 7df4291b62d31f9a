"""`python -m learner.launch.hosts.server --index I -- ARGUMENTS`: a rollout server of this host, with its GPUs.

It finds the GPUs and the environment of engine I and becomes `python -m rollout_server.main ARGUMENTS`.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from configs.loading import ConfigError, add_arguments, from_arguments
from configs.placement import ONLY_NODE, PlacementError
from configs.plan import Machine, assign, uses_gpus
from configs.schema import Config
from learner.launch.machine import this_machine
from learner.launch.quickstart_input import InputError, make_if_missing
from replay.lifeline import CANNOT_START


def main() -> NoReturn:
    """Entry point; it ends here only when the server is refused."""
    parser = argparse.ArgumentParser(prog="python -m learner.launch.hosts.server", description=__doc__)
    parser.add_argument("--index", type=int, required=True, help="which engine of the placement")
    args, arguments = parser.parse_known_args()
    arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
    of_server = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(of_server)
    try:
        given = of_server.parse_known_args(arguments)[0]
        config = from_arguments(given)
        make_if_missing(config, given.config)
        environment = environment_of(config, args.index)
    except (ConfigError, PlacementError, InputError) as error:
        sys.stderr.write(f"slipstream: refused: {error}\n")
        sys.exit(CANNOT_START)
    become([sys.executable, "-m", "rollout_server.main", *arguments], environment)


def become(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Go on as this command, under the same pid."""
    os.execve(command[0], command, os.environ | environment)


def environment_of(config: Config, index: int) -> dict[str, str]:
    """Environment of rollout server `index` of this host. On a CPU any number of servers is fine.

    The learner may be elsewhere, so only the server's own GPUs must be here.

    Raises:
        PlacementError: the placement has no such engine or is one of several nodes, or its GPUs are not here.
    """
    if config.placement.rollout is not None:
        raise PlacementError(
            "placement.rollout, placement.learner: this host's part of them is not known; start with --hosts FILE"
        )
    here = this_machine(config)
    unchecked = Machine(here.address, gpus=None if here.gpus else 0)
    servers = assign(config, {ONLY_NODE: unchecked}, config_file="").of(ONLY_NODE, "rollout")
    if not uses_gpus(config, unchecked) and servers:
        return servers[0].environment
    if index >= len(servers):
        raise PlacementError(
            f"placement.split: {config.placement.split!r} has {len(servers)} rollout servers of"
            f" placement.tensor_parallel {config.placement.tensor_parallel}; ask for no more with --servers"
        )
    names = here.visible or tuple(str(gpu) for gpu in range(here.gpus or 0))
    if servers[index].devices[-1] >= len(names):
        raise PlacementError(
            f"placement.split: rollout server {index} needs GPU {servers[index].devices[-1]}, this machine has"
            f" {len(names)} (CUDA_VISIBLE_DEVICES counts); ask for fewer with --servers"
        )
    return servers[index].environment | {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in servers[index].devices)}


if __name__ == "__main__":
    main()
