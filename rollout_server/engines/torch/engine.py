"""The embedded `torch` engine: continuous batching on a CPU, for small models.

Requests, pauses, pins and version changes happen in its decode thread, between two steps; when that dies, every waiter
fails with the cause. Only the copying of a load runs elsewhere: it may block on a network, the live lane stands still
meanwhile, and pinned evaluations go on.
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
from typing import Any

import numpy as np
import torch

from configs.learner import Lora
from rollout_server.engines.base import Completion, EngineError, Health, Partial, PauseMode, Pictures, Sampling
from rollout_server.engines.prefixes import check_request, settled
from rollout_server.engines.torch.family import read_spec
from rollout_server.engines.torch.lane import Lane
from rollout_server.engines.torch.mailbox import Mailbox
from rollout_server.engines.torch.model import TorchModel
from rollout_server.engines.torch.rows import Request
from rollout_server.engines.torch.sampling import stream_key
from rollout_server.engines.torch.viewer import Viewer
from rollout_server.engines.torch.weights import LiveWeights, read_folder
from slipstream.families.pictures import TOWER

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE_DEADLINE_S = 30.0


class TorchEngine:
    """Implements `Engine`, whose docstrings hold here: one live lane, and one for each pinned version.

    Args:
        folder: a Hugging Face folder of the Qwen2, Qwen3, Llama or Qwen2-VL family, with config.json and
            safetensors; version 0.
        max_context: most tokens of prompt plus answer.
        max_running: answers decoded at once (per set of weights: live, and each pin).
        dtype: "float32" or "bfloat16"; the weights of the folder are cast to it.
        num_threads: intra-op threads; torch keeps one number per process.
        seed: mixed into every request's seed.
        lora: adapters, zero at first, that updates carry; the weights of the folder stay then.

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
    ) -> None:
        if dtype not in DTYPES:
            raise EngineError(
                f"rollout.dtype {dtype!r} is not served by the torch engine; take one of {sorted(DTYPES)}"
            )
        torch.set_num_threads(num_threads)
        folder = Path(folder)
        self._spec = read_spec(folder, max_context)
        weights = LiveWeights(self._spec, DTYPES[dtype], lora)
        try:
            skip = TOWER if self._spec.vision is not None else ""
            weights.fill(read_folder(folder, tied=self._spec.tied, dtype=DTYPES[dtype], skip=skip))
        except EngineError as error:
            raise EngineError(f"{folder}: {error}") from error
        self._vision = None if self._spec.vision is None else Viewer(folder, self._spec.vision, DTYPES[dtype])
        self._max_context, self._num_threads, self._seed = max_context, num_threads, seed
        self._lock = threading.Lock()
        """Held while rows or the tables below change, and while another thread reads them."""
        self._mailbox = Mailbox(self._lock)
        self._lane = partial(
            Lane,
            TorchModel(self._spec, dtype=weights.dtype, max_context=max_context),
            max_running=max_running,
            max_context=max_context,
            lock=self._lock,
        )
        self.live = self._lane(weights, 0)
        self._pins: dict[int, Lane] = {}
        self._requests: dict[str, tuple[Request, Lane]] = {}
        self._mode: PauseMode | None = None
        self._half_updated: str | None = None
        self._loading, self._kv_is_old = False, False
        self._drains: list[Future[Any]] = []
        self._busy_s, self._unpinned_tokens = 0.0, 0
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # ---- any thread ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self.live.version

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
        try:
            answers: list[Completion] = await self._mailbox.ask(partial(self._enqueue, request, pinned), request.future)
        except asyncio.CancelledError:
            self._post_unwatched(partial(self._abort, request_id, request))
            raise
        return answers

    async def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`, of live requests; `resume`, `close` or another pause end a drain."""
        stands: Future[None] = Future()
        await self._mailbox.ask(partial(self._pause, mode, stands), stands)

    async def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """As `Engine.load`. A worker thread consumes the iterable; what it raises is raised here."""
        await self._mailbox.ask(partial(self._begin_load, version))
        copying = asyncio.ensure_future(asyncio.to_thread(self.live.weights.load, named_tensors))
        try:
            # A cancelled caller must not free the tensors for a second load while the first still writes them.
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(partial(self._abandon_load, version))
            raise
        except BaseException:
            await self._mailbox.ask(partial(self._end_load, None))
            raise
        await self._mailbox.ask(partial(self._end_load, version))

    def _abandon_load(self, version: int, copying: "asyncio.Future[None]") -> None:
        if not copying.cancelled() and copying.exception() is not None:
            logger.warning("cancelled load of version %d ended with: %s", version, copying.exception())
        self._post_unwatched(partial(self._end_load, None))

    async def digest(self) -> Mapping[str, int]:
        self._mailbox.raise_if_dead()
        return await asyncio.to_thread(self.live.weights.digests)

    async def resume(self) -> None:
        await self._mailbox.ask(self._resume)

    def holds(self) -> int | None:
        return None  # pinned weights are a copy, so no update ever waits

    def hold(self, version: int) -> None:
        """Nothing to do: a pin lasts until `unpin`."""

    async def pin(self, version: int) -> None:
        await self._mailbox.ask(partial(self._pin, version))

    async def unpin(self, version: int) -> None:
        await self._mailbox.ask(partial(self._unpin, version))

    def abort(self, request_id: str) -> None:
        self._post_unwatched(partial(self._abort, request_id))

    def _post_unwatched(self, action: "partial[None]") -> None:
        with suppress(EngineError):  # to an engine that has ended it means nothing
            self._mailbox.post(action)

    def running_tokens(self) -> Mapping[str, int]:
        with self._lock:
            counts = {
                name: sum(answer.token_ids.size for answer in request.done.values())
                for name, (request, _) in self._requests.items()
            }
            for lane in (self.live, *self._pins.values()):
                for request, produced in lane.rows.produced():
                    # After the thread's death its requests are forgotten while their rows are still there.
                    if request.request_id in counts:
                        counts[request.request_id] += produced
        return counts

    def waiting(self) -> set[str]:
        with self._lock:
            tables = [lane.rows for lane in (self.live, *self._pins.values())]
            running = {answer.request.request_id for rows in tables for answer in rows.answers}
            return {answer.request.request_id for rows in tables for answer in rows.waiting} - running

    def progress(self, request_id: str, since: Sequence[int] = ()) -> list[Partial]:
        with self._lock:
            if request_id not in self._requests:
                return []
            request, lane = self._requests[request_id]
            return lane.rows.progress(request, since or [0] * len(request.keys))

    async def health(self) -> Health:
        with self._lock:
            self._mailbox.raise_if_dead()
            lanes = (self.live, *self._pins.values())
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
        self._mailbox.close()
        await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise EngineError(f"the decode thread did not end within {CLOSE_DEADLINE_S:.0f} s of close()")

    # ---- the decode thread, between two steps ----------------------------------------------------------

    def _enqueue(self, request: Request, pinned: int | None) -> None:
        lane = self.live if pinned is None else self._pins.get(pinned)
        if lane is None:
            raise EngineError(f"version {pinned} is not pinned here (pinned: {sorted(self._pins)})")
        with self._lock:
            if request.request_id in self._requests:
                raise EngineError(f"request id {request.request_id!r} is already running")
            self._requests[request.request_id] = (request, lane)
            lane.rows.enqueue(request)

    def _abort(self, request_id: str, only: Request | None = None) -> None:
        """End a request; with `only`, that one and no later one of its name."""
        held, lane = self._requests.get(request_id, (None, None))
        if held is not None and lane is not None and only in (None, held):
            lane.abort(held)
            self._deliver()  # its name is free at once, for a caller that tries again

    def _draining(self) -> bool:
        return self._mode == "drain" and self.live.rows.running > 0

    def _pause(self, mode: PauseMode, stands: "Future[None]") -> None:
        if mode != "drain":
            self._end_drains(f"pause('drain') was overtaken by pause({mode!r})")
        self._mode = mode
        if self._draining():
            self._drains.append(stands)
        else:
            stands.set_result(None)

    def _end_drains(self, failure: str = "") -> None:
        for future in self._drains:
            if failure:
                future.set_exception(EngineError(failure))
            else:
                future.set_result(None)
        self._drains.clear()

    def _begin_load(self, version: int) -> None:
        """From here to `_end_load` the live tensors belong to the loading thread."""
        if self._loading:
            raise EngineError(f"load of version {version} while another load runs")
        if self._mode is None or self._draining():
            raise EngineError(f"load of version {version} while live requests run; pause first")
        self._loading = True
        self._half_updated = f"the load of version {version} over version {self.live.version} did not complete"

    def _end_load(self, version: int | None) -> None:
        """Take the live tensors back; they serve where they are a `version`, whole."""
        self._loading = False
        self._kv_is_old = True
        if version is not None:
            self._half_updated = None
            self.live.version = version

    def _resume(self) -> None:
        if self._half_updated is not None:
            raise EngineError(f"resume refused: {self._half_updated}; load a whole version first")
        self._end_drains("pause('drain') was ended by resume()")
        if self._mode == "recompute_kv" and self._kv_is_old:
            started = time.perf_counter()
            self.live.recompute()
            self._busy_s += time.perf_counter() - started
        self._kv_is_old = False
        self._mode = None

    def _pin(self, version: int) -> None:
        if version in self._pins:
            return
        if self._half_updated is not None:
            raise EngineError(f"pin of version {version} refused: {self._half_updated}")
        if version != self.live.version:
            raise EngineError(f"pin of version {version} refused: the live version is {self.live.version}")
        lane = self._lane(self.live.weights.copy(), version)
        with self._lock:
            self._pins[version] = lane

    def _unpin(self, version: int) -> None:
        lane = self._pins.get(version)
        if lane is None:
            return
        lane.abort()
        self._deliver()
        with self._lock:
            del self._pins[version]
            self._unpinned_tokens += lane.generated_tokens

    # ---- the decode thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self._mailbox.closed:
                    self._mailbox.serve(self._has_work)
                    self._step()
                    self._deliver()
                # What was posted before the close still gets its answer; nothing can be posted after it.
                self._mailbox.serve(self._has_work)
                for lane in (self.live, *self._pins.values()):
                    lane.abort()
                self._end_drains("pause('drain') was ended by close()")
                self._deliver()
        except BaseException as error:
            logger.exception("the decode thread of the torch engine died")
            with self._lock:
                self._requests.clear()
            self._mailbox.die(error)

    def _live_may_step(self) -> bool:
        return self._mode is None or self._draining()

    def _has_work(self) -> bool:
        live = [self.live] if self._live_may_step() else []
        return any(lane.rows.running or lane.rows.waiting for lane in (*live, *self._pins.values()))

    def _step(self) -> None:
        """One decode step of every lane that may: all advance at the same pace."""
        started = time.perf_counter()
        if self._live_may_step():
            self.live.step(may_admit=self._mode is None)
        for lane in self._pins.values():
            lane.step(may_admit=True)
        self._busy_s += time.perf_counter() - started
        if not self.live.rows.running:
            self._end_drains()

    def _deliver(self) -> None:
        for lane in (self.live, *self._pins.values()):
            for request in lane.rows.complete:
                with self._lock:
                    del self._requests[request.request_id]
                request.future.set_result(request.completions())
            lane.rows.complete.clear()
