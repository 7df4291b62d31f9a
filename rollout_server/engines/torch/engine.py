"""The embedded `torch` engine: continuous batching on a CPU, for small models.

A thread of its own decodes, step after step, until somebody asks: requests, pauses, pins and version changes take their
turns between two steps. When a step fails, every waiter fails with the cause. Only the copying of a load runs
elsewhere: it may block on a network, the live lane stands still meanwhile, and pinned evaluations go on.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from configs.learner import Lora
from rollout_server.engines.base import Completion, EngineError, Health, Partial, PauseMode, Pictures, Sampling, Scored
from rollout_server.engines.prefixes import check_request, check_scored, settled
from rollout_server.engines.torch.family import read_spec
from rollout_server.engines.torch.lane import DecodeLane
from rollout_server.engines.torch.model import TorchModel
from rollout_server.engines.torch.rows import Request
from rollout_server.engines.torch.sampling import stream_key
from rollout_server.engines.torch.turns import Turns
from rollout_server.engines.torch.viewer import Viewer
from rollout_server.engines.torch.weights import LiveWeights, read_folder
from slipstream.families.record import TOWER

T = TypeVar("T")
logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE_DEADLINE_S = 30.0


class TorchEngine(Turns):
    """Implements `Engine`, whose docstrings hold here: one live lane, and one for each pinned version.

    Args:
        folder: a Hugging Face folder of a family of slipstream/families, with config.json and safetensors; version
            0.
        max_context: most tokens of prompt plus answer.
        max_running: answers decoded at once (per set of weights: live, and each pin).
        dtype: "float32" or "bfloat16"; the weights of the folder are cast to it.
        num_threads: intra-op threads; torch keeps one number per process.
        seed: mixed into every request's seed.
        lora: adapters, zero at first, that updates carry; the weights of the folder stay then.
        routing: answers come with the experts of their tokens, where the model has any.
        scored_context: most tokens of a sequence that is scored, where these are more than max_context.

    Raises EngineError where the folder cannot be served exactly.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_context: int,
        max_running: int,
        dtype: str = "float32",
        num_threads: int = 1,
        seed: int = 0,
        lora: Lora | None = None,
        routing: bool = True,
        scored_context: int = 0,
    ) -> None:
        if dtype not in DTYPES:
            raise EngineError(
                f"rollout.dtype {dtype!r} is not served by the torch engine; take one of {sorted(DTYPES)}"
            )
        super().__init__(num_threads)
        folder = Path(folder)
        self._scored_context = max(max_context, scored_context)
        self._spec = read_spec(folder, self._scored_context)
        weights = LiveWeights(self._spec, DTYPES[dtype], lora)
        try:
            skip = TOWER if self._spec.vision is not None else ""
            weights.fill(read_folder(folder, tied=self._spec.tied, dtype=DTYPES[dtype], skip=skip))
        except EngineError as error:
            raise EngineError(f"{folder}: {error}") from error
        self._vision = None if self._spec.vision is None else Viewer(folder, self._spec.vision, DTYPES[dtype])
        self._max_context, self._seed = max_context, seed
        self._lock = threading.Lock()
        """Held while rows or the tables below change, and while another thread reads them."""
        self._lane = partial(
            DecodeLane,
            TorchModel(self._spec, dtype=weights.dtype, max_context=self._scored_context),
            experts=self._spec.experts if routing else None,
            max_running=max_running,
            max_context=max_context,
            lock=self._lock,
        )
        self.live = self._lane(weights, 0)
        self._pins: dict[int, DecodeLane] = {}
        self._requests: dict[str, tuple[Request, DecodeLane]] = {}
        self._mode: PauseMode | None = None
        self._half_updated: str | None = None
        self._loading, self._kv_is_old = False, False
        self._busy_s, self._unpinned_tokens = 0.0, 0
        self._decoding: asyncio.Task[None] | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self.live.version

    # ---- requests --------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        n: int,
        *,
        request_id: str,
        pinned: int | None = None,
        prefixes: Sequence[Partial] | None = None,
        pictures: Pictures | None = None,
    ) -> list[Completion]:
        """As `Engine.generate`. Random numbers after a prefix are those of an uninterrupted answer."""
        check_request(token_ids, sampling, n, max_context=self._max_context, vocab_size=self._spec.vocab_size)
        look, prompt = None, np.array(token_ids, dtype=np.int32)
        if pictures is not None:
            if self._vision is None:
                raise EngineError(f"a prompt with pictures, and a {self._spec.family} model takes none")
            look = await asyncio.to_thread(self._vision.look, prompt, pictures)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            look=look,
            sampling=sampling,
            keys=[stream_key(self._seed, sampling.seed, index) for index in range(n)],
            prefixes=settled(prefixes, n, sampling, self._spec.vocab_size),
        )
        request.future.set_running_or_notify_cancel()  # the decode thread answers it, whoever waits
        async with self._between_steps():
            lane = self.live if pinned is None else self._pins.get(pinned)
            if lane is None:
                raise EngineError(f"version {pinned} is not pinned here (pinned: {sorted(self._pins)})")
            if request.done and lane.rows.routing is not None:
                await self._in_thread(lane.route, request)
            with self._lock:
                if request_id in self._requests:
                    raise EngineError(f"request id {request_id!r} is already running")
                self._requests[request_id] = (request, lane)
                lane.rows.enqueue(request)
            self._deliver()
        try:
            return await asyncio.wrap_future(request.future)
        except asyncio.CancelledError:
            self.abort(request_id, request)
            raise

    async def score(
        self, sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, temperature: float, top: int
    ) -> Scored:
        """As `Engine.score`. Decoding stands still meanwhile; a pause waits for it, and it waits for one to end."""
        check_scored(sequences, firsts, max_context=self._scored_context, vocab_size=self._spec.vocab_size)
        async with self._between_steps():
            await self._turn.wait_for(lambda: self._ended is not None or self._mode is None)
            self._raise_if_ended()
            started = time.perf_counter()
            scored = await self._in_thread(
                partial(self.live.score, sequences, firsts, temperature=temperature, top=top)
            )
            self._busy_s += time.perf_counter() - started
            return scored

    def abort(self, request_id: str, only: Request | None = None) -> None:
        """As `Engine.abort`; with `only`, that request and no later one of its name."""
        task = asyncio.create_task(self._abort(request_id, only))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, request_id: str, only: Request | None) -> None:
        with suppress(EngineError):  # to an engine that has ended it means nothing
            async with self._between_steps():
                held, lane = self._requests.get(request_id, (None, None))
                if held is not None and lane is not None and only in (None, held):
                    await self._in_thread(lane.abort, held)
                    self._deliver()  # its name is free at once, for a caller that tries again

    def running_tokens(self) -> Mapping[str, int]:
        with self._lock:
            counts = {
                name: sum(answer.token_ids.size for answer in request.done.values())
                for name, (request, _) in self._requests.items()
            }
            for lane in self._lanes():
                for request, produced in lane.rows.produced():
                    # After the thread's death its requests are forgotten while their rows are still there.
                    if request.request_id in counts:
                        counts[request.request_id] += produced
        return counts

    def waiting(self) -> set[str]:
        with self._lock:
            tables = [lane.rows for lane in self._lanes()]
            running = {answer.request.request_id for rows in tables for answer in rows.answers}
            return {answer.request.request_id for rows in tables for answer in rows.waiting} - running

    def progress(self, request_id: str, since: Sequence[int] = ()) -> list[Partial]:
        with self._lock:
            if request_id not in self._requests:
                return []
            request, lane = self._requests[request_id]
            return lane.rows.progress(request, since or [0] * len(request.keys))

    # ---- updates ---------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`, of live requests; another pause or `resume` ends a drain."""
        async with self._between_steps():
            self._mode = mode
            self._go_on()
            await self._turn.wait_for(lambda: self._ended is not None or not self._draining())
            self._raise_if_ended()

    async def load(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        digests: Mapping[str, int] | None = None,
    ) -> None:
        """As `Engine.load`; `digests` are the caller's to compare.

        A worker thread consumes the iterable; what it raises is raised here.
        """
        async with self._between_steps():
            if self._loading:
                raise EngineError(f"load of version {version} while another load runs")
            if self._mode is None or self._draining():
                raise EngineError(f"load of version {version} while live requests run; pause first")
            # from here on the live tensors belong to the loading thread
            self._loading, self._kv_is_old = True, True
            self._half_updated = f"the load of version {version} over version {self.live.version} did not complete"
        copying = asyncio.ensure_future(asyncio.to_thread(self.live.weights.load, named_tensors))
        try:
            await asyncio.shield(copying)
            self._half_updated, self.live.version = None, version
        finally:
            if copying.done():
                self._loading = False
            else:  # the caller was cancelled: no second load while this one still writes the tensors
                copying.add_done_callback(self._abandoned)

    def _abandoned(self, copying: "asyncio.Future[None]") -> None:
        self._loading = False
        if not copying.cancelled() and copying.exception() is not None:
            logger.warning("a load that was cancelled ended with: %s", copying.exception())

    async def digest(self) -> Mapping[str, int]:
        self._raise_if_ended()
        return await asyncio.to_thread(self.live.weights.digests)

    async def resume(self) -> None:
        async with self._between_steps():
            if self._half_updated is not None:
                raise EngineError(f"resume refused: {self._half_updated}; load a whole version first")
            if self._mode == "recompute_kv" and self._kv_is_old:
                started = time.perf_counter()
                await self._in_thread(self.live.recompute)
                self._busy_s += time.perf_counter() - started
            self._kv_is_old, self._mode = False, None

    def stood(self) -> tuple[float, float] | None:
        return None

    def holds(self) -> int | None:
        return None  # pinned weights are a copy, so no update ever waits

    def hold(self, version: int) -> None:
        """Nothing to do: a pin lasts until `unpin`."""

    async def pin(self, version: int) -> None:
        async with self._between_steps():
            if version in self._pins:
                return
            if self._half_updated is not None:
                raise EngineError(f"pin of version {version} refused: {self._half_updated}")
            if version != self.live.version:
                raise EngineError(f"pin of version {version} refused: the live version is {self.live.version}")
            lane = self._lane(await self._in_thread(self.live.weights.copy), version)
            with self._lock:
                self._pins[version] = lane

    async def unpin(self, version: int) -> None:
        async with self._between_steps():
            if (lane := self._pins.get(version)) is None:
                return
            await self._in_thread(lane.abort)
            self._deliver()
            with self._lock:
                del self._pins[version]
                self._unpinned_tokens += lane.generated_tokens

    async def health(self) -> Health:
        with self._lock:
            self._raise_if_ended()
            lanes = self._lanes()
            return Health(
                version=self.live.version,
                running=sum(lane.rows.running for lane in lanes),
                waiting=sum(len(lane.rows.waiting) for lane in lanes),
                generated_tokens=self._unpinned_tokens + sum(lane.generated_tokens for lane in lanes),
                busy_s=self._busy_s,
                memory_bytes=sum(lane.weights.num_bytes + lane.cache.data.nbytes for lane in lanes),
                detail={
                    "pins": float(len(self._pins)),
                    "half_updated": float(self._half_updated is not None),
                    "live_prefilled_prompts": float(self.live.prefilled_prompts),
                },
            )

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S), self._between_steps():
                self._ended = EngineError("the engine is closed")
                for lane in self._lanes():
                    await self._in_thread(lane.abort)
                self._deliver()
        except TimeoutError as late:
            raise EngineError(f"the decode thread did not end within {CLOSE_DEADLINE_S:.0f} s of close()") from late
        except EngineError:
            pass  # it has ended before
        self._thread.shutdown(wait=False)

    def _died(self) -> list["Future[list[Completion]]"]:
        with self._lock:
            requests = [request for request, _ in self._requests.values()]
            self._requests.clear()
        return [request.future for request in requests]

    # ---- decoding --------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._ended is None and self._has_work() and (self._decoding is None or self._decoding.done()):
            self._decoding = asyncio.create_task(self._decode())

    async def _decode(self) -> None:
        """Decode while there is something to; whoever asks gets a turn after the present step."""
        with suppress(EngineError):  # every waiter has it
            while True:
                async with self._turn:
                    if self._ended is not None or not self._has_work():
                        return
                    try:
                        await self._in_thread(self._steps)
                    finally:
                        self._turn.notify_all()

    def _steps(self) -> None:
        """One token of every answer after the other: all lanes advance at the same pace."""
        draining = self._draining()
        while self._has_work():
            started = time.perf_counter()
            for lane in self._moving():
                lane.step(may_admit=self._mode is None or lane is not self.live)
            self._busy_s += time.perf_counter() - started
            self._deliver()
            if self._asking or self._draining() != draining:
                return

    def _lanes(self) -> list[DecodeLane]:
        return [self.live, *self._pins.values()]

    def _draining(self) -> bool:
        return self._mode == "drain" and self.live.rows.running > 0

    def _moving(self) -> list[DecodeLane]:
        """Lanes that may decode."""
        return self._lanes() if self._mode is None or self._draining() else [*self._pins.values()]

    def _has_work(self) -> bool:
        return any(lane.rows.running or lane.rows.waiting for lane in self._moving())

    def _deliver(self) -> None:
        for lane in self._lanes():
            for request in lane.rows.complete:
                with self._lock:
                    del self._requests[request.request_id]
                request.future.set_result(request.completions())
            lane.rows.complete.clear()
