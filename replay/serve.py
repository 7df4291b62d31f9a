"""Replay's main loop: messages in, leases and batches out.

consumes     Hello, LeaseRequest, Renew, Group, EvaluationResult (rollout servers); Take, Committed (learner)
produces     Lease, Ack, EvaluationLease (rollout servers); Batch, Proceed, EvaluationResult (learner)
waits for    any message or news of the journal, for at most one tick; decides about silent peers by its own clock
unblocked by rollout_server/serve.py (groups) and learner/train.py (takes and commits)
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from replay import messages as m
from replay.channel import AsyncRouter, WireError
from replay.service import Service

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TICK_S = 0.25
MESSAGES_PER_TURN = 64
COMPANY_S = 0.05  # how often replay looks for messages while it reads its data and journal
FAREWELL_S = 1.0  # that Goodbyes have to reach their peers


async def keep_company(router: AsyncRouter, work: Callable[[], Result], activity: Callable[[], str] = str) -> Result:
    """Run `work` (reading data, a journal) in a thread, and answer whoever speaks meanwhile with heartbeats.

    What they say is not kept: replay has no peers yet, so it comes again after `say Hello first`. Nothing in `work` may
    touch the router; what it raises is raised here. `activity` says what it is doing.
    """
    task = asyncio.create_task(asyncio.to_thread(work))
    while not task.done():
        while not task.done() and (arrived := await router.receive()) is not None:
            await router.send(arrived[0], m.Heartbeat(activity=activity()))
        await asyncio.wait([task], timeout=COMPANY_S)
    return await task


async def serve(router: AsyncRouter, service: Service, heartbeat_s: float, stopping: Callable[[], bool]) -> None:
    """Serve until the run has ended and every peer was told, or `stopping` says so."""
    next_tick = next_beat = time.monotonic()
    while not stopping():
        await router.wait(max(0.0, next_tick - time.monotonic()))
        woken = time.monotonic()
        behind = await take_in(router, service)
        now = time.monotonic()
        if now >= next_tick:  # after what has arrived was read: a peer is not silent because replay was slow
            service.tick(now, late=behind or now > next_tick + heartbeat_s)
            next_tick = now + TICK_S
        if now >= next_beat:
            await beat(router, service, now)
            service.report.show()
            next_beat = now + heartbeat_s
        await flush(router, service)
        if service.timeline is not None:
            service.timeline.observe(now, woken)
        if service.ended is not None and not service.peers.by_identity and service.outlet.is_empty:
            return
        if service.ended is not None and time.monotonic() > service.ended_at + FAREWELL_S:
            return


async def take_in(router: AsyncRouter, service: Service) -> bool:
    """Process what has arrived, up to a bound, then hand out what follows; True when the bound was reached."""
    for _ in range(MESSAGES_PER_TURN):
        arrived = await router.receive()
        if arrived is None:
            break
        identity, received = arrived
        if isinstance(received, WireError):
            service.corrupt(identity, received)
        else:
            frames, sender = received.frames, received.sender
            service.receive(identity, received.message, time.monotonic(), frames=frames, sender=sender)
    service.advance(time.monotonic())
    return arrived is not None


async def farewell(router: AsyncRouter, service: Service) -> None:
    """Send what is left once the journal has it, for at most FAREWELL_S."""
    until = time.monotonic() + FAREWELL_S
    await flush(router, service)
    while not service.outlet.is_empty and time.monotonic() < until:
        await asyncio.sleep(COMPANY_S)
        await flush(router, service)


async def flush(router: AsyncRouter, service: Service) -> None:
    """Send what may be said by now (replay/outlet.py); who cannot be reached is lost (closed or full)."""
    while outbox := service.sayable(time.monotonic()):
        for identity, message in outbox:
            if not await router.send(identity, message) and service.peers.get(identity) is not None:
                service.unreachable(identity, time.monotonic())


async def beat(router: AsyncRouter, service: Service, now: float) -> None:
    """Tell every peer that replay lives; a send is also how a closed connection shows at once."""
    service.report.waits.refused = router.refused
    alive = m.Heartbeat(blocked="disk" if service.outlet.unwritten_since is not None else "")
    for identity in list(service.peers.by_identity):
        if await router.send(identity, alive):
            service.reached(identity)
        else:
            service.unreachable(identity, now)
