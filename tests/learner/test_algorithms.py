"""Every loss, correction, advantage, KL estimator and aggregation against its reference and finite differences."""

import functools
import math
from typing import Any

import algorithm_reference as reference
import numpy as np
import pytest
import torch

from configs.algorithm import Algorithm
from learner.advantages import ADVANTAGES, AdvantageInputs, advantages_of, build_advantage
from learner.advantages.gae import gae
from learner.losses import LOSSES, LossInputs, build_loss
from learner.objective.aggregation import token_weights
from learner.objective.corrections import CORRECTIONS, Rho, build_correction
from learner.objective.kl import ESTIMATORS, estimate

LENGTHS = (5, 1, 9, 3, 7)
LOSS_REFERENCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo_clip": (functools.partial(reference.ppo_clip, dual=0.0), {}),
    "ppo_clip, dual": (functools.partial(reference.ppo_clip, dual=3.0), {"clip_dual": 3.0}),
    "gspo": (reference.gspo, {}),
    "cispo": (reference.cispo, {}),
    "sapo": (reference.sapo, {}),
    "dppo_tv": (reference.dppo_tv, {}),
    "policy_gradient": (reference.policy_gradient, {}),
}
STEP = 1e-6


def row(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs in training, proximal logprobs and advantages of a row, float64."""
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(1.0, sum(LENGTHS))
    proximal = np.minimum(logprobs + random.normal(0, spread, sum(LENGTHS)), -1e-3)
    advantages = np.repeat(random.normal(0, 1, len(LENGTHS)), LENGTHS)
    return torch.tensor(logprobs), torch.tensor(proximal), torch.tensor(advantages)


def test_every_loss_has_a_reference() -> None:
    assert {name.partition(",")[0] for name in LOSS_REFERENCES} == set(LOSSES)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", LOSS_REFERENCES)
@pytest.mark.parametrize("spread", [2e-4, 0.3, 3.0])
def test_a_loss_and_its_gradient(name: str, aggregation: str, spread: float) -> None:
    of_reference, options = LOSS_REFERENCES[name]
    loss = build_loss(Algorithm(loss=name.partition(",")[0], **options))
    weights = torch.tensor(np.repeat(token_weights(aggregation, np.array(LENGTHS, np.int32), constant=16), LENGTHS))
    for seed in range(3):
        logprobs, proximal, advantages = row(seed, spread)
        moving = logprobs.clone().requires_grad_()
        lengths = torch.tensor(LENGTHS)
        output = loss(
            LossInputs(
                logprobs=moving,
                proximal_logprobs=proximal,
                advantages=advantages,
                lengths=lengths,
                groups=torch.arange(len(LENGTHS)),
            )
        )

        def total(at: list[float]) -> float:
            held, prox, adv = logprobs.tolist(), proximal.tolist(), advantages.tolist()  # noqa: B023
            return reference.aggregate(aggregation, of_reference(at, held, prox, adv, LENGTHS), LENGTHS, 16)

        value = (output.loss * weights).sum()
        value.backward()
        assert value.item() == pytest.approx(total(logprobs.tolist()), rel=1e-6, abs=1e-7)
        assert moving.grad is not None
        if name == "gspo" and aggregation != "sequence":
            continue  # the token form has the gradient of the objective over answers only where answers are averaged
        for index in range(sum(LENGTHS)):
            up, down = logprobs.tolist(), logprobs.tolist()
            up[index] += STEP
            down[index] -= STEP
            slope = (total(up) - total(down)) / (2 * STEP)
            assert moving.grad[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-7), (seed, index)


@pytest.mark.parametrize("kind", ["none", *CORRECTIONS])
def test_a_correction(kind: str) -> None:
    correct = build_correction(Algorithm(loss="policy_gradient", correction=kind))  # type: ignore[arg-type]
    for seed, spread in enumerate([0.003, 0.1, 0.5]):
        log_rho = np.random.default_rng(seed).normal(0, spread, sum(LENGTHS))
        weights = correct(Rho(torch.tensor(log_rho), torch.tensor(LENGTHS)))
        assert weights.tolist() == pytest.approx(reference.correction(kind, log_rho.tolist(), LENGTHS), rel=1e-9)


def test_a_correction_of_a_loss_with_a_ratio_only_masks() -> None:
    log_rho = torch.tensor([0.0, 0.5, 1.0, -1.0])
    weights = build_correction(Algorithm(correction="icepop"))(Rho(log_rho, torch.tensor([4])))
    assert weights.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_veto_takes_the_whole_answer() -> None:
    log_rho = torch.tensor([0.0, 0.1, 0.0, math.log(1e-5), 0.0, math.log(200.0)])
    lengths = torch.tensor([2, 2, 2])
    low = build_correction(Algorithm(veto_low=1e-4))(Rho(log_rho, lengths))
    both = build_correction(Algorithm(veto_low=1e-4, veto_high=100.0))(Rho(log_rho, lengths))
    assert (low.tolist(), both.tolist()) == ([1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0])


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_kl_estimator_and_its_gradient(kind: str) -> None:
    logprobs = torch.linspace(-4, -0.1, 9, dtype=torch.float64, requires_grad=True)
    anchor = torch.linspace(-1, -3, 9, dtype=torch.float64)
    values = estimate(kind, logprobs, anchor)
    values.sum().backward()
    assert logprobs.grad is not None
    for value, slope, now, then in zip(
        values.tolist(), logprobs.grad.tolist(), logprobs.tolist(), anchor.tolist(), strict=True
    ):
        assert value == pytest.approx(min(reference.kl(kind, now, then), 10.0), rel=1e-9)
        if value < 10:
            rise = reference.kl(kind, now + STEP, then) - reference.kl(kind, now - STEP, then)
            assert slope == pytest.approx(rise / (2 * STEP), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_an_advantage(kind: str) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        groups = random.integers(0, 5, 24).astype(np.int32)
        rewards = random.random(24).astype(np.float32)
        tokens = random.integers(0, 9, 24).astype(np.int32)
        inputs = AdvantageInputs(rewards=rewards, groups=groups, loss_tokens=tokens)
        got = advantages_of(build_advantage(Algorithm(advantage=kind)), inputs)  # type: ignore[arg-type]
        want = reference.advantage(kind, rewards.astype(float).tolist(), groups.tolist(), tokens.tolist())
        assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_equal_rewards_teach_nothing(kind: str) -> None:
    inputs = AdvantageInputs(
        rewards=np.full(12, 0.1, np.float32),
        groups=np.repeat(np.arange(4, dtype=np.int32), 3),
        loss_tokens=np.arange(12, dtype=np.int32),
    )
    assert not advantages_of(build_advantage(Algorithm(advantage=kind)), inputs).any()  # type: ignore[arg-type]


def test_gae_over_mixed_lengths() -> None:
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=sum(LENGTHS)), random.normal(size=sum(LENGTHS))
    for gamma, lam in [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)]:
        advantages, returns = gae(rewards, values, np.array(LENGTHS), gamma=gamma, lam=lam)
        want = reference.gae(rewards.tolist(), values.tolist(), LENGTHS, gamma, lam)
        assert advantages.tolist() == pytest.approx(want, rel=1e-9)
        assert returns.tolist() == pytest.approx(np.add(want, values).tolist(), rel=1e-9)


def test_a_reward_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="reward of trajectory 1 is nan"):
        AdvantageInputs(
            rewards=np.array([0, np.nan], np.float32),
            groups=np.zeros(2, np.int32),
            loss_tokens=np.ones(2, np.int32),
        )


def test_maxrl_refuses_a_negative_reward() -> None:
    inputs = AdvantageInputs(
        rewards=np.array([1, -1], np.float32), groups=np.zeros(2, np.int32), loss_tokens=np.ones(2, np.int32)
    )
    with pytest.raises(ValueError, match=r"reward of trajectory 1 is -1.*takes rewards >= 0"):
        build_advantage(Algorithm(advantage="maxrl"))(inputs)
