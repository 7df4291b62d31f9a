"""The server's side of the receivers in SGLang (weight_bus.stage_in: engine)."""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from configs.schema import Config
from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.update.orders import StagingFolder
from weight_bus.errors import TransportError
from weight_bus.remote import ReceiverConnection


class SGLangStaging:
    """Starts the receivers of a running SGLang. What is staged there, `SGLangEngine.load` takes."""

    def __init__(self, config: Config, engine: SGLangEngine) -> None:
        self._config, self._engine = config, engine
        self._links: list[ReceiverConnection] = []

    async def link(self) -> list[ReceiverConnection]:
        """The connections to the receivers, by scheduler rank, which are started first where there are none.

        Raises EngineError where one cannot be reached, NotAvailable where it lacks what it would receive with.
        """
        if not self._links:
            with ExitStack() as stack:
                ranks = range(self._engine.sglang.num_ranks)
                listeners = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in ranks]
                await self._engine.schedulers.order(partial(self._invite, listeners))
                try:
                    for listener in listeners:
                        accept = partial(ReceiverConnection.accept, listener, self._engine.sglang.deadline_s)
                        self._links.append(await asyncio.to_thread(accept))
                except TransportError as error:
                    self.close()
                    self._links = []
                    raise EngineError(str(error)) from error
        return self._links

    def close(self) -> None:
        """End the receivers; from any thread."""
        for link in self._links:
            link.close()

    def _invite(self, listeners: Sequence[socket.socket], staging: StagingFolder) -> None:
        # another name each time: a receiver that was given up must not connect in the place of its successor
        paths = [staging.path / f"receiver.{secrets.token_hex(4)}" for _ in listeners]
        for listener, path in zip(listeners, paths, strict=True):
            try:
                listener.bind(str(path))
                listener.listen(1)
            except OSError as error:
                raise EngineError(f"{path} cannot be listened at: {error}; set TMPDIR to a shorter path") from error
        bus, host = self._config.weight_bus.model_dump(), self._config.network.host
        staging.write_receiver(paths, bus, host, export=len(paths) > 1 and not self._config.staged_by_rank)
