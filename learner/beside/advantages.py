"""Advantages that need forwards: a KL penalty in the reward, and a critic's values.

Every rank computes the tokens of its own samples, in float64 on the host. What the whole batch decides, it decides from
sums over trajectories that all ranks hold alike: a trajectory of one sample lies on one rank, so a sum over ranks adds
zeros to its numbers, and they have the same bits on every rank and for every number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from configs.schema import Config
from learner.advantages import Advantage, AdvantageInputs, advantages_of, facts_of
from learner.advantages.base import Float64
from learner.advantages.gae import gae
from learner.objective.kl import estimate
from learner.policy.model import Policy
from learner.rows import Row, offsets
from replay.messages import Batch

VARIANCE_EPSILON = 1e-8
"""Added to a variance before its root, as in verl."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Rows with what was judged by their tokens."""

    rows: list[Row]
    advantages: NDArray[np.float32]
    """[N] of each trajectory: with a critic, the mean over its tokens."""
    values: dict[str, float]
    """Numbers for metrics.jsonl."""


def judge(batch: Batch, rows: Sequence[Row], advantage: Advantage, config: Config, policy: Policy) -> Judged:
    """Advantages of rows that have reference logprobs, or values, as the configuration needs. A collective."""
    kl = [divergence(row, config) for row in rows]
    if facts_of(config.algorithm).needs_critic:
        return _by_critic(batch, rows, kl, config, policy)
    totals = over_trajectories(batch, rows, {"kl": kl}, policy)["kl"]
    rewards = _rewards(batch, totals, config)
    inputs = AdvantageInputs(rewards=rewards, groups=batch.all_groups, loss_tokens=batch.all_loss_tokens)
    advantages = advantages_of(advantage, inputs)
    done = [replace(row, advantages=spread(torch.from_numpy(advantages), row)) for row in rows]
    return Judged(done, advantages, _of_rewards(rewards, totals, batch, config))


def divergence(row: Row, config: Config) -> Float64:
    """[n] estimate of KL(behaviour || reference); zeros where none goes into the reward.

    The policy that sampled is the one whose tokens these are, so its logprobs make the estimate unbiased, at any lag
    and without another forward of the policy (InstructGPT, 2203.02155, equation 2).
    """
    if config.algorithm.kl_in != "reward":
        return np.zeros(len(row.targets))
    assert row.reference_logprobs is not None
    behaviour, reference = row.behaviour_logprobs.double(), row.reference_logprobs.double()
    found: Float64 = estimate(config.algorithm.kl, behaviour, reference).numpy()
    return found


def token_rewards(row: Row, rewards: NDArray[np.float32], penalties: Float64) -> Float64:
    """[n] of each token: minus its penalty, and at the last one its trajectory's reward."""
    found = -penalties
    found[offsets(row.lengths.tolist())[1:] - 1] += rewards[row.trajectories.numpy()]
    return found


def over_trajectories(
    batch: Batch, rows: Sequence[Row], columns: Mapping[str, Sequence[Float64]], policy: Policy
) -> dict[str, Float64]:
    """Sums over tokens of each trajectory, [N] float64, alike on all ranks. A collective.

    Args:
        batch: this rank's part.
        rows: of this rank, without trajectories that no token of is in the loss: those have sums of 0.
        columns: by name, [n] of every row.
        policy: over whose ranks the batch is spread.
    """
    sums = np.zeros((len(columns), len(batch.all_rewards)))
    for column, parts in zip(sums, columns.values(), strict=True):
        for row, part in zip(rows, parts, strict=True):
            if len(row.lengths):
                sums_of_samples = np.add.reduceat(part, offsets(row.lengths.tolist())[:-1])
                np.add.at(column, row.trajectories.numpy(), sums_of_samples)
    shared = torch.from_numpy(sums).to(policy.device)
    dist.all_reduce(shared, group=policy.group)
    return dict(zip(columns, shared.cpu().numpy(), strict=True))


def spread(values: torch.Tensor, row: Row) -> torch.Tensor:
    """[n] from values of every trajectory of the batch, [N]."""
    return values[row.trajectories].repeat_interleave(row.lengths)


def _by_critic(batch: Batch, rows: Sequence[Row], kl: Sequence[Float64], config: Config, policy: Policy) -> Judged:
    critic, values = config.critic, [row.values.double().numpy() for row in rows if row.values is not None]
    coefficient, options = config.algorithm.kl_coef, {"gamma": critic.gamma, "lam": critic.lam}
    pairs = [
        gae(token_rewards(row, batch.all_rewards, coefficient * cost), value, row.lengths.numpy(), **options)
        for row, cost, value in zip(rows, kl, values, strict=True)
    ]
    found, returns = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    measured = {"advantages": found, "values": values, "returns": returns}
    measured["residuals"] = [r - v for r, v in zip(returns, values, strict=True)]
    squares = {f"{name} squared": [part**2 for part in parts] for name, parts in measured.items()}
    sums = over_trajectories(batch, rows, {"kl": kl} | measured | squares, policy)
    moments = {name: _moments(sums, name, int(batch.all_loss_tokens.sum())) for name in measured}
    shift, variance = moments["advantages"] if critic.whiten else (0.0, 1.0 - VARIANCE_EPSILON)
    scale = 1 / np.sqrt(variance + VARIANCE_EPSILON)
    done = [
        replace(row, advantages=_float32((a - shift) * scale), returns=_float32(r))
        for row, a, r in zip(rows, found, returns, strict=True)
    ]
    means = sums["advantages"] / np.maximum(batch.all_loss_tokens, 1)
    advantages = np.where(batch.all_loss_tokens > 0, (means - shift) * scale, 0.0).astype(np.float32)
    said = {
        "critic/values/mean": moments["values"][0],
        "critic/returns/mean": moments["returns"][0],
        "critic/vf_explained_var": 1 - moments["residuals"][1] / (moments["returns"][1] + 1e-5),
    }
    rewards = _rewards(batch, sums["kl"], config)
    return Judged(done, advantages, said | _of_rewards(rewards, sums["kl"], batch, config))


def _rewards(batch: Batch, kl: Float64, config: Config) -> NDArray[np.float32]:
    """[N] less what the KL divergence of each trajectory, [N], costs."""
    return (batch.all_rewards - config.algorithm.kl_coef * kl).astype(np.float32)


def _of_rewards(rewards: NDArray[np.float32], kl: Float64, batch: Batch, config: Config) -> dict[str, float]:
    if config.algorithm.kl_in != "reward":
        return {}
    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "actor/reward_kl_penalty": float(kl.sum()) / int(batch.all_loss_tokens.sum()),
    }


def _moments(sums: Mapping[str, Float64], name: str, count: int) -> tuple[float, float]:
    """Mean and variance (divisor n - 1) over all tokens of the batch."""
    count = max(1, count)
    mean, squares = float(sums[name].sum()) / count, float(sums[f"{name} squared"].sum())
    return mean, max(0.0, squares - count * mean * mean) / max(1, count - 1)


def _float32(values: Float64) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
