"""`python -m replay.main`: the replay process. CPU only.

Once it serves, it notes its address in processes/replay.json of the run folder, and prints one line
`replay ready at tcp://host:port` on standard output. With --recover it goes on from the journal of the run folder.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from configs.loading import ConfigError, add_arguments, from_arguments
from configs.schema import Config
from replay import player
from replay.channel import AsyncRouter, ChannelError, load_keys
from replay.data import DataError, evaluation_rows, prompt_source
from replay.journal import FolderLock, Journal, JournalError, JournalReader, JournalWriter, place_journal
from replay.journal.format import Record, segments
from replay.messages import TO_REPLAY
from replay.player import PlayedJournal
from replay.serve import farewell, keep_company, serve
from replay.service import Service
from replay.state.apply import boot_fields
from replay.timeline import FILE, Timeline
from slipstream.runtime import ending, hang
from slipstream.runtime.fingerprint import FingerprintError, run_fingerprint
from slipstream.runtime.lifeline import CANNOT_GO_ON, CHECKPOINT, RUN_FAILED, die_with_parent, set_up_logging
from slipstream.runtime.program import program
from slipstream.runtime.vitals.watch import Vitals

log = logging.getLogger(__name__)


async def run(config: Config, run_id: str, *, port: int, recover: bool, play: str | None) -> int:
    """Serve one run; 0 when it ended well."""
    network = config.network
    # First: a port that is taken must not leave a journal behind.
    router = AsyncRouter(
        network.host,
        port,
        run_id,
        TO_REPLAY,
        keys=load_keys(network.keys),
        max_message_bytes=network.max_message_bytes,
        insecure=network.insecure,
    )
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    service: Service | None = None
    try:
        doing = ["reading the data and the journal"]
        work = partial(prepare, config, run_id, recover=recover, play=play, report=doing.append)
        service = await keep_company(router, work, lambda: doing[-1])
        asking = partial(setattr, service.run, "checkpoint_asked", True)
        loop.add_signal_handler(CHECKPOINT, asking)
        service.journal.start(partial(loop.call_soon_threadsafe, router.wake))
        hang.serves(router.address)
        sys.stdout.write(f"replay ready at {router.address}\n")
        sys.stdout.flush()
        with Vitals(config, "replay", "replay") as service.report.vitals:
            await serve(router, service, network.heartbeat_s, stop.is_set)
        if service.ended is None:
            service.end("replay was told to stop", failed=True)
            await farewell(router, service)
        if service.timeline is not None and service.ended is not None:
            service.timeline.end(service.ended, failed=service.failed)
    finally:
        router.close()
        if service is not None:
            service.journal.close()
    return ending.leave(RUN_FAILED if service.failed else 0, service.ended or "")


def prepare(config: Config, run_id: str, *, recover: bool, play: str | None, report: Callable[[str], None]) -> Service:
    """The service with its data, where its journal ends. Raises DataError, FingerprintError, JournalError."""
    source = prompt_source(config, report)
    make = partial(Service, config, source, fingerprint=run_fingerprint(config))
    if play is not None:
        played = PlayedJournal(Path(play) / "journal")
        service = make({}, time.monotonic(), journal=played, playback=True)
        player.play(service.run, played, Path(play))
        return service
    evaluated = evaluation_rows(config)
    journal, records = open_journal(config, run_id, recover=recover)
    service = make(evaluated, time.monotonic(), journal=journal)
    service.timeline = Timeline(Path(config.run_dir) / FILE, service.run, service.peers, service.batching)
    go_on(service, records)
    return service


def open_journal(config: Config, run_id: str, *, recover: bool) -> tuple[Journal, list[Record]]:
    """The journal of the run folder, and what is in it from its newest snapshot on.

    Raises JournalError: it is damaged or gone, cannot be written, has another writer, or is there and `recover` is not
    set.
    """
    folder = place_journal(config.run_dir, config.replay.journal_dir)
    if segments(folder) and not recover:
        raise JournalError(
            f"{folder}: this run has a journal; go on from it with --resume {config.run_dir} (replay.main: --recover),"
            " or take another run.name"
        )
    lock = FolderLock(folder)  # before anything is cut: a second --resume must not touch the journal of a live run
    reader = JournalReader(folder)
    records = list(reader.records(reader.newest_snapshot(), cut=True))
    return JournalWriter(folder, run_id, fsync=config.replay.fsync, after=reader, lock=lock), records


def go_on(service: Service, records: list[Record]) -> None:
    """Bring a service to where its journal ends, which `boot` says there. Raises JournalError."""
    started = time.monotonic()
    count = service.restore(records, started)
    service.journal.append("boot", boot_fields(service.config, service.run.source.state(), os.getpid()))
    if count > 1:
        buffer = service.buffer
        log.info(
            "replay: recovered from %d records in %.2f s: version %d, incarnation %d, %d groups admitted, %d taken,"
            " %d servers awaited",
            count, time.monotonic() - started, buffer.version, service.incarnation, len(buffer.slots), buffer.taken,
            len(service.missing),
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog=program("replay.main"), description=__doc__)
    add_arguments(parser)
    parser.add_argument("--run-id", default=None, help="identifies the run on the wire (default: name and pid)")
    parser.add_argument("--parent", type=int, default=None, help="pid of the launcher: end when it ends")
    parser.add_argument("--port", type=int, default=None, help="instead of network.replay_port")
    parser.add_argument("--recover", action="store_true", help="go on from the journal of the run folder")
    parser.add_argument("--play", metavar="RUN_DIR", default=None, help="hand out the batches of this run's journal")
    args = parser.parse_args()
    if args.parent is not None:
        die_with_parent(args.parent)
    ending.leave_on_error()
    try:
        config = from_arguments(args)
        set_up_logging("replay", None if args.parent else config.run_dir)
        hang.begin("replay", config.run_dir, keys=config.network.keys)
        port = config.network.replay_port if args.port is None else args.port
        run_id = args.run_id or f"{config.run.name}-{os.getpid()}"
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(config, run_id, port=port, recover=args.recover, play=args.play))
    except (ConfigError, DataError, FingerprintError, ChannelError, JournalError) as error:
        log.error("%s", error)
        sys.stderr.write(f"replay: {error}\n")
        return ending.leave(CANNOT_GO_ON, str(error), error)


if __name__ == "__main__":
    sys.exit(main())
