"""Tiny random model folders, and what transformers says about them: the oracle of the torch engine's tests."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config

from rollout_server.engines.base import Completion, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.engines.torch.model import TorchModel

DEADLINE_S = 60.0
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SCALED = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_ROPE = {**SCALED, "rope_type": "yarn"}
WIDE_HEADS = {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"family": "qwen3"},
    "qwen3-untied-bias-wide-heads": {"family": "qwen3", **WIDE_HEADS},
    "qwen2-untied": {"family": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied-linear-rope": {"family": "qwen2", "rope_parameters": LINEAR_ROPE},
    "llama-untied-llama3-rope": {"family": "llama", "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "llama-tied-all-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-no-gqa-yarn": {"family": "llama", "num_key_value_heads": 4, "rope_parameters": YARN_ROPE},
}
PROMPT = [3, 9, 17]
LONG = Sampling(max_new_tokens=40, seed=1)
STEP = 9
"""Decode steps before the update; prefill samples one token more."""


def make_model(family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
    """A random model of the family, in float32, with logits that are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**{**SIZES, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # No two norms alike, no bias zero: a mistake anywhere shows in the logits.
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.eval()


def save_folder(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Write `make_model` as a Hugging Face folder."""
    make_model(family, seed=seed, **changes).save_pretrained(folder)
    return folder


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """What an update of this model carries: HF names, a tied lm_head left out."""
    tied = model.config.tie_word_embeddings
    return {n: t.clone() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], answer: Completion, *, temperature: float = 1.0) -> torch.Tensor:
    """float32 logprobs [L] of the answer's tokens from one whole forward."""
    ids = torch.tensor([prompt + answer.token_ids.tolist()])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@torch.inference_mode()
def logprobs_over_kept_kv(old: Any, new: Any, prompt: list[int], answer: Completion, first_new: int) -> torch.Tensor:
    """Logprobs of answer[first_new:] under `new`, reading KV that `old` made of everything it was fed before."""
    ids = torch.tensor([prompt + answer.token_ids.tolist()])
    fed_to_old = len(prompt) + first_new - 1
    cache = old(ids[:, :fed_to_old], past_key_values=DynamicCache(config=old.config), use_cache=True).past_key_values
    logits = new(ids[:, fed_to_old:-1], past_key_values=cache).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, fed_to_old + 1 :, None])[:, 0]


def error(answer: Completion, expected: torch.Tensor, span: slice = slice(None)) -> float:
    """Largest absolute difference between the engine's logprobs and the expected ones."""
    got = torch.from_numpy(answer.logprobs)[span]
    assert got.shape == expected.shape
    return float((got - expected).abs().max())


@asynccontextmanager
async def serving(folder: Path, *, max_context: int = 64, max_running: int = 32, **rest: Any) -> AsyncIterator[Any]:
    """An engine on the folder, closed at the end."""
    engine = TorchEngine(folder, max_context=max_context, max_running=max_running, **rest)
    try:
        yield engine
    finally:
        await engine.close()


class Gate:
    """Holds the decode thread inside its `step`-th decode of the chosen weights, so that a test acts right then."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step: int, which: Callable[[Any], bool] = lambda _: True
    ) -> None:
        self._reached, self._release, self._left = threading.Event(), threading.Event(), step
        original = TorchModel.decode

        def decode(model: TorchModel, weights: Any, *rest: Any) -> torch.Tensor:
            logits = original(model, weights, *rest)
            if which(weights):
                self._left -= 1
                if self._left == 0:
                    self._reached.set()
                    assert self._release.wait(DEADLINE_S)
            return logits

        monkeypatch.setattr(TorchModel, "decode", decode)

    async def reached(self) -> None:
        """Wait until the thread stands at the gate."""
        assert await asyncio.to_thread(self._reached.wait, DEADLINE_S)

    async def posted(self, call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a call to the engine whose command the thread finds when it leaves the gate."""
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        return task

    def release(self) -> None:
        """Let the thread go on."""
        self._release.set()


Gates = Callable[..., Gate]
"""The fixture `gate_at`: a gate in the `step`-th decode."""


@asynccontextmanager
async def stopped_midway(
    folder: Path, gate_at: Gates, mode: Any, *, n: int = 3
) -> AsyncIterator[tuple[TorchEngine, "asyncio.Task[list[Completion]]", "asyncio.Task[None]"]]:
    """An engine whose live request has STEP + 1 tokens, and the pause that was asked for at that instant."""
    gate = gate_at(STEP)
    async with serving(folder) as engine:
        answers = await gate.posted(engine.generate(PROMPT, LONG, n, request_id="a"))
        await gate.reached()
        pausing = await gate.posted(engine.pause(mode))
        gate.release()
        yield engine, answers, pausing


async def sample(engine: TorchEngine, prompt: list[int], name: str, n: int = 1, **sampling: Any) -> list[Completion]:
    """Generate with the defaults of these tests."""
    return await engine.generate(prompt, Sampling(**{"max_new_tokens": 24, **sampling}), n, request_id=name)


async def update(engine: TorchEngine, model: Any, version: int, mode: Any = "keep_kv") -> None:
    """Pause, load the model as this version, go on."""
    await engine.pause(mode)
    await engine.load(hf_tensors(model).items(), version)
    await engine.resume()
