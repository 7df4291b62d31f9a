"""Presets: what their models, rewards and GPUs need."""

from dataclasses import dataclass

import jinja2.sandbox
import pytest

import configs
from configs.learner import Checkpoint
from configs.loading import PRESETS
from configs.schema import Config

GB = 1e9
VOCABULARY = 152e3


@dataclass(frozen=True)
class Shape:
    """What a preset's model and GPU are, and what one decoder layer keeps for the backward.

    `layer_kb` was counted on one layer of that shape in bfloat16: the storages that autograd saves, a token.
    """

    gpu_gb: float
    parameters: float
    hidden: int
    layers: int
    layer_kb: float
    tied: bool = True


SHAPES = {
    "geo3k-qwen2.5-vl-3b-8gpu": Shape(80, 3.09e9, 2048, 36, 131),
    "code-qwen2.5-coder-3b-8gpu": Shape(80, 3.09e9, 2048, 36, 130),
    "dapo-qwen2.5-3b-8gpu": Shape(80, 3.09e9, 2048, 36, 130),
    "dapo-qwen2.5-7b-2nodes": Shape(80, 7.62e9, 3584, 28, 224, tied=False),
    "gsm8k-qwen2-7b-4nodes": Shape(80, 7.62e9, 3584, 28, 224, tied=False),
    "gsm8k-qwen2-7b-8gpu": Shape(80, 7.62e9, 3584, 28, 224, tied=False),
    "gsm8k-qwen2.5-0.5b-1gpu": Shape(40, 0.49e9, 896, 24, 57),
    "gsm8k-qwen2.5-1.5b-4gpu": Shape(80, 1.54e9, 1536, 28, 103),
    "gsm8k-qwen3-0.6b-2gpu": Shape(40, 0.60e9, 1024, 28, 72),
    "qwen3-14b-4nodes": Shape(141, 14.8e9, 5120, 40, 283, tied=False),
    "qwen3-4b-8gpu": Shape(80, 4.02e9, 2560, 36, 170),
    "qwen3-8b-2nodes": Shape(80, 8.19e9, 4096, 36, 215, tied=False),
    "smollm2-1gpu": Shape(24, 0.135e9, 576, 30, 25),
    "smollm2-2gpu": Shape(16, 0.135e9, 576, 30, 25),
}
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
GSM8K = "gsm8k-qwen2.5-1.5b-4gpu"


def learner_gb(config: Config, shape: Shape) -> float:
    """Memory of learner rank 0 at its peak, in GB: states, packed versions, activations, embedding and head."""
    tokens = config.learner.max_tokens_per_microbatch
    state = 16 * shape.parameters / config.num_learner_ranks
    packed = 2 * 2 * shape.parameters if config.weight_bus.backend == "nccl" else 0
    layer = tokens * shape.layer_kb * 1e3
    kept = layer * shape.layers
    if config.learner.recompute:
        kept = tokens * 2 * shape.hidden * shape.layers + 2 * layer  # inputs; one layer with its gradients
    logits = tokens * VOCABULARY * 2
    kept += logits if logits <= 4 * 2**30 else 0
    matrix = VOCABULARY * shape.hidden * (1 if shape.tied else 2)
    return (state + packed + kept + (2 + 4) * matrix + 3 * GB) / GB  # 3 GB: chunks of float32 logits, gathered layers


@pytest.mark.parametrize("name", [name for name in NAMES if configs.load(name).placement.device == "cuda"])
def test_a_preset_fits_into_the_gpus_that_it_names(name):
    config, shape = configs.load(name), SHAPES[name]
    free = shape.gpu_gb
    if config.placement.share_gpus:
        free *= 1 - config.rollout.sglang["mem_fraction_static"]
    assert learner_gb(config, shape) < 0.95 * free
    assert f"{shape.gpu_gb:.0f} GB" in (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")


def test_a_killed_learner_repeats_little_and_the_quick_start_can_be_replayed():
    for name in NAMES:
        assert 0 < configs.load(name).checkpoint.every_steps <= 50
    assert Checkpoint().every_steps == 50
    assert configs.load("quickstart").replay.journal_keep == "all"


def test_gsm8k_keeps_a_system_message_that_is_there():
    template = configs.load(GSM8K).model.chat_template
    assert template is not None
    # The options that transformers renders chat templates with.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rendered = environment.from_string(template).render(messages=messages, add_generation_prompt=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
    rendered = environment.from_string(template).render(messages=messages[1:], add_generation_prompt=True)
    system = "Reason step by step, then write the final number after ####."
    assert rendered.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n")
    assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")
