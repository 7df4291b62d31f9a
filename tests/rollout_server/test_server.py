"""A rollout server's end of the channel: when it gives replay up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from configs import Config
from replay import messages as m
from replay.channel import AsyncDealer, AsyncRouter, ChannelError
from rollout_server.server import RolloutServer

SILENT_AFTER_S = 0.6


def server_of(dealer: AsyncDealer) -> RolloutServer:
    """With nothing but its channel."""
    network = {"silent_after_s": SILENT_AFTER_S, "heartbeat_s": 0.1}
    config = Config.model_validate(
        {"model": {"path": "none"}, "data": {"train": "none.jsonl"}, "network": network, "rollout": {"engine": "torch"}}
    )
    engine = SimpleNamespace()
    generator: Any = SimpleNamespace(config=config, engine=engine)
    return RolloutServer(config, generator, dealer, name="rollout-0", fingerprint={})


async def test_a_server_that_the_next_run_finds_at_its_address_ends_and_says_what_it_heard() -> None:
    """The next run's replay refuses each heartbeat of a server that the last one has left behind."""
    router = AsyncRouter("127.0.0.1", 0, "next-run", m.TO_REPLAY)
    dealer = AsyncDealer(router.address, "rollout-0", m.FROM_REPLAY)
    dealer.run_id = "last-run"
    server = server_of(dealer)

    async def refuse() -> None:
        while True:
            if await router.wait(1.0) and (arrived := await router.receive()) is not None:
                await router.send(arrived[0], m.Refused(reason=f"message refused: {arrived[1]}"))

    async def beat() -> None:
        while True:
            await dealer.send(m.Heartbeat(activity="generating", since_s=0.0, gauges={}))
            await asyncio.sleep(SILENT_AFTER_S / 6)

    others = [asyncio.create_task(refuse()), asyncio.create_task(beat())]
    try:
        with pytest.raises(ChannelError, match=r"waited 0.6 s .*refused.*'next-run', this peer belongs to 'last-run'"):
            await asyncio.wait_for(server.next_message(), 10 * SILENT_AFTER_S)
    finally:
        for task in others:
            task.cancel()
        dealer.close()
        router.close()
