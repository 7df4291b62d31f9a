"""`python -m scripts.bench.server --median 512 --sigma 0.7 ...`: a rollout server whose answers have forced lengths.

Lengths are lognormal and follow from the lease's seed; no token stops an answer. In SGLang one request at a time is a
probe: it reports every token, and the gaps between its tokens say what an update costs running requests.
"""

import argparse
import asyncio
import math
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from configs.schema import Config
from replay import messages as m
from replay.data import stream_seed
from rollout_server import main as rollout_server
from rollout_server.engines import BUILDERS, Completion, EngineError, Health, Partial, Sampling, build_engine
from rollout_server.engines.sglang.engine import SGLangEngine
from rollout_server.engines.sglang.process import SGLangProcess
from rollout_server.engines.sglang.requests import AnswerPart
from rollout_server.generate import Generator, shown
from rollout_server.progress import prefixes_of
from rollout_server.tasks.pictures import Prompt
from scripts.bench.core import quantile

PART = "#"  # between a lease's request id and the answer's number: here each answer is a request of its own
KEPT = 4096


def forced_length(seed: int, index: int, *, median: int, sigma: float, limit: int) -> int:
    """Length in tokens of answer `index` of the lease with this seed: lognormal, in [1, limit].

    Example: median 512, sigma 0.7 and limit 2048 give lengths of mean 638; 2.4 % of them are cut at 2048.
    """
    drawn = float(np.random.default_rng([seed, index]).lognormal(math.log(median), sigma))
    return max(1, min(limit, round(drawn)))


@dataclass(frozen=True)
class ForcedLengths(Generator):
    """Samples each answer of a lease as a request of its own, with the length that its seed gives it."""

    median: int = 512
    sigma: float = 0.7
    _ended: dict[str, Completion] = field(default_factory=dict)
    """By request, while others of the lease run: the engine has forgotten them by then."""

    async def sample(self, prompt: Prompt, lease: m.Lease, request_id: str) -> list[Completion]:
        names = self._names(request_id)
        prefixes = prefixes_of(lease, len(names))
        limit = self.config.rollout.max_new_tokens

        async def run(index: int, name: str) -> Completion:
            given = [prefixes[index]] if prefixes is not None else None
            length = forced_length(lease.seed, index, median=self.median, sigma=self.sigma, limit=limit)
            sampling = self.sampling(stream_seed(lease.seed, index, 0))
            sampling = replace(sampling, max_new_tokens=length, stop_token_ids=())
            ids, rest = prompt.token_ids, shown(prompt)
            (found,) = await self.engine.generate(ids, sampling, 1, request_id=name, prefixes=given, **rest)
            self._ended[name] = found
            return found

        try:
            return await asyncio.gather(*(run(index, name) for index, name in enumerate(names)))
        except EngineError:
            self.abort(request_id)  # or the others of the lease would run on
            raise
        finally:
            for name in names:
                self._ended.pop(name, None)

    def _names(self, request_id: str) -> list[str]:
        return [f"{request_id}{PART}{index}" for index in range(self.config.rollout.group_size)]

    def abort(self, request_id: str) -> None:
        for name in self._names(request_id):
            self.engine.abort(name)

    def running_tokens(self) -> Mapping[str, int]:
        """Tokens of answers that have ended no longer count."""
        counts: Counter[str] = Counter()
        for name, tokens in self.engine.running_tokens().items():
            counts[name.partition(PART)[0]] += tokens
        return counts

    def progress(self, request_id: str, since: Sequence[int]) -> Sequence[Partial]:
        if request_id in self._sampled:
            return super().progress(request_id, since)
        found: list[Partial] = []
        for name, first in zip(self._names(request_id), since, strict=True):
            if name in self._ended:
                found.append(Partial.of(self._ended[name]).since(first))
            else:
                found += self.engine.progress(name, [first]) or [Partial()]
        return found


class TokenGaps:
    """Gaps between two tokens of the probe; those that an update fell into stand apart."""

    def __init__(self) -> None:
        self.probe, self._until = "", 0.0
        self._last: float | None = None
        self._gaps, self._pauses = deque[tuple[float, float]](maxlen=KEPT), deque[float](maxlen=KEPT)

    def watch(self, probe: str) -> None:
        """From now on the probe is this request, or none."""
        self.probe, self._last = probe, None

    def token(self, now: float) -> None:
        if self._last is not None and self._last <= self._until:
            self._pauses.append(now - self._last)
        elif self._last is not None:
            self._gaps.append((self._last, now))
        self._until, self._last = 0.0, now

    def went_on(self, at: float) -> None:
        """The engine stood still for an update until then: the gap around that, or the next one, holds it."""
        for gap in [gap for gap in self._gaps if gap[0] <= at <= gap[1]]:
            self._gaps.remove(gap)
            self._pauses.append(gap[1] - gap[0])
        self._until = at

    def detail(self) -> dict[str, float]:
        """Milliseconds: the median gap, and gaps over an update less that."""
        median = quantile([end - begin for begin, end in self._gaps], 0.5)
        pauses = [max(0.0, gap - median) for gap in self._pauses]
        found = {"token_gap_ms_p50": median, "pause_ms_max": max(pauses, default=0.0)}
        found |= {f"pause_ms_p{percent}": quantile(pauses, percent / 100) for percent in (50, 99)}
        found["pause_ms_last"] = pauses[-1] if pauses else 0.0
        return {name: 1e3 * seconds for name, seconds in found.items()} | {"pause_samples": float(len(pauses))}


class ProbedProcess(SGLangProcess):
    """SGLang with one request at a time that reports every token; the others report every so many."""

    def __init__(self, config: Config) -> None:
        self.gaps = TokenGaps()
        super().__init__(config)

    def sampling_parameters(self, part: AnswerPart, sampling: Sampling, new_tokens: int) -> dict[str, Any]:
        interval = {"stream_interval": 1} if self.gaps.probe == part.rid else {}
        return super().sampling_parameters(part, sampling, new_tokens) | interval

    async def generate(self, part: AnswerPart, *given: Any, **others: Any) -> AsyncIterator[dict[str, Any]]:
        if not self.gaps.probe:
            self.gaps.watch(part.rid)
        found, outputs = super().generate(part, *given, **others), asyncio.Queue[dict[str, Any] | None]()

        async def note() -> None:
            """Also while the engine shows nothing."""
            try:
                async for output in found:
                    if self.gaps.probe == part.rid:
                        self.gaps.token(time.monotonic())
                    outputs.put_nowait(output)
            finally:
                outputs.put_nowait(None)

        noting = asyncio.create_task(note())
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await noting
        finally:
            noting.cancel()
            if self.gaps.probe == part.rid:
                self.gaps.watch("")


class ProbedEngine(SGLangEngine):
    """SGLang whose health has what updates cost the probe."""

    sglang: ProbedProcess

    def __init__(self, config: Config) -> None:
        super().__init__(config, ProbedProcess)

    async def resume(self) -> None:
        updated = self._paused
        await super().resume()
        if updated:
            stood = self.stood()
            self.sglang.gaps.went_on(stood[1] if stood else time.monotonic())

    async def health(self) -> Health:
        found = await super().health()
        return replace(found, detail={**found.detail, **self.sglang.gaps.detail()})


make_engine = partial(build_engine, builders={**BUILDERS, "sglang": ProbedEngine})
"""The configuration's engine, probed where it is SGLang."""


def main() -> int:
    """Entry point; all other arguments are those of rollout_server.main."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.server", add_help=False, allow_abbrev=False)
    parser.add_argument("--median", type=int, required=True, help="of the lengths, in tokens")
    parser.add_argument("--sigma", type=float, required=True, help="of their logarithm")
    args, others = parser.parse_known_args()
    generator = partial(ForcedLengths, median=args.median, sigma=args.sigma)
    return rollout_server.main(others, rollout_server.Parts(make_engine, generator))


if __name__ == "__main__":
    sys.exit(main())
