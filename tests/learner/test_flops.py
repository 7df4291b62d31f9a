"""FLOPs of a step against a count token by token, and the share of a device's peak."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from learner.policy.flops import flops_of, mfu, peak_flops
from learner.record.metrics import Spans
from learner.trainer import Trainer
from slipstream.families.sizes import Sizes
from tests.learner.recorded import batch_of, random_step, rows_of
from tests.learner.tiny_models import built, make_config, row_of

MODEL: dict[str, Any] = {"model_type": "mistral", "hidden_size": 8, "num_hidden_layers": 3, "intermediate_size": 16}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 32}
PRODUCTS = 3 * 8 * (8 + 2 * 4 + 8 + 3 * 16)
LENGTHS = (2, 7, 5)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 9])
@pytest.mark.parametrize("frozen", [False, True])
def test_flops_are_those_of_tokens_and_of_the_keys_that_they_see(window: int | None, frozen: bool) -> None:
    seen = sum(min(place + 1, window or 99) for length in LENGTHS for place in range(length))
    products = PRODUCTS * sum(LENGTHS) + 8 * 32 * sum(length - 1 for length in LENGTHS)
    attention = 3 * 2 * 8 * seen  # scores and values, multiply and add
    expected = (2 + 2 * (2 - frozen)) * products + 3 * 2 * attention
    row = row_of([[1] * length for length in LENGTHS])
    assert flops_of(Sizes.of(MODEL | {"sliding_window": window}), [row], frozen=frozen) == expected


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce GTX 1080", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_goes_by_whole_words_of_its_name(device: str, tflops: int | None) -> None:
    assert peak_flops(device) == (None if tflops is None else tflops * 1e12)


def test_a_step_counts_the_flops_of_all_its_updates(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3, learner={"epochs": 2})
    policy, optimizer = built(config, mesh)
    spans, batch = Spans(), batch_of(random_step(3), 3, num_microbatches=2)
    update = Trainer(config, policy, optimizer, spans).train_step(batch)
    sizes = Sizes.of(policy.model.transformer.config.to_dict())
    flops, seconds = 2 * flops_of(sizes, rows_of(batch, config)[0]), spans.take()
    assert update.sums.values["flops"] == flops > 0
    took = seconds["timing_s/gradients"] + seconds["timing_s/apply"]
    assert mfu(flops, seconds, 1e9) == pytest.approx(flops / took / 1e9)
