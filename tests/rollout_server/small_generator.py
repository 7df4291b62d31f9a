"""A generator on a small model in the torch engine, with its tokenizer and rewards."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from configs import Config
from replay import messages as m
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.episodes import EpisodeGenerator
from rollout_server.generate import Generator
from rollout_server.tasks.environments.pool import environments_of
from rollout_server.tasks.rewards import RewardOutcome, Sample
from rollout_server.tasks.rewards.pool import RewardPool
from rollout_server.tasks.task import Task
from scripts.bench.server import ForcedLengths

PROMPT = {"prompt": "w5 w9 w300", "ground_truth": "", "data_source": "bench", "extra_info": {}, "columns": {}}
PROMPT_TOKENS = 8


def evaluation_lease(max_new_tokens: int, **fields: Any) -> m.EvaluationLease:
    """Two greedy answers to PROMPT by version 0, or what `fields` say."""
    values = {"version": 0, "set": "", "greedy": True, "first": 0, "samples": 2, "seed": 1, "temperature": 1.0}
    return m.EvaluationLease(**values | {"max_new_tokens": max_new_tokens, "prompts": [PROMPT]} | fields)


def config_of(folder: Path, group: int, cap: int, **replay: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": "none.jsonl", "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {"group_size": group, "max_new_tokens": cap},
            "replay": replay,
            "network": {"heartbeat_s": 0.01},
        }
    )


class LengthJudge:
    """In place of reward processes: an answer's reward is its length."""

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        return [RewardOutcome(score=float(sample["num_tokens"]), seconds=0.0) for sample in samples]


def lease_of(row: dict[str, Any], index: int = 1) -> m.Lease:
    return m.Lease(pass_=0, index=index, attempt=1, min_version=0, lease_s=60.0, seed=index, prompt=row)


@asynccontextmanager
async def episodes_of(config: Config, kind: type[TorchEngine] = TorchEngine) -> AsyncIterator[EpisodeGenerator]:
    """Episodes of config.environment over a torch engine; answers are judged by their length."""
    engine = kind(config.model.path, max_context=config.max_context, max_running=16, seed=1)
    try:
        async with environments_of(config.environment, frozenset({"JUDGE_WORD"})) as environments:
            assert environments is not None
            yield EpisodeGenerator(config, engine, Task(config), LengthJudge(), environments=environments)  # type: ignore[arg-type]
    finally:
        await engine.close()


@asynccontextmanager
async def generating(config: Config, median: int = 0) -> AsyncIterator[Generator]:
    """With a median, answers have forced lengths."""
    engine = TorchEngine(config.model.path, max_context=config.max_context, max_running=64, seed=config.run.seed)
    try:
        async with RewardPool(config.reward) as rewards:
            parts = (config, engine, Task(config), rewards)
            yield ForcedLengths(*parts, median=median) if median else Generator(*parts)
    finally:
        await engine.close()
