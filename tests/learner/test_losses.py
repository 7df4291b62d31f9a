"""Losses against formulas worked out by hand, token by token."""

import math
from typing import Any

import pytest
import torch

from configs.algorithm import Algorithm
from learner.losses import LOSSES, LossInputs, LossOutput, build_loss


def run(name: str, **columns: list[float]) -> tuple[LossOutput, torch.Tensor]:
    """One row of tokens through a loss; missing columns have lag 0, mask 1, advantage 1."""
    n = len(columns["logprobs"])
    defaults: dict[str, Any] = {"lags": [0.0] * n, "mask": [1.0] * n, "advantages": [1.0] * n}
    tensors = {k: torch.tensor([v], dtype=torch.float32) for k, v in (defaults | columns).items()}
    logprobs = tensors["logprobs"].requires_grad_()
    output = build_loss(Algorithm(loss=name, max_prox_weight=2.0))(LossInputs(**tensors))  # type: ignore[arg-type]
    return output, logprobs


def test_ppo_clip_has_four_quadrants():
    ratios = [1.5, 0.5, 1.5, 0.5, 1.1]
    output, logprobs = run(
        "ppo_clip",
        logprobs=[math.log(r) - 1 for r in ratios],
        behaviour_logprobs=[-1.0] * 5,
        advantages=[2.0, 2.0, -2.0, -2.0, 2.0],
    )
    assert output.loss[0].tolist() == pytest.approx([-2.56, -1.0, 3.0, 1.6, -2.2])
    output.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0, -1.0, 3.0, 0, -2.2])
    assert float(output.sums["clipped"]) == 2


def test_decoupled_ppo_at_lag_zero_is_ppo_clip():
    columns = {
        "logprobs": [-0.2, -1.0, -3.0],
        "behaviour_logprobs": [-0.9, -1.1, -1.0],
        "advantages": [1.0, -1.0, -0.5],
    }
    (plain, logprobs), (decoupled, others) = (run(name, **columns) for name in ("ppo_clip", "decoupled_ppo"))
    plain.loss.sum().backward()
    decoupled.loss.sum().backward()
    assert torch.equal(plain.loss, decoupled.loss)
    assert logprobs.grad is not None and others.grad is not None and torch.equal(logprobs.grad, others.grad)


@pytest.mark.parametrize(
    ("column", "loss", "slope"),
    [
        # log ratio .3 at lag 3: .225 of it is the weight, .075 the ratio
        ((-1.7, -2.0, 1.5, 3.0), -1.5 * math.exp(0.3), -1.5 * math.exp(0.3)),
        # clipped: no gradient around the clip
        ((-0.8, -2.0, 1.0, 1.0), -math.exp(0.6) * 1.28, 0.0),
        # the proximal weight e^2 is capped at 2
        ((-0.1, -4.1, -1.0, 1.0), 2.0 * math.exp(2.0), 2.0 * math.exp(2.0)),
    ],
)
def test_decoupled_ppo_splits_the_ratio_by_lag(column, loss, slope):
    names = ("logprobs", "behaviour_logprobs", "advantages", "lags")
    output, logprobs = run("decoupled_ppo", **{name: [value] for name, value in zip(names, column, strict=True)})
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    output.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope, rel=1e-5)


def test_policy_gradient_corrects_nothing():
    output, logprobs = run("policy_gradient", logprobs=[-2.0], behaviour_logprobs=[-0.1], advantages=[3.0])
    output.loss.sum().backward()
    assert output.loss.item() == 6.0
    assert logprobs.grad is not None and logprobs.grad.item() == -3.0
    assert float(output.sums["clipped"]) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_touch_neither_loss_nor_gradient_nor_sums(name):
    nan = float("nan")
    output, logprobs = run(
        name, logprobs=[-1.0, -2.0], behaviour_logprobs=[-1.2, nan], advantages=[1.0, nan], mask=[1.0, 0.0]
    )
    alone, _ = run(name, logprobs=[-1.0], behaviour_logprobs=[-1.2])
    assert output.loss[0].tolist() == [alone.loss.item(), 0.0]
    assert {k: float(v) for k, v in output.sums.items()} == {k: float(v) for k, v in alone.sums.items()}
    assert not output.sums["weight"].requires_grad
    output.loss[0, 0].backward()
    assert logprobs.grad is not None and logprobs.grad[0, 0] != 0


@pytest.mark.parametrize("name", LOSSES)
def test_an_absurd_ratio_stays_finite(name):
    output, logprobs = run(
        name, logprobs=[-0.0, -500.0], behaviour_logprobs=[-500.0, 0.0], advantages=[-1.0, 1.0], lags=[2.0, 2.0]
    )
    output.loss.sum().backward()
    assert output.loss.isfinite().all()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in output.sums.values())


def test_sums_measure_the_distance_to_the_behaviour_policy():
    output, _ = run("ppo_clip", logprobs=[-1.0, -2.0], behaviour_logprobs=[-1.5, -1.8])
    up, down = math.exp(0.5), math.exp(-0.2)
    expected = {"clipped": 1, "weight": up + down, "weight_squared": up**2 + down**2, "k1": -0.3}
    expected["k3"] = (up - 1 - 0.5) + (down - 1 + 0.2)
    assert {name: float(value) for name, value in output.sums.items()} == pytest.approx(expected, rel=1e-5)
