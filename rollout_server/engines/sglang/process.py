"""SGLang's process tree: start, calls to its tokenizer manager, watching the children.

What SGLang's `Engine` offers for pauses and updates is blocking or absent, so its tokenizer manager, which is asyncio
and lives on our loop, is called directly; every call has a deadline.
"""

import asyncio
import dataclasses
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from configs.schema import Config
from rollout_server.engines.base import EngineDead, EngineError, EngineSilent, Pictures, Sampling
from rollout_server.engines.sglang.arguments import LOADER, server_arguments
from rollout_server.engines.sglang.children_log import ChildrenLog, start_failure
from rollout_server.engines.sglang.cpu import CPU_SWITCH, give_cores, prepare_cpu
from rollout_server.engines.sglang.requests import SCORED_AT, AnswerPart
from slipstream.families.pictures import PictureError, Vision, vision_of
from slipstream.runtime.fingerprint import read_json
from slipstream.runtime.hang import expired
from slipstream.runtime.progress import Progress

log = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_DEADLINE_S = 75.0
"""More than SGLang's own 60 s."""
LOOK_S = 0.02
DEATH_LOOK_S = 1.0


def _ignore_sigquit(_number: int, _frame: object) -> None:
    """Replaces SGLang's handler, which kills this process silently when a child fails."""


if multiprocessing.current_process().name != "MainProcess":
    # In a scheduler, which imports this module for `run_scheduler` before anything of SGLang looks for a GPU: load
    # CUDA kernels at the start. Loading one at its first launch waits for all that runs on the device: a prefill waited
    # 14 s beside a hung broadcast (H200, SGLang 0.5.15, which asks for lazy loading in the parent process); with this
    # no request took 5 s (tests/gpu/test_sglang_bus_cuda.py).
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"


def _host_memory(dims: tuple[int, ...], dtype: torch.dtype, **_: object) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


def run_scheduler(*arguments: Any, **options: Any) -> Any:
    """SGLang's scheduler, started by a module that has set its environment."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    from rollout_server.engines.sglang.update import armed

    run_event_loop = Scheduler.run_event_loop

    def run_known(scheduler: Any) -> None:
        armed.scheduler = scheduler
        run_event_loop(scheduler)

    Scheduler.run_event_loop = run_known
    armed.watch(Scheduler)
    if (temperature := float(os.environ.get(SCORED_AT, "1"))) != 1:
        _divide_logits(temperature)
    if os.environ.get(CPU_SWITCH) == "1":  # 0.5.20 registers the memory of routed experts with CUDA there too
        from sglang.srt.mem_cache.pool_host import common
        from sglang.srt.state_capturer import base

        base.ALLOC_MEMORY_FUNCS = {**common.ALLOC_MEMORY_FUNCS, "cpu": _host_memory}
    return run_scheduler_process(*arguments, **options)


def _divide_logits(temperature: float) -> None:
    """Take all logprobs at a temperature: those of prompts know none (0.5.20). For schedulers of a teacher alone."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    logits_of = LogitsProcessor._get_logits

    def divided(*arguments: Any, **options: Any) -> torch.Tensor:
        logits: torch.Tensor = logits_of(*arguments, **options).float()
        return logits.div_(temperature)

    LogitsProcessor._get_logits = divided


def _engine_class() -> Any:
    """SGLang's engine, whose schedulers start by `run_scheduler`."""
    from sglang.srt.entrypoints.engine import Engine

    return type("Engine", (Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)})


def image_data(pictures: Pictures, vision: Vision, token_ids: list[int], new_tokens: int) -> dict[str, Any]:
    """Pictures as SGLang takes them from a processor: our pixels, places and positions, as the learner has them.

    SGLang would look for tokens of pictures in all that it is given, and finds those that a policy has sampled there.
    Its positions end with the request's tokens, and one that it retracts for want of memory comes back with more: so
    they go on to the last token that it may have. Raises PictureError: the tokens are not those of these pictures.
    """
    ids = np.array(token_ids, np.int32)
    positions = vision.positions(ids, pictures.grids, total := ids.size + new_tokens)
    return {
        "format": "processor_output",
        "pixel_values": torch.from_numpy(pictures.pixels),
        "image_grid_thw": torch.tensor(pictures.grids, dtype=torch.int64),
        "offsets": vision.spans(ids, pictures.grids),
        "mrope_positions": torch.from_numpy(positions),
        "mrope_position_delta": torch.tensor([[int(positions[0, -1]) + 1 - total]]),
    }


class SGLangProcess:
    """One SGLang with its schedulers. The constructor blocks the event loop until it serves.

    Raises EngineError where SGLang is not installed or cannot do what is configured, EngineStartFailed where it did not
    start.
    """

    def __init__(self, config: Config) -> None:
        self.deadline_s = config.rollout.engine_deadline_s
        self.num_ranks = config.placement.tensor_parallel
        self.scored_at = float(os.environ.get(SCORED_AT, "1"))
        """Temperature of the logprobs of prompts."""
        device = config.placement.device
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if not cuda:
            prepare_cpu()
            give_cores(self.num_ranks, config.rollout.num_threads)
        logging.getLogger("sglang").setLevel(logging.WARNING)  # at INFO it logs its arguments, keys included
        try:
            import sglang
            from sglang.srt.managers import io_struct
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise EngineError(
                f"rollout.engine: 'sglang' cannot be imported ({error}); install it with scripts/install.sh"
                f" --venv .venv {'sglang' if cuda else 'sglang-cpu'}, or take rollout.engine: torch"
            ) from error
        fields = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in dataclasses.fields(ServerArgs)]
        arguments = server_arguments(config, known=fields, cuda=cuda)
        if "custom_sigquit_handler" in fields:
            arguments["custom_sigquit_handler"] = _ignore_sigquit
        self.late_tokens = 0 if arguments.get("disable_overlap_schedule") else 1
        """Tokens of a forward that was in flight when an update came, booked after it."""
        self._requests = io_struct
        self._failure, self.loads = "", 0
        self._watching: asyncio.Task[None] | None = None
        self._pictures: tuple[Pictures, list[int], int, dict[str, Any]] | None = None
        """The last ones that were sent: pictures, tokens and new tokens, and what SGLang got for them."""
        self._vision = vision_of(read_json(Path(config.model.path) / "config.json"))
        before = {child.pid for child in multiprocessing.active_children()}
        root, children_log = logging.getLogger(), ChildrenLog()
        handlers, level = root.handlers[:], root.level
        try:
            with Progress("starting SGLang, which loads weights, captures CUDA graphs and compiles kernels"):
                self._engine = _engine_class()(**arguments)
        except (RuntimeError, OSError, EOFError) as error:
            raise start_failure(sglang.__version__, str(error), children_log.last_error()) from error
        except (ValueError, TypeError, AssertionError) as error:
            raise EngineError(f"SGLang {sglang.__version__} refuses its arguments: {error}") from error
        finally:
            # SGLang sets up the root logger for itself; the launcher reads our form of an error line
            root.handlers[:] = handlers
            root.setLevel(level)
        self._children = [child for child in multiprocessing.active_children() if child.pid not in before]
        self._log = ChildrenLog()
        self._manager = self._engine.tokenizer_manager
        self._manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGQUIT, self._on_sigquit)
        self.vocab_size = int(self._manager.model_config.vocab_size)
        # an empty list: what an update carries stands in the staging folder
        self._no_tensors = [sglang.srt.utils.MultiprocessingSerializer.serialize([]) for _ in range(self.num_ranks)]
        log.info("SGLang %s serves with %d scheduler(s)", sglang.__version__, self.num_ranks)

    def pids(self) -> list[int]:
        """Process ids of SGLang's children."""
        return [child.pid for child in self._children if child.pid is not None]

    def check_alive(self) -> None:
        """Raise EngineError when a child of SGLang has died, with what is known of it."""
        dead = [child for child in self._children if not child.is_alive()]
        ended = ", ".join(f"{child.name} (pid {child.pid}) ended with {child.exitcode}" for child in dead)
        # a child that a signal has ended logs no cause; one that fails by itself logs it, and sends SIGQUIT
        reason = ended if any((child.exitcode or 0) < 0 for child in dead) else self._failure or ended
        if reason:
            raise EngineDead(f"SGLang is dead: {reason} [closed]")

    async def death(self) -> None:
        """Raise EngineError when SGLang has died; never ends otherwise. All that wait share one look a second."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
            self._watching.add_done_callback(lambda watch: watch.cancelled() or watch.exception())
        await asyncio.shield(self._watching)

    async def _watch(self) -> None:
        while True:
            self.check_alive()
            await asyncio.sleep(DEATH_LOOK_S)

    async def until(
        self, done: Callable[[], bool], limit_s: float, what: str, key: str, look_s: float = LOOK_S
    ) -> None:
        """Wait until `done()`. Raises EngineError: SGLang is dead, or an update waited `limit_s` (`key`) for `what`."""
        started = time.monotonic()
        while not done():
            waited = time.monotonic() - started
            if waited > limit_s:
                said = expired(what, owed_by=("SGLang",), waited_s=waited, key=key, ends=False)
                raise EngineError(f"an update waited {waited:.0f} s for {what} ({key}){said} [slow]")
            self.check_alive()
            await asyncio.sleep(look_s)

    def fail(self, reason: str, waited_s: float) -> EngineError:
        """Take the engine for dead, after a wait that was too long; the error to raise."""
        key = "rollout.engine_deadline_s"
        reason += f" ({key}){expired(reason, owed_by=('SGLang',), waited_s=waited_s, key=key)} [silent]"
        self._failure = self._failure or reason
        return EngineSilent(f"SGLang is dead: {reason}")

    async def generate(
        self,
        part: AnswerPart,
        token_ids: list[int],
        sampling: Sampling,
        new_tokens: int,
        pictures: Pictures | None = None,
        routed: bool = False,
    ) -> AsyncIterator[dict[str, Any]]:
        """Outputs of one request, cumulative; the last `routed`, if asked. Raises EngineError if SGLang refuses it."""
        shown = None if pictures is None else [self._image_data(pictures, token_ids, new_tokens)]
        request = self._requests.GenerateReqInput(
            input_ids=token_ids,
            sampling_params=self.sampling_parameters(part, sampling, new_tokens),
            rid=part.rid,
            return_logprob=True,
            logprob_start_len=-1,
            stream=True,
            # Namespace of the prefix cache, one for each load of weights: a version alone does not name them, for after
            # a learner's restart the versions past its checkpoint are made again.
            extra_key=f"w{part.version}.{self.loads}",
            image_data=shown,
            **({"return_routed_experts": True} if routed else {}),
        )
        try:
            async for output in self._manager.generate_request(request, None):
                yield output
        except ValueError as error:
            raise EngineError(f"SGLang refuses a request of {len(token_ids)} tokens: {error}") from error

    async def score(self, ids: list[int], first: int, top: int, namespace: int) -> dict[str, Any]:
        """SGLang's words on a prompt, from token `first` on, as `generate`. Raises EngineError: SGLang refuses it."""
        request = self._requests.GenerateReqInput(
            input_ids=ids,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=first - 1,
            top_logprobs_num=top,
            extra_key=f"w{namespace}.{self.loads}",
        )
        try:
            async for output in self._manager.generate_request(request, None):
                meta: dict[str, Any] = output["meta_info"]
        except ValueError as error:
            raise EngineError(f"SGLang refuses to score {len(ids)} tokens: {error}") from error
        return meta

    def _image_data(self, pictures: Pictures, token_ids: list[int], new_tokens: int) -> dict[str, Any]:
        """As `image_data`; made once for the answers of a group, which are asked for one after the other."""
        if self._vision is None:
            raise EngineError("a prompt with pictures, and the model takes none")
        last = self._pictures
        if last is None or last[0] is not pictures or last[1:3] != (token_ids, new_tokens):
            try:
                made = image_data(pictures, self._vision, token_ids, new_tokens)
            except PictureError as error:
                raise EngineError(str(error)) from error
            last = self._pictures = (pictures, token_ids, new_tokens, made)
        return dict(last[3])

    def sampling_parameters(self, _part: AnswerPart, sampling: Sampling, new_tokens: int) -> dict[str, Any]:
        """SGLang's sampling parameters of one request."""
        return {
            "max_new_tokens": new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,
            "skip_special_tokens": False,
        }

    def abort(self, rid: str) -> None:
        """End a request; it comes back with what it has. Unknown ones are ignored.

        So is one that SGLang still prepares, as it does with pictures: ask again. Its manager sends the schedulers an
        abort once (0.5.20), and those that do not know the request yet forget it.
        """
        if getattr(self._manager.rid_to_state.get(rid), "dispatched", True):
            self._manager.abort_request(rid)

    async def resume(self) -> None:
        """Go on after a load that the schedulers have not found proven."""
        request = self._requests.ContinueGenerationReqInput(torch_empty_cache=False)
        await self._within(self._manager.continue_generation(request), "resume")

    async def run_loader(self, version: int | None) -> None:
        """Run our loader in every scheduler, between the same two forwards; `version` labels tokens from now on.

        The order goes past the manager's own method, which waits for running requests to end: schedulers look for
        orders once an iteration, and rank 0 broadcasts what it has found.

        The cache is not flushed: a flush with requests in flight fails, and inside an update its failure would end the
        scheduler. Namespaces of the prefix cache make it unnecessary.

        Raises EngineError where SGLang refuses, or does not answer; then it is taken for dead.
        """
        self.loads += version is not None
        order = self._requests.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self._no_tensors,
            load_format=LOADER,
            flush_cache=False,
            weight_version=None if version is None else str(version),
        )
        for answer in await self._within(self._manager.update_weights_from_tensor_communicator(order), "an update"):
            if not answer.success:
                raise EngineError(f"SGLang refuses an update: {answer.message}")

    async def close(self) -> None:
        """End SGLang's children."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.to_thread(self._engine.shutdown)
        except TimeoutError as error:
            raise EngineError(f"SGLang did not end within {CLOSE_DEADLINE_S:g} s: pids {self.pids()}") from error
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)

    async def _within(self, call: Awaitable[T], what: str) -> T:
        """Await a call for at most the deadline, and no longer than SGLang lives."""
        task = asyncio.ensure_future(call)
        until = time.monotonic() + self.deadline_s
        try:
            while True:
                self.check_alive()  # first: what only sends an order succeeds also where its receiver has just died
                if (left := until - time.monotonic()) <= 0:
                    break
                done, _ = await asyncio.wait({task}, timeout=min(DEATH_LOOK_S, left))
                if done:
                    return task.result()
        finally:
            task.cancel()
        raise self.fail(f"it did not answer '{what}' within {self.deadline_s:g} s", self.deadline_s)

    def _on_sigquit(self) -> None:
        """A child sends the signal right after it has logged why it fails."""
        said = f"a child of it failed and sent SIGQUIT to pid {os.getpid()}"
        self._failure = self._failure or self._log.caused(said)
