"""The server's side of the receiver in SGLang (weight_bus.stage_in: engine)."""

import asyncio
import secrets
import socket
from functools import partial

from configs.schema import Config
from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.update.orders import StagingFolder
from weight_bus.errors import TransportError
from weight_bus.remote import ReceiverConnection


class SGLangStaging:
    """Starts the receiver of a running SGLang. What is staged there, `SGLangEngine.load` takes."""

    def __init__(self, config: Config, engine: SGLangEngine) -> None:
        self._config, self._engine = config, engine
        self._link: ReceiverConnection | None = None

    async def link(self) -> ReceiverConnection:
        """The connection to the receiver, which is started first where there is none.

        Raises EngineError where it cannot be reached, NotAvailable where it lacks what it would receive with.
        """
        if self._link is None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                await self._engine.in_schedulers(partial(self._invite, listener))
                try:
                    accept = partial(ReceiverConnection.accept, listener, self._engine.sglang.deadline_s)
                    self._link = await asyncio.to_thread(accept)
                except TransportError as error:
                    raise EngineError(str(error)) from error
        return self._link

    def close(self) -> None:
        """End the receiver; from any thread."""
        if self._link is not None:
            self._link.close()

    def _invite(self, listener: socket.socket, staging: StagingFolder) -> None:
        # another name each time: a receiver that was given up must not connect in the place of its successor
        path = staging.path / f"receiver.{secrets.token_hex(4)}"
        try:
            listener.bind(str(path))
            listener.listen(1)
        except OSError as error:
            raise EngineError(f"{path} cannot be listened at: {error}; set TMPDIR to a shorter path") from error
        bus, host = self._config.weight_bus.model_dump(), self._config.network.host
        staging.write_receiver(path, bus, host, export=self._config.placement.tensor_parallel > 1)
