"""The decode thread of the torch engine: its mailbox, its states, and what happens between two decode steps.

consumes     commands and requests, posted from asyncio loops
produces     completions with a logprob and a policy version per token
waits for    a command, when there is nothing to decode
unblocked by a command or `mailbox.close`; when the thread dies, every waiter fails with the cause

Requests, pauses, pins and version changes happen in this thread, between two decode steps. Only the copying of a
load runs elsewhere: it may block on a network, the live lane stands still meanwhile, and pinned evaluations go on.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rollout_server.engines.base import EngineError, Health, Partial, PauseMode
from rollout_server.engines.torch.lane import Lane
from rollout_server.engines.torch.mailbox import Mailbox
from rollout_server.engines.torch.model import TorchModel
from rollout_server.engines.torch.rows import Request
from rollout_server.engines.torch.weights import LiveWeights

logger = logging.getLogger(__name__)


class DecodeLoop:
    """One live lane, one lane per pinned version, one daemon thread that steps them in turn."""

    def __init__(self, weights: LiveWeights, *, max_context: int, max_running: int, num_threads: int) -> None:
        self._max_context = max_context
        self._max_running = max_running
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self.mailbox = Mailbox(self._lock)
        self._model = TorchModel(weights.spec, dtype=weights.dtype, max_context=max_context)
        self.live = self._lane(weights, 0)
        self._pins: dict[int, Lane] = {}
        self._requests: dict[str, tuple[Request, Lane]] = {}
        self._mode: PauseMode | None = None
        self._half_updated: str | None = None
        self._loading = False
        self._kv_is_old = False
        self._drains: list[Future[Any]] = []
        self._busy_s = 0.0
        self._unpinned_tokens = 0
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    def _lane(self, weights: LiveWeights, version: int) -> Lane:
        return Lane(
            self._model,
            weights,
            version,
            max_running=self._max_running,
            max_context=self._max_context,
            lock=self._lock,
        )

    # Any thread.

    def join(self, deadline_s: float) -> bool:
        """Wait for the thread to end after `mailbox.close`; whether it did within `deadline_s`."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def running_tokens(self) -> Mapping[str, int]:
        """Tokens so far by request id; waiting requests are there with 0."""
        with self._lock:
            counts = {
                request_id: sum(len(completion.token_ids) for completion in request.done.values())
                for request_id, (request, _) in self._requests.items()
            }
            for lane in (self.live, *self._pins.values()):
                for request, produced in lane.rows.produced():
                    # After the thread's death its requests are forgotten while their rows are still there.
                    if request.request_id in counts:
                        counts[request.request_id] += produced
        return counts

    def progress(self, request_id: str, since: Sequence[int]) -> list[Partial]:
        """What each answer of a request has, from its token number since[i] on (0 where empty); [] if unknown."""
        with self._lock:
            if request_id not in self._requests:
                return []
            request, lane = self._requests[request_id]
            return lane.rows.progress(request, since or [0] * len(request.keys))

    def health(self) -> Health:
        """Numbers; `running` and `waiting` count answers, live and pinned."""
        with self._lock:
            self.mailbox.raise_if_dead()
            lanes = (self.live, *self._pins.values())
            return Health(
                version=self.live.version,
                running=sum(lane.rows.running for lane in lanes),
                waiting=sum(len(lane.rows.waiting) for lane in lanes),
                generated_tokens=self._unpinned_tokens + sum(lane.generated_tokens for lane in lanes),
                busy_s=self._busy_s,
                memory_bytes=sum(lane.num_bytes for lane in lanes),
                detail={
                    "pins": float(len(self._pins)),
                    "paused": float(self._mode is not None),
                    "half_updated": float(self._half_updated is not None),
                    "live_decode_steps": float(self.live.decode_steps),
                    "live_prefilled_prompts": float(self.live.prefilled_prompts),
                },
            )

    # Handlers: the decode thread, between two steps.

    def enqueue(self, request: Request, pinned: int | None) -> None:
        """Queue a request. Raises EngineError when the pin is not held or the request id is in use."""
        lane = self.live if pinned is None else self._pins.get(pinned)
        if lane is None:
            raise EngineError(f"version {pinned} is not pinned here (pinned: {sorted(self._pins)})")
        with self._lock:
            if request.request_id in self._requests:
                raise EngineError(f"request id {request.request_id!r} is already running")
            self._requests[request.request_id] = (request, lane)
            lane.rows.enqueue(request)
        request.future.add_done_callback(lambda _: self._forget(request))
        if request.complete:
            request.future.set_result(request.completions())

    def _forget(self, request: Request) -> None:
        with self._lock:
            del self._requests[request.request_id]

    def abort(self, request_id: str, request: Request | None = None) -> None:
        """End a request by id (only if it is `request`, where one is given); unknown ones are ignored."""
        held, lane = self._requests.get(request_id, (None, None))
        if held is not None and lane is not None and request in (None, held):
            lane.abort(held)

    def pause(self, mode: PauseMode, future: "Future[Any]") -> None:
        """Stop the live lane; `drain` resolves the future when the last running live answer has ended."""
        if mode != "drain":
            self._fail_drains(f"pause('drain') was overtaken by pause({mode!r})")
        self._mode = mode
        if mode == "drain" and self.live.rows.running:
            self._drains.append(future)
        else:
            future.set_result(None)

    def begin_load(self, version: int) -> None:
        """From here to `end_load` the live tensors belong to the loading thread."""
        if self._loading:
            raise EngineError(f"load of version {version} while another load runs")
        if self._mode is None or (self._mode == "drain" and self.live.rows.running):
            raise EngineError(f"load of version {version} while live requests run; pause first")
        self._loading = True
        self._half_updated = f"the load of version {version} over version {self.live.version} did not complete"

    def end_load(self, version: int, *, complete: bool) -> None:
        """Take the live tensors back; only a complete load makes them serve."""
        self._loading = False
        self._kv_is_old = True
        if complete:
            self._half_updated = None
            self.live.version = version

    def resume(self) -> None:
        """Let live requests go on. Raises EngineError while the engine is half updated."""
        if self._half_updated is not None:
            raise EngineError(f"resume refused: {self._half_updated}; load a whole version first")
        self._fail_drains("pause('drain') was ended by resume()")
        if self._mode == "recompute_kv" and self._kv_is_old:
            started = time.perf_counter()
            self.live.recompute()
            self._busy_s += time.perf_counter() - started
        self._kv_is_old = False
        self._mode = None

    def pin(self, version: int) -> None:
        """Copy the live weights for pinned requests. Raises EngineError when they are not (whole) `version`."""
        if version in self._pins:
            return
        if self._half_updated is not None:
            raise EngineError(f"pin of version {version} refused: {self._half_updated}")
        if version != self.live.version:
            raise EngineError(f"pin of version {version} refused: the live version is {self.live.version}")
        lane = self._lane(self.live.weights.copy(), version)
        with self._lock:
            self._pins[version] = lane

    def unpin(self, version: int) -> None:
        """Drop a pin; what still runs on it comes back as `abort`."""
        lane = self._pins.get(version)
        if lane is None:
            return
        lane.abort()
        with self._lock:
            del self._pins[version]
            self._unpinned_tokens += lane.generated_tokens

    # The thread.

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                while not self.mailbox.closed:
                    self.mailbox.serve(self._has_work)
                    self._step()
                    self.mailbox.deliver()
                # What was posted before the close still gets its answer; nothing can be posted after it.
                self.mailbox.serve(self._has_work)
                self._end()
        except BaseException as error:
            logger.exception("the decode thread of the torch engine died")
            self.mailbox.die(error)

    def _live_may_step(self) -> bool:
        return self._mode is None or (self._mode == "drain" and self.live.rows.running > 0)

    def _has_work(self) -> bool:
        live = self.live.rows
        if self._live_may_step() and (live.running or live.waiting):
            return True
        return any(lane.rows.running or lane.rows.waiting for lane in self._pins.values())

    def _step(self) -> None:
        """One decode step of every lane that may: live and pinned requests advance at the same pace."""
        started = time.perf_counter()
        if self._live_may_step():
            self.live.step(may_admit=self._mode is None)
        for lane in self._pins.values():
            lane.step(may_admit=True)
        self._busy_s += time.perf_counter() - started
        if self._drains and not self.live.rows.running:
            for future in self._drains:
                future.set_result(None)
            self._drains.clear()

    def _fail_drains(self, reason: str) -> None:
        for future in self._drains:
            future.set_exception(EngineError(reason))
        self._drains.clear()

    def _end(self) -> None:
        for lane in (self.live, *self._pins.values()):
            lane.abort()
        self._fail_drains("pause('drain') was ended by close()")
        self.mailbox.deliver()
