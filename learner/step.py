"""One optimizer step on this rank's part of a batch: gradients, measurements, update.

Collectives, in order: those of FSDP in forward and backward, then one gather of a few float64 numbers that carries
every measurement and the gradient norm. All ranks read the same numbers from it and so decide alike.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from learner.objective import Measurements
from learner.objective.teaching import metrics_of
from learner.optimizer import Optimizer
from learner.policy.flops import flops_of
from learner.policy.model import Policy
from learner.rows import Row
from slipstream.families.sizes import Sizes

Measure = Callable[..., tuple[torch.Tensor, Measurements]]
"""Of a row and what the model's forward gives for it: its share of the loss, and measurements (an Objective)."""
MAX = "_max"
"""End of the name of a measurement that is a maximum; the others are sums."""
_MEANS = {
    "actor/entropy": "entropy",
    "actor/ppo_kl": "k1",
    "actor/ppo_kl_k3": "k3",
    "actor/pg_clipfrac": "clipped",
    "actor/kl_loss": "kl",
    "actor/ratio_mean": "weight",
    "rollout_corr/rollout_is_mean": "correction",
    "rollout_corr/rollout_rs_masked_fraction": "refused",
    "training/rollout_probs_diff_mean": "prob_diff",
    "training/rollout_logprobs_diff_mean": "logprob_diff",
}
"""Metrics that are the mean of a sum over the tokens in the loss."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Measurements of one step over all ranks and microbatches: sums over the tokens in the loss, and maxima."""

    values: Mapping[str, float]
    """By name; a Counter, which has 0 for every name, of a step without tokens. A name with a slash is a metric, whose
    rows added up to its value."""
    global_tokens: int

    @property
    def loss(self) -> float:
        """Of the batch."""
        return self.values["loss"]

    @property
    def grad_norm(self) -> float:
        """Norm of the summed gradient over all parameters, before clipping."""
        return math.sqrt(self.values["squared_gradient"])

    @property
    def fresh_tokens(self) -> float:
        """Tokens in the loss of answers whose every token has lag 0."""
        return self.values.get("fresh", 0.0)

    @property
    def moved(self) -> float:
        """k3 estimate of KL(p ‖ policy), p being the policy at the start of the step with `proximal: current`, else the
        one that sampled."""
        return self.values["moved"] / max(1, self.global_tokens)

    @classmethod
    def over(cls, updates: Sequence["StepSums"]) -> "StepSums":
        """Of the updates of a step: sums add up, loss and gradient are means, what lag 0 shows is the first's."""
        if len(updates) == 1:
            return updates[0]
        values: defaultdict[str, float] = defaultdict(float)
        for one in updates:
            for name, value in one.values.items():
                values[name] = max(values[name], value) if name.endswith(MAX) else values[name] + value
        ran = max(1, sum(one.global_tokens > 0 for one in updates))
        for name in values:
            if name in ("loss", "squared_gradient") or "/" in name:
                values[name] /= ran
            elif name in ("fresh", "fresh_diff"):
                values[name] = updates[0].values[name]
        return cls(values, sum(one.global_tokens for one in updates))

    def metrics(self) -> dict[str, float]:
        """Numbers for metrics.jsonl, under verl's names where it has one.

        `actor/ppo_kl` is k1 of KL(behaviour ‖ current); `training/ess` is (Σw)²/(n Σw²) of w = current/behaviour, 1
        when the two agree; the rollout differences are absolute, of probabilities and of logprobs, behaviour against
        trainer. At lag > 0 they hold what the policy has learnt since; `..._lag0_mean`, over answers whose every token
        has lag 0 and absent without any, is the pure mismatch of the two implementations.
        `perf/max_memory_allocated_gb` is the most device memory (GiB) that any rank had allocated since the backward of
        the step before; absent on a CPU. `perf/prefix_tokens_saved` is how many tokens of trajectories were not
        computed, because answers share prompts; absent where none were.
        """
        v = self.values
        if (n := self.global_tokens - int(v.get("sft_tokens", 0))) == 0:
            return {"training/loss_tokens": float(self.global_tokens)}
        result = {metric: v[name] / n for metric, name in _MEANS.items() if name in v}
        result |= {"training/loss_tokens": float(n), **{name: value for name, value in v.items() if "/" in name}}
        if "weight" in v:  # answers were sampled
            result |= {
                "actor/pg_loss": self.loss - v.get("sft_share", 0.0),
                "training/ess": v["weight"] ** 2 / (n * v["weight_squared"]) if v["weight_squared"] else 0.0,
                "training/rollout_probs_diff_max": v["prob_diff_max"],
                "training/rollout_logprobs_diff_max": v["logprob_diff_max"],
            }
        if v.get("fresh"):
            result["training/rollout_logprobs_diff_lag0_mean"] = v["fresh_diff"] / v["fresh"]
        if updates := v.get("moe_updates"):
            result |= {
                "moe/max_violation": v["moe_violation"] / updates,
                "moe/max_violation_max": v["moe_violation_max"],
                "moe/idle_experts": v["moe_idle"] / updates,
                "moe/aux_loss": v["moe_aux"] / updates,
            }
        if v.get("moe_given"):
            result["moe/routing_overridden"] = v["moe_overridden"] / v["moe_given"]
        result |= metrics_of(v, n)
        if v["saved"]:
            result["perf/prefix_tokens_saved"] = v["saved"]
        if v["peak_bytes_max"]:
            result["perf/max_memory_allocated_gb"] = v["peak_bytes_max"] / 1024**3
        return result


def accumulate_gradients(
    policy: Policy,
    rows: Sequence[Row],
    objective: Measure,
    *,
    temperature: float,
    global_tokens: int,
    shown: Callable[[Row], Row] = lambda row: row,
) -> StepSums:
    """Forward and backward over all rows; after the last one gradients are summed over ranks. A collective.

    Every rank has the same number of rows, at least one. With no token in the loss of any rank, nothing runs, no
    collective starts, and all measurements are 0. Each row is `shown` to another model first, itself a collective.

    Raises:
        ValueError: the rows of all ranks together do not hold `global_tokens` tokens in the loss.
    """
    policy.clear_gradients()
    if global_tokens == 0:
        return StepSums(Counter(), 0)
    found: dict[str, torch.Tensor] = {}
    # all at once, because a copy out of pageable memory waits for the device
    for number, row in enumerate([row.to(policy.device) for row in rows], start=1):
        row = shown(row)
        policy.prepare_row(last=number == len(rows))
        loss, measured = objective(row, *policy.forward(row, temperature))
        loss.backward()  # type: ignore[no-untyped-call]
        if policy.mixtures is not None:
            policy.mixtures.add(row)
        for name, value in measured.items():
            combine = torch.maximum if name.endswith(MAX) else torch.add
            found[name] = combine(found[name], value.double()) if name in found else value.double()
    found["saved"] = torch.tensor(sum(row.saved for row in rows), dtype=torch.float64, device=policy.device)
    sizes = Sizes.of(policy.model.transformer.config.to_dict())
    flops = flops_of(sizes, rows, frozen=policy.lora is not None)
    found["flops"] = torch.tensor(flops, dtype=torch.float64, device=policy.device)
    if not policy.leads:  # another rank measured the same tokens
        found = {name: torch.zeros_like(value) for name, value in found.items()}
    policy.settle_gradients()
    found["squared_gradient"] = policy.squared_gradient()
    found["peak_bytes_max"] = torch.tensor(take_peak_bytes(policy.device), dtype=torch.float64, device=policy.device)
    values = over_ranks(policy, found)
    if policy.mixtures is not None:
        values |= policy.mixtures.take(policy.group)
    if (found_tokens := values["tokens"] + values.get("sft_tokens", 0.0)) != global_tokens:
        raise ValueError(f"{found_tokens:.0f} tokens are in the loss over all ranks, the batch says {global_tokens}")
    return StepSums(values, global_tokens)


def take_peak_bytes(device: torch.device) -> int:
    """Most memory that was allocated on the device since the last call, in bytes; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def over_ranks(policy: Policy, local: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Sums and maxima over ranks. Gathered and reduced here, in rank order: one round trip for both kinds, and
    the same bits on every rank, which a reduction inside the backend does not promise."""
    mine = torch.stack(list(local.values()))
    parts = [torch.empty_like(mine) for _ in range(policy.world_size)]
    dist.all_gather(parts, mine, group=policy.group)
    columns = dict(zip(local, torch.stack(parts, dim=1).cpu(), strict=True))
    return {name: float(column.max() if name.endswith(MAX) else column.sum()) for name, column in columns.items()}


def apply_update(
    policy: Policy, optimizer: Optimizer, sums: StepSums, *, max_grad_norm: float, lr: float, refusal: str = ""
) -> str:
    """Clip the gradients that accumulate_gradients left, and step. Decides alike on all ranks, without a collective.

    Clipping scales by max_grad_norm / (norm + 1e-6) where that is below 1, as torch.nn.utils.clip_grad_norm_ does.

    Returns:
        Why nothing was applied: `no_tokens`, `nonfinite_loss`, `nonfinite_gradient`, or `refusal`, which a guard may
        have given. The gradients are dropped then, and weights and moments stay as they are. Empty for an update that
        was applied.
    """
    reason = ""
    if sums.global_tokens == 0:
        reason = "no_tokens"
    elif not math.isfinite(sums.loss):
        reason = "nonfinite_loss"
    elif not math.isfinite(sums.grad_norm):
        reason = "nonfinite_gradient"
    elif refusal:
        reason = refusal
    else:
        scale = min(1.0, max_grad_norm / (sums.grad_norm + 1e-6))
        if scale != 1:
            for gradient in policy.local_gradients():
                gradient.mul_(scale)
        optimizer.step(lr)
    policy.clear_gradients()
    return reason
