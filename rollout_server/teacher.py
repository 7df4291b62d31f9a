"""`python -m rollout_server.teacher --teacher NAME --replay tcp://host:port`: one process of a teacher, one engine."""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

import uvloop

from configs.loading import ConfigError, Parser, add_arguments, from_arguments
from configs.schema import Config
from configs.shared import shared_values
from replay.channel import AsyncDealer, AsyncRouter, ChannelError, KeysError, PeerRefused, load_keys
from replay.messages import FROM_REPLAY
from rollout_server.engines import Engine, EngineError, EngineStartFailed, build_engine, of_teacher
from rollout_server.engines.base import first_error
from rollout_server.main import readings, stopped
from rollout_server.teachers import TeacherError
from rollout_server.teachers.messages import TO_TEACHER
from rollout_server.teachers.process import TeacherProcess
from slipstream.runtime import ending, hang
from slipstream.runtime.fingerprint import FingerprintError, model_fingerprint
from slipstream.runtime.lifeline import CANNOT_START, RUN_FAILED, die_with_parent, set_up_logging
from slipstream.runtime.program import program
from slipstream.runtime.vitals.watch import Vitals
from weight_bus.digest import combined
from weight_bus.errors import NotAvailable


async def run(
    config: Config,
    teacher: str,
    address: str,
    name: str,
    vitals: Vitals | None = None,
    make: Callable[[Config], Engine] = build_engine,
    made: Callable[[TeacherProcess], object] = lambda _: None,
) -> int:
    """Serve one run, of replay at this address; 0 when it ended well. Raises TeacherError: another tokenizer."""
    fingerprint = fingerprint_of(config, teacher)
    network, keys = config.network, load_keys(config.network.keys)
    config = of_teacher(config, teacher)
    engine = make(config)
    if vitals is not None:
        vitals.device = partial(readings, config)
    identity, limit = f"{name}.{secrets.token_hex(4)}", network.max_message_bytes
    dealer = AsyncDealer(address, identity, FROM_REPLAY, keys=keys, max_message_bytes=limit)
    own = None if keys is None else keys.on_this_node()
    options = {"keys": own, "max_message_bytes": limit, "insecure": network.insecure}
    router = AsyncRouter(network.host, 0, "", TO_TEACHER, **options)  # type: ignore[arg-type]
    try:
        process = TeacherProcess(
            config,
            engine,
            dealer,
            router,
            teacher=teacher,
            name=name,
            fingerprint=fingerprint,
            address=router.address if own is None else f"{router.address} {own.server_public.decode()}",
            vitals=vitals,
        )
        made(process)
        if process.follower is None:
            await process.went_live(0, combined(await engine.digest()))
        serving = asyncio.create_task(process.serve())

        async def leave() -> None:
            await process.leave()
            serving.cancel()

        leaving = list[asyncio.Task[None]]()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, lambda: leaving.append(loop.create_task(leave())))
        try:
            return 0 if await serving else RUN_FAILED
        except asyncio.CancelledError:
            return 0
    finally:
        await engine.close()
        router.close()
        dealer.close()


def fingerprint_of(config: Config, teacher: str) -> dict[str, str]:
    """What Hello carries. Raises TeacherError: the tokenizer is not the run's; FingerprintError."""
    own, run_s = config.teachers[teacher].path, model_fingerprint(config.model.path)
    found = run_s if own is None else model_fingerprint(own)
    if found["tokenizer"] != run_s["tokenizer"]:
        raise TeacherError(
            f"teachers.{teacher}.path: {own!r} has the tokenizer {found['tokenizer']}, and model.path"
            f" {config.model.path!r} has {run_s['tokenizer']}: the ids of answers would mean other texts to it; take a"
            " teacher with the tokenizer of model.path"
        )
    return {"tokenizer": found["tokenizer"]} | shared_values(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = Parser(prog=program("rollout_server.teacher"), description=__doc__)
    add_arguments(parser)
    parser.add_argument("--teacher", required=True, help="which of `teachers`")
    parser.add_argument("--replay", required=True, help="address of replay, tcp://host:port")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that its engine is divided over")
    parser.add_argument("--process-name", default=None, help="name in logs and metrics")
    parser.add_argument("--parent", type=int, default=None, help="pid of the launcher: end when it ends")
    args = parser.parse_args(argv)
    if args.parent is not None:
        die_with_parent(args.parent)
    ending.leave_on_error()
    name = args.process_name or f"teacher-{args.teacher}-{socket.gethostname()}-{os.getpid()}"
    try:
        config = from_arguments(args)
        set_up_logging(name, None if args.parent else config.run_dir)
        if args.teacher not in config.teachers or not config.teachers[args.teacher].has_process:
            known = ", ".join(one for one, its in config.teachers.items() if its.has_process) or "none"
            raise TeacherError(f"--teacher {args.teacher}: no teacher with a process of its own; there are {known}")
        placement = config.placement.model_copy(update={"tensor_parallel": args.tensor_parallel})
        config = config.model_copy(update={"placement": placement})
        hang.begin(name, config.run_dir, replay=args.replay, keys=config.network.keys)
        with (
            Vitals(config, name, "teacher", others="engine") as vitals,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            code = runner.run(run(config, args.teacher, args.replay, name, vitals))
            return ending.leave(code, f"{name}: the run has {'failed' if code else 'ended'}")
    except (ConfigError, FingerprintError, KeysError, EngineError, TeacherError) as error:
        return stopped(name, error, CANNOT_START)
    except (ChannelError, EngineStartFailed) as error:
        return stopped(name, error)
    except ExceptionGroup as group:
        first = first_error(group)
        return stopped(name, first, CANNOT_START if isinstance(first, NotAvailable | PeerRefused) else 2)


if __name__ == "__main__":
    sys.exit(main())
