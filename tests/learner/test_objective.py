"""The objective of a row: which policy is the anchor, what a correction does to it, terms beside the loss."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.algorithm import Algorithm
from learner.objective import Objective
from learner.rows import Row
from slipstream.runtime.variants import VariantFails
from tests.learner import algorithm_reference as reference
from tests.learner.test_algorithms import LENGTHS
from tests.learner.tiny_models import row_of

LAGS = [float(i % 3) for i in range(sum(LENGTHS))]


def made() -> tuple[Row, torch.Tensor, torch.Tensor]:
    """A row, logprobs in training with a gradient, and entropies."""
    random = np.random.default_rng(0)
    row = row_of([[1] * (length + 1) for length in LENGTHS])
    values: dict[str, Any] = {
        "behaviour_logprobs": torch.tensor(-random.exponential(1.0, sum(LENGTHS))),
        "advantages": torch.tensor(np.repeat(random.normal(0, 1, len(LENGTHS)), LENGTHS)),
        "weights": torch.full((sum(LENGTHS),), 1 / sum(LENGTHS), dtype=torch.float64),
        "lags": torch.tensor(LAGS, dtype=torch.float64),
    }
    for name, value in values.items():
        object.__setattr__(row, name, value)
    logprobs = (row.behaviour_logprobs + torch.tensor(random.normal(0, 0.3, sum(LENGTHS)))).requires_grad_()
    return row, logprobs, torch.rand(sum(LENGTHS), dtype=torch.float64).requires_grad_()


def proximals(name: str, row: Row, logprobs: torch.Tensor) -> list[float]:
    """Logprobs of the policy that ratios are taken against, written out."""
    if name == "current":
        return torch.as_tensor(row.proximal_logprobs).tolist()
    share = [0.0 if name == "behaviour" else lag / (lag + 1) for lag in LAGS]
    pairs = zip(logprobs.tolist(), row.behaviour_logprobs.tolist(), share, strict=True)
    return [old + part * (new - old) for new, old, part in pairs]


def decoupled(row: Row, logprobs: torch.Tensor, around: list[float]) -> tuple[float, list[float]]:
    """Decoupled PPO written out: the loss, and its gradient by token."""
    total, gradient = 0.0, []
    now, sampled = logprobs.tolist(), row.behaviour_logprobs.tolist()
    for new, old, advantage, proximal in zip(now, sampled, row.advantages.tolist(), around, strict=True):
        weight = min(np.exp(proximal - old), 2.0) / sum(LENGTHS)
        total += weight * reference.clipped(np.exp(new - proximal), advantage, 0.2, 0.28)
        up = reference.clipped(np.exp(new + 1e-6 - proximal), advantage, 0.2, 0.28)
        down = reference.clipped(np.exp(new - 1e-6 - proximal), advantage, 0.2, 0.28)
        gradient.append(weight * (up - down) / 2e-6)
    return total, gradient


@pytest.mark.parametrize(
    ("proximal", "correction"), [("behaviour", None), ("log_linear", "token_tis"), ("current", "token_tis")]
)
def test_a_ratio_is_the_clip_around_its_policy_with_a_truncated_weight(proximal: Any, correction: Any) -> None:
    """In float64; with `current` the policy in training has moved since the step's start, as after an update."""
    row, logprobs, entropy = made()
    moved = np.random.default_rng(1).normal(0, 0.3, sum(LENGTHS))
    object.__setattr__(row, "proximal_logprobs", logprobs.detach() - torch.tensor(moved))
    loss, measured = Objective(Algorithm(proximal=proximal, correction=correction))(row, logprobs, entropy)
    assert loss.dtype == torch.float64 and measured["clipped"] > 0
    assert correction is None or (measured["correction"] > 0 and measured["refused"] == 0)
    loss.backward()
    total, gradient = decoupled(row, logprobs, proximals(proximal, row, logprobs))
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-9)


def test_at_lag_zero_decoupled_ppo_is_ppo_clip() -> None:
    row, logprobs, entropy = made()
    object.__setattr__(row, "lags", torch.zeros(sum(LENGTHS)))
    plain, measured = Objective(Algorithm())(row, logprobs, entropy)
    assert "correction" not in measured
    split, _ = Objective(Algorithm(proximal="log_linear", correction="token_tis"))(row, logprobs, entropy)
    assert plain.item() == split.item()


def test_recomputed_logprobs_leave_the_correction_alone() -> None:
    """With one update a step the policy at its start is the one in training: the weighted policy gradient."""
    row, logprobs, entropy = made()
    tis: dict[str, Any] = {"correction": "token_tis"}
    gradients = []
    for algorithm in (Algorithm(proximal="current", **tis), Algorithm(loss="policy_gradient", **tis)):
        loss, _ = Objective(algorithm)(row, logprobs, entropy)
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
    torch.testing.assert_close(*gradients)


def test_a_refused_token_may_have_an_infinite_loss() -> None:
    row, logprobs, entropy = made()
    impossible = logprobs.detach().clone()
    impossible[3] = -torch.inf  # the first of LENGTHS has five tokens
    plain, refused = (
        Objective(Algorithm(loss="policy_gradient", **options))(row, impossible.requires_grad_(), entropy)
        for options in ({}, {"veto_low": 1e-4})
    )
    assert not plain[0].isfinite() and refused[1]["refused"] == LENGTHS[0]
    rest = slice(LENGTHS[0], None)
    want = (-row.advantages * impossible * row.weights)[rest].sum()
    assert refused[0].item() == pytest.approx(want.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(refused[0], impossible)
    assert gradient.isfinite().all() and not gradient[: LENGTHS[0]].any() and gradient[rest].all()


def test_entropy_and_kl_are_averaged_like_the_loss() -> None:
    row, logprobs, entropy = made()
    anchor = row.behaviour_logprobs - 0.1
    plain, _ = Objective(Algorithm())(row, logprobs, entropy)
    bonus, _ = Objective(Algorithm(entropy_coef=0.5))(row, logprobs, entropy)
    assert (plain - bonus).item() == pytest.approx(0.5 * entropy.mean().item(), rel=1e-6)
    objective = Objective(Algorithm(kl="k3", kl_coef=2.0))
    object.__setattr__(row, "reference_logprobs", anchor)
    against, measured = objective(row, logprobs, entropy)
    kl = [reference.kl("k3", new, old) for new, old in zip(logprobs.tolist(), anchor.tolist(), strict=True)]
    assert (against - plain).item() == pytest.approx(2 * float(np.mean(kl)), rel=1e-5)
    assert measured["kl"].item() == pytest.approx(sum(kl), rel=1e-6)


def test_a_row_without_a_token_in_the_loss_measures_zeros() -> None:
    empty = torch.zeros(0, requires_grad=True)
    row = row_of([[1, 1]])
    of_tokens = ("kept", "targets", "behaviour_logprobs", "advantages", "weights", "lags")
    for name in (*of_tokens, "lengths", "groups", "fresh"):
        object.__setattr__(row, name, getattr(row, name)[:0])
    for algorithm in (Algorithm(), Algorithm(loss="gspo"), Algorithm(correction="sequence_mis")):
        loss, measured = Objective(algorithm)(row, empty, empty)
        loss.backward()
        assert loss == 0 and all(value == 0 for value in measured.values())


OWN = """
from learner.losses import LossOutput

def loss(inputs):
    value = -inputs.advantages * inputs.logprobs
    return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("LossOutput(loss=value)", ""),
        ("LossOutput(loss=value.mean())", r"gave loss of shape \[\] for 25 tokens; return a value for each token"),
        ("LossOutput(loss=value, clipped=(value > 0).float().mean())", r"gave clipped of shape \[\] for 25 tokens"),
        ("LossOutput(loss=value.detach())", "gave a loss without a gradient"),
        ("value", ""),
        ("3.0", "returned float instead of a tensor"),
    ],
)
def test_a_loss_of_ones_own_gives_a_value_for_each_token(tmp_path: Path, returned: str, said: str) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("RETURNED", returned))
    row, logprobs, entropy = made()
    objective = Objective(Algorithm(loss=f"{tmp_path}/own.py:loss", entropy_coef=0.1))
    if said:
        with pytest.raises(VariantFails, match=said):
            objective(row, logprobs, entropy)
        return
    objective(row, logprobs, entropy)[0].backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -row.weights * row.advantages)
