"""Updates straight into SGLang (weight_bus.apply: direct): its schedulers are members of the publisher's group.

Each bucket is one broadcast, which every scheduler receives on its own device and loads at once, so the live weights
are a mixture of two versions until the last bucket. The loader's digests decide whether the version is live.
"""

from collections.abc import Sequence

from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.engine import SGLangEngine
from weight_bus.manifest import Entry
from weight_bus.transports.base import Formation


class DirectGroup:
    """A running SGLang as a member of one group at a time, paused during updates.

    After an error it holds parts of an update, or waits for one that never comes: it must be restarted.
    """

    def __init__(self, engine: SGLangEngine, backend: str) -> None:
        self._engine, self._sglang, self._backend = engine, engine.sglang, backend
        self._name = ""
        """Of the present group."""

    @property
    def ranks(self) -> int:
        """Processes of the engine, each of them a rank of the group."""
        return self._sglang.num_ranks

    async def form(self, formation: Formation) -> None:
        """Enter a group, scheduler i with rank `formation.rank` + i. Raises EngineError."""
        await self.leave()
        host, _, port = formation.endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise EngineError(f"endpoint {formation.endpoint[:80]!r} is not host:port")
        self._name = formation.prefix
        await self._sglang.ask(
            "init_weights_update_group",
            "InitWeightsUpdateGroupReqInput",
            master_address=host,
            master_port=int(port),
            rank_offset=formation.rank,
            world_size=formation.size,
            group_name=self._name,
            backend=self._backend,
        )

    async def receive(self, bucket: Sequence[Entry], index: int) -> None:
        """Receive and load the next bucket within rollout.engine_deadline_s. Raises EngineError."""
        self._engine.touch(f"bucket {index + 1} of an update was received and not the last")
        await self._sglang.ask(
            "update_weights_from_distributed",
            "UpdateWeightsFromDistributedReqInput",
            names=[entry.name for entry in bucket],
            dtypes=[entry.dtype for entry in bucket],
            shapes=[list(entry.shape) for entry in bucket],
            group_name=self._name,
            load_format="flattened_bucket",
            flush_cache=False,
        )

    async def prove(self, entries: Sequence[Entry], version: int) -> None:
        """Digest the live tensors for `Engine.digest`; `version` is live from now on."""
        await self._engine.prove(((entry.name, entry.shape) for entry in entries), version)

    async def leave(self) -> None:
        """Leave the group, if there is one. Raises EngineError."""
        name, self._name = self._name, ""
        if name:
            await self._sglang.ask("destroy_weights_update_group", "DestroyWeightsUpdateGroupReqInput", group_name=name)
