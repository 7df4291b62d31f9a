"""Rollout server's main loop: leases in, groups out, weights followed on the side.

consumes     Lease, EvaluationLease (replay); weight versions (weight bus)
produces     Group, EvaluationResult, Renew, LeaseRequest (replay)
waits for    replay (Welcome, Lease) for at most network.silent_after_s; the engine; the reward processes
unblocked by replay/serve.py (room for another group) and weight_bus/publisher.py (the next version)
"""

import asyncio
import logging

from rollout_server.engines.base import first_error
from rollout_server.leases import GoodbyeReceived
from rollout_server.server import RolloutServer

log = logging.getLogger(__name__)


async def serve(server: RolloutServer) -> bool:
    """Serve until replay says Goodbye; True when the run ended well.

    Raises:
        ChannelError: replay is silent or refused this server.
        EngineError: the engine or the weight follower died.
    """
    await server.join()
    ended: BaseException | None = None
    pulse = server.pulse()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.beat())
            while True:
                message = await server.next_message()
                await server.handle(message, tasks)
    except* GoodbyeReceived as group:
        ended = first_error(group)
    finally:
        pulse.close()
        # In a thread: the follower may just be waiting for a coroutine on this very loop.
        await asyncio.to_thread(server.follower.stop)
    log.info("replay said goodbye: %s", ended)
    return isinstance(ended, GoodbyeReceived) and not ended.failed
