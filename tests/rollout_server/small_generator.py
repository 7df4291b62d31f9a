"""A generator on a small model in the torch engine, with its tokenizer and rewards."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from configs import Config
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.generate import Generator
from rollout_server.rewards.pool import RewardPool
from rollout_server.tasks import Task
from scripts.bench.server import ForcedLengths

PROMPT = {"prompt": "w5 w9 w300", "ground_truth": "", "data_source": "bench", "extra_info": {}, "columns": {}}
PROMPT_TOKENS = 8


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


@asynccontextmanager
async def generating(config: Config, median: int = 0, sigma: float = 0.7) -> AsyncIterator[Generator]:
    """With a median, answers have forced lengths."""
    engine = TorchEngine(config.model.path, max_context=config.max_context, max_running=64, seed=config.run.seed)
    try:
        async with RewardPool(config.reward) as rewards:
            parts = (config, engine, Task(config), rewards)
            yield ForcedLengths(*parts, median=median, sigma=sigma) if median else Generator(*parts)
    finally:
        await engine.close()
