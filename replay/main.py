"""`python -m replay.main`: the replay process. CPU only.

It prints one line `replay ready at tcp://host:port` on standard output once it serves; the launcher and
scripts read the address from there.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time

import uvloop

from configs.loading import ConfigError, add_arguments, from_arguments
from configs.schema import Config
from replay.agreement import run_fingerprint
from replay.channel import AsyncRouter, ChannelError, Limits, load_keys
from replay.fingerprint import FingerprintError
from replay.lifeline import die_with_parent, set_up_logging
from replay.messages import TO_REPLAY
from replay.prompts import DataError, PromptSource, load_rows
from replay.serve import serve
from replay.service import Service

log = logging.getLogger(__name__)


async def run(config: Config, run_id: str) -> int:
    """Serve one run; 0 when it ended well."""
    rows = load_rows(config.data.train)
    source = PromptSource(rows, shuffle=config.data.shuffle, seed=config.run.seed)
    evaluation_rows = load_rows(config.data.eval) if config.data.eval and config.evaluation.every_steps else []
    fingerprint = run_fingerprint(config)
    service = Service(config, source, evaluation_rows, time.monotonic(), fingerprint=fingerprint)
    network = config.network
    limits, keys = Limits(network.max_message_bytes), load_keys(network.keys)
    router = AsyncRouter(
        network.host, network.replay_port, run_id, TO_REPLAY, limits, keys=keys, insecure=network.insecure
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    try:
        sys.stdout.write(f"replay ready at {router.address}\n")
        sys.stdout.flush()
        await serve(router, service, config.network.heartbeat_s, stop.is_set)
    finally:
        router.close()
    return 1 if service.failed else 0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m replay.main", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--run-id", default=None, help="identifies the run on the wire (default: name and pid)")
    parser.add_argument("--parent", type=int, default=None, help="pid of the launcher: end when it ends")
    args = parser.parse_args()
    if args.parent is not None:
        die_with_parent(args.parent)
    try:
        config = from_arguments(args)
        set_up_logging("replay", None if args.parent else config.run_dir)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(config, args.run_id or f"{config.run.name}-{os.getpid()}"))
    except (ConfigError, DataError, FingerprintError, ChannelError) as error:
        log.error("%s", error)
        sys.stderr.write(f"replay: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
