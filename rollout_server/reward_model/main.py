"""`python -m rollout_server.reward_model.main`: a reward server for rollout servers.

It prints one line `reward server listens at tcp://host:port` on standard output, then loads the model; rollout servers
get the address as `--reward`. Started again at the same `--port`, it is asked again for what it left unanswered.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from configs.command import program
from configs.loading import ConfigError, Parser, add_arguments, from_arguments
from configs.schema import Config
from replay import hang
from replay.channel import AsyncRouter, ChannelError, KeysError, Limits, load_keys
from replay.lifeline import CANNOT_START, die_with_parent, set_up_logging
from replay.vitals.watch import Vitals
from rollout_server.reward_model.messages import TO_REWARD
from rollout_server.reward_model.server import Model, RewardServer
from rollout_server.rewards import RewardError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CANNOT_GO_ON = 2


async def run(config: Config, port: int, *, to_other_nodes: bool) -> int:
    """Serve until SIGTERM or SIGINT; on network.host, with the keys of this node, where other nodes ask."""
    network, host, keys = config.network, LOOPBACK, None
    if to_other_nodes:
        host, keys = network.host, load_keys(network.keys)
    router = AsyncRouter(
        host,
        port,
        f"rewards of {config.run.name}",
        TO_REWARD,
        Limits(network.max_message_bytes),
        keys=keys and keys.on_this_node(),
        insecure=network.insecure,
    )
    try:
        sys.stdout.write(f"reward server listens at {router.address}\n")
        sys.stdout.flush()
        server = RewardServer(router, lambda: load(config), str(config.reward.model.path))
        serving = asyncio.create_task(server.serve())
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            log.info("ended by a signal")
    finally:
        router.close()
    return 0


def load(config: Config) -> Model:
    """The model on this process's devices: the GPUs that it sees, or the CPU. Raises RewardError."""
    import torch  # takes seconds, and the socket answers meanwhile

    from rollout_server.reward_model.scorer import Scorer

    on_gpu = config.placement.device != "cpu" and torch.cuda.is_available()
    return Scorer(config.reward.model, on_gpu=on_gpu)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(
        prog=program("rollout_server.reward_model.main"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--server-name", default=f"reward-{socket.gethostname()}-{os.getpid()}", help="name in logs")
    parser.add_argument("--port", type=int, default=0, help="where it listens (default: a free port)")
    parser.add_argument("--to-other-nodes", action="store_true", help="listen on network.host, with network.keys")
    parser.add_argument("--parent", type=int, default=None, help="pid of the launcher: end when it ends")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with_parent(args.parent)
    try:
        config = from_arguments(args)
        set_up_logging(args.server_name, None if args.parent else config.run_dir)
        hang.begin(args.server_name, config.run_dir, keys=config.network.keys)
        if config.reward.model.path is None:
            raise RewardError("reward.model.path: missing; give the folder of a reward model")
        with (
            Vitals(config, args.server_name, "reward_model", others="reward_model"),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(run(config, args.port, to_other_nodes=args.to_other_nodes))
    except (ConfigError, KeysError, RewardError) as error:
        log.error("%s stops: %s", args.server_name, error)
        return CANNOT_START
    except ChannelError as error:
        log.error("%s stops: %s", args.server_name, error)
        return CANNOT_GO_ON


if __name__ == "__main__":
    sys.exit(main())
