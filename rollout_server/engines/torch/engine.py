"""The embedded `torch` engine: continuous batching on a CPU, for small models. The asyncio side of `DecodeLoop`."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_server.engines.base import Completion, EngineError, Health, Partial, PauseMode, Sampling
from rollout_server.engines.prefixes import check_request, settled
from rollout_server.engines.torch.family import read_spec
from rollout_server.engines.torch.loop import DecodeLoop
from rollout_server.engines.torch.rows import Request
from rollout_server.engines.torch.sampling import stream_key
from rollout_server.engines.torch.weights import LiveWeights, RowRange, read_folder

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE_DEADLINE_S = 30.0


class TorchEngine:
    """Implements `Engine`. One daemon thread decodes; make it with `from_folder`."""

    def __init__(
        self, weights: LiveWeights, *, max_context: int, max_running: int, num_threads: int, seed: int
    ) -> None:
        self._spec = weights.spec
        self._weights = weights
        self._max_context = max_context
        self._seed = seed
        self._loop = DecodeLoop(weights, max_context=max_context, max_running=max_running, num_threads=num_threads)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        max_context: int,
        max_running: int,
        dtype: str = "float32",
        num_threads: int = 1,
        seed: int = 0,
    ) -> "TorchEngine":
        """Serve a Hugging Face folder of the Qwen2, Qwen3 or Llama family as version 0.

        Args:
            path: folder with config.json and safetensors.
            max_context: most tokens of prompt plus answer.
            max_running: answers decoded at once (per set of weights: live, and each pin).
            dtype: "float32" or "bfloat16"; the weights of the folder are cast to it.
            num_threads: intra-op threads; torch keeps one number per process.
            seed: mixed into every request's seed.

        Raises:
            EngineError: the folder cannot be served exactly.
        """
        if dtype not in DTYPES:
            raise EngineError(
                f"rollout.dtype {dtype!r} is not served by the torch engine; take one of {sorted(DTYPES)}"
            )
        torch.set_num_threads(num_threads)
        folder = Path(path)
        spec = read_spec(folder, max_context)
        weights = LiveWeights(spec, DTYPES[dtype])
        try:
            weights.load(read_folder(folder, tied=spec.tied, dtype=DTYPES[dtype]))
        except EngineError as error:
            raise EngineError(f"{folder}: {error}") from error
        return cls(weights, max_context=max_context, max_running=max_running, num_threads=num_threads, seed=seed)

    @property
    def version(self) -> int:
        """Policy version of the live weights."""
        return self._loop.live.version

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """The fused tensors that live requests are decoded with, by live name; the tensors, not copies."""
        return self._weights.tensors()

    def layout(self) -> Mapping[str, RowRange]:
        """The inverse map: HF name -> rows of a live tensor."""
        return self._weights.layout()

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        n: int,
        *,
        request_id: str,
        pinned: int | None = None,
        prefixes: Sequence[Partial] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`. A caller that is cancelled aborts its request.

        A token's random number depends on its position in the answer: what follows a prefix is drawn with the numbers
        of an answer that was never interrupted.

        Raises:
            EngineError: the request does not fit or is malformed, `request_id` is in use, `pinned` is not held, or
                the engine died or is closed.
        """
        check_request(token_ids, sampling, n, max_context=self._max_context, vocab_size=self._spec.vocab_size)
        keys = [stream_key(self._seed, sampling.seed, index) for index in range(n)]
        prompt = np.array(token_ids, dtype=np.int32)
        given = settled(prefixes, n, sampling, self._spec.vocab_size)
        request = Request(
            request_id=request_id, prompt=prompt, sampling=sampling, keys=keys, future=Future(), prefixes=given
        )
        try:
            completions: list[Completion] = await self._loop.mailbox.ask(
                lambda _: self._loop.enqueue(request, pinned), request.future
            )
        except asyncio.CancelledError:
            self._post_unwatched(lambda: self._loop.abort(request_id, request))
            raise
        return completions

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. Only live requests stop or drain; pinned ones go on.

        Raises:
            EngineError: a drain was ended by `resume`, another pause or `close` before the last answer ended.
        """
        await self._loop.mailbox.ask(lambda future: self._loop.pause(mode, future))

    async def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `Engine.load`. The iterable is consumed in a worker thread; what it raises is raised here.

        Raises:
            EngineError: not paused, or a tensor is unknown, repeated, missing, or of another shape or dtype. After
                the latter the engine is half updated: `resume` and `pin` refuse until a load has succeeded.
        """
        await self._do(lambda: self._loop.begin_load(version))
        copying = asyncio.ensure_future(asyncio.to_thread(self._weights.load, named_tensors))
        try:
            # A cancelled caller must not free the tensors for a second load while the first still writes them.
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(lambda done: self._abandon_load(done, version))
            raise
        except BaseException:
            await self._do(lambda: self._loop.end_load(version, complete=False))
            raise
        await self._do(lambda: self._loop.end_load(version, complete=True))

    def _abandon_load(self, copying: "asyncio.Future[None]", version: int) -> None:
        if not copying.cancelled() and copying.exception() is not None:
            logger.warning("cancelled load of version %d ended with: %s", version, copying.exception())
        self._post_unwatched(lambda: self._loop.end_load(version, complete=False))

    async def digest(self) -> Mapping[str, int]:
        """See `Engine.digest`. Keys are HF names; a tied lm_head.weight has none (rule of ties)."""
        self._loop.mailbox.raise_if_dead()
        return await asyncio.to_thread(self._weights.digests)

    async def resume(self) -> None:
        """See `Engine.resume`. After `pause("recompute_kv")` and a load, the KV of running requests is recomputed.

        Raises:
            EngineError: the engine is half updated.
        """
        await self._do(self._loop.resume)

    def holds(self) -> int | None:
        """See `Engine.holds`: pinned weights are a copy, so no update ever waits."""
        return None

    async def pin(self, version: int) -> None:
        """See `Engine.pin`: copies the live weights.

        Raises:
            EngineError: the live weights are another version, or half updated.
        """
        await self._do(lambda: self._loop.pin(version))

    async def unpin(self, version: int) -> None:
        """See `Engine.unpin`. Requests that still run on the pin come back as `abort`."""
        await self._do(lambda: self._loop.unpin(version))

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`; unknown requests are ignored."""
        self._post_unwatched(lambda: self._loop.abort(request_id))

    def running_tokens(self) -> Mapping[str, int]:
        """See `Engine.running_tokens`; waiting answers count as 0."""
        return self._loop.running_tokens()

    def progress(self, request_id: str, since: Sequence[int] = ()) -> list[Partial]:
        """See `Engine.progress`."""
        return self._loop.progress(request_id, since)

    async def health(self) -> Health:
        """See `Engine.health`."""
        return self._loop.health()

    async def close(self) -> None:
        """See `Engine.close`.

        Raises:
            EngineError: the thread is still in a forward after 30 s.
        """
        self._loop.mailbox.close()
        if not await asyncio.to_thread(self._loop.join, CLOSE_DEADLINE_S):
            raise EngineError(f"the decode thread did not end within {CLOSE_DEADLINE_S:.0f} s of close()")

    async def _do(self, action: Callable[[], None]) -> None:
        """Run `action` in the decode thread between two steps and wait until it is done."""

        def handler(future: "Future[Any]") -> None:
            action()
            future.set_result(None)

        await self._loop.mailbox.ask(handler)

    def _post_unwatched(self, action: Callable[[], None]) -> None:
        """Post an action that nobody waits for; to an engine that has ended it means nothing."""

        def handler(future: "Future[Any]") -> None:
            action()
            future.set_result(None)

        try:
            self._loop.mailbox.post(handler, Future())
        except EngineError as error:
            logger.debug("command dropped: %s", error)
