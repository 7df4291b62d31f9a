"""`python -m rollout_server.main --replay tcp://host:port`: one rollout server, one engine."""

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import uvloop

from configs.errors import SlipstreamError, Unexpected
from configs.loading import ConfigError, Parser, add_arguments, from_arguments
from configs.schema import Config
from replay.channel import AsyncDealer, ChannelError, KeysError, PeerRefused, load_keys
from replay.messages import FROM_REPLAY
from rollout_server.engines import Engine, EngineError, EngineStartFailed, build_engine
from rollout_server.engines.base import EngineStartRefused, first_error
from rollout_server.episodes import EpisodeGenerator
from rollout_server.generate import Generator
from rollout_server.serve import serve
from rollout_server.server import RolloutServer
from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.environments.pool import environments_of
from rollout_server.tasks.rewards import RewardError
from rollout_server.tasks.rewards.pool import key_variables, rewards_of
from rollout_server.tasks.task import Task, TaskError
from rollout_server.teachers import TeacherError
from rollout_server.teachers.scores import Teachers
from slipstream.runtime import ending, hang
from slipstream.runtime.fingerprint import FingerprintError, run_fingerprint
from slipstream.runtime.lifeline import CANNOT_START, RUN_FAILED, START_REFUSED, die_with_parent, set_up_logging
from slipstream.runtime.program import program
from slipstream.runtime.vitals import device
from slipstream.runtime.vitals.watch import Vitals
from weight_bus import Subscriber
from weight_bus.errors import NotAvailable

log = logging.getLogger(__name__)

CHILDREN = {"rollout_server.tasks.rewards.worker": "reward", "rollout_server.tasks.environments.worker": "environment"}
"""Roles of child processes by their command line; others are the engine's."""

HAND_BACK_S = 3.0
"""How long replay has to take unfinished answers back."""
LEAVE_S = 10
"""After so many seconds a signal ends the process, whatever hangs: a machine that is taken away gives 30 at most."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rollout server is made of; benchmarks and fault campaigns take variants."""

    engine: Callable[[Config], Engine] = build_engine
    generator: Callable[..., Generator] = Generator
    """Of a Generator's fields."""
    dealer: type[AsyncDealer] = AsyncDealer
    subscriber: type[Subscriber] = Subscriber


async def run(
    config: Config,
    address: str,
    name: str,
    parts: Parts,
    vitals: Vitals | None = None,
) -> int:
    """Serve one run, of replay at this address; 0 when it ended well."""
    fingerprint = run_fingerprint(config)
    limits, keys = config.network.max_message_bytes, load_keys(config.network.keys)
    engine = parts.engine(config)  # first: SGLang on a CPU must come before transformers
    if vitals is not None:
        vitals.device = partial(readings, config)
    dealer = parts.dealer(address, f"{name}.{secrets.token_hex(4)}", FROM_REPLAY, keys=keys, max_message_bytes=limits)
    own = dict[str, Teachers]()
    try:
        task = Task(config)
        if config.scoring is not None:
            own["teachers"] = Teachers(config, engine, name, fingerprint, task.encode_text)
        async with (
            rewards_of(config.reward) as rewards,
            environments_of(
                config.environment, key_variables(config.reward), temperature=config.rollout.temperature
            ) as environments,
        ):
            make = parts.generator if environments is None else partial(EpisodeGenerator, environments=environments)
            generator = make(config, engine, task, rewards, **own)
            server = RolloutServer(
                config,
                generator,
                dealer,
                name=name,
                fingerprint=fingerprint,
                subscriber=parts.subscriber,
                vitals=vitals,
            )
            # The imported libraries are hundreds of thousands of objects that never die: without this, every full
            # collection walks over them and decoding stands still meanwhile.
            gc.collect()
            gc.freeze()
            serving = asyncio.create_task(serve(server))
            _leave_at_signals(server, serving)
            try:
                return 0 if await serving else RUN_FAILED
            except asyncio.CancelledError:
                return 0
    finally:
        try:
            await engine.close()
        except (EngineError, RuntimeError) as error:  # must not take the place of the reason why it closes
            log.error("%s: %s", name, error)
        for teachers in own.values():
            teachers.close()
        dealer.close()


def _leave_at_signals(server: RolloutServer, serving: asyncio.Task[bool]) -> None:
    loop, leaving = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    def stop() -> None:
        if not leaving and not serving.done():
            signal.alarm(LEAVE_S)
            leaving.append(loop.create_task(leave(server, serving)))

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop)


async def leave(server: RolloutServer, serving: "asyncio.Task[bool]") -> None:
    """Hand unfinished answers back; `serving` ends by replay's Goodbye, or after HAND_BACK_S."""
    try:
        async with asyncio.timeout(HAND_BACK_S):
            await server.leave(serving)
    except TimeoutError:
        log.warning("%s: no goodbye of replay, or an update that does not end, for %g s", server.name, HAND_BACK_S)
    finally:
        serving.cancel()


def readings(config: Config) -> Mapping[str, float]:
    """What the GPUs of this server say; nothing on a CPU."""
    import torch  # the engine has imported it

    def used(one: int) -> int:
        free, total = torch.cuda.mem_get_info(one)
        return total - free  # by every process on it: SGLang's are others

    return device.readings(torch.cuda, range(config.placement.tensor_parallel), used)


def main(argv: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Entry point."""
    parser = Parser(prog=program("rollout_server.main"), description=__doc__)
    add_arguments(parser)
    parser.add_argument("--replay", required=True, help="address of replay, tcp://host:port")
    parser.add_argument(
        "--server-name", default=f"rollout-{socket.gethostname()}-{os.getpid()}", help="name in logs and metrics"
    )
    parser.add_argument("--parent", type=int, default=None, help="pid of the launcher: end when it ends")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with_parent(args.parent)
    ending.leave_on_error()
    try:
        config = from_arguments(args).with_workers()
        set_up_logging(args.server_name, None if args.parent else config.run_dir)
        hang.begin(args.server_name, config.run_dir, replay=args.replay, keys=config.network.keys)
        with (
            Vitals(config, args.server_name, "rollout", modules=CHILDREN, others="engine") as vitals,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            code = runner.run(run(config, args.replay, args.server_name, parts or Parts(), vitals))
            return ending.leave(code, f"{args.server_name}: the run has {'failed' if code else 'ended'}")
    except (ConfigError, FingerprintError, KeysError, EngineError, TaskError, RewardError, EnvironmentFailed) as error:
        return stopped(args.server_name, error, CANNOT_START)  # before serving: what comes up later is in a group
    except (ChannelError, EngineStartFailed) as error:
        return stopped(args.server_name, error)
    except ExceptionGroup as group:
        first = first_error(group)
        ends_alike = isinstance(first, NotAvailable | PeerRefused | TeacherError)
        return stopped(args.server_name, first, CANNOT_START if ends_alike else 2)


def stopped(name: str, error: BaseException, code: int = 2) -> int:
    """Say why a process of this name ends; its exit code."""
    known, code = isinstance(error, SlipstreamError), START_REFUSED if isinstance(error, EngineStartRefused) else code
    said = error if known else Unexpected(f"{type(error).__name__}: {error}")
    log.error("%s", text := f"{name} stops: {said}", exc_info=not isinstance(error, RuntimeError | ValueError))
    return ending.leave(code, text, said)


if __name__ == "__main__":
    sys.exit(main())
