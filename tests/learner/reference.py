"""A reference learner, as plain as possible: the parity oracle of the FSDP2 path and of whole runs.

One process, one forward per step, transformers and torch.optim only. Formulas are written out anew, so that a mistake
in the package is not a mistake here as well.

How closely to compare: with adam_epsilon 1e-6 every element agrees to 1e-6. With the default 1e-8 a gradient of 1e-9 or
so, which is rounding and nothing else, makes an update as large as any other, so single elements (2 of 100,000 in
five steps) differ by up to the learning rate; compare with 1e-5 there, or leave a few out.
"""

import copy
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from configs import Config
from learner.advantages.base import EPSILON


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One trajectory as it was trained on. Lists over the answer's tokens have the length of response_ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float
    group: int
    """Any label that the trajectories of one group share within their step."""


def train(
    model_folder: Path, steps: list[list[Recorded]], config: Config, *, first_step: int = 1
) -> dict[str, torch.Tensor]:
    """Parameters by name (tied ones once) after training on the trajectories of each step, all ranks together.

    The model in the folder is version first_step − 1.
    """
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True, dtype=torch.float32).eval()
    learner, first = config.learner, copy.deepcopy(model).requires_grad_(False)
    decays = {name: p.dim() > 1 and name != "model.embed_tokens.weight" for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if decays[name] is own], "weight_decay": decay}
        for own, decay in ((True, learner.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, betas=learner.betas, eps=learner.adam_epsilon)
    for step, trajectories in enumerate(steps, start=first_step):
        pairs = zip(trajectories, group_advantages(trajectories, config), strict=True)
        kept = [(t, a) for t, a in pairs if a or not config.algorithm.drop_zero_advantage]
        before = copy.deepcopy(model).requires_grad_(False)
        for part in divided(kept, trajectories, learner.minibatches) * learner.epochs:
            if tokens := sum(sum(t.loss_mask) for t, _ in part):
                adamw.zero_grad()
                (step_loss(model, first, before, part, step, config) / tokens).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), learner.max_grad_norm)
                for group in adamw.param_groups:
                    group["lr"] = learning_rate(config, step)
                adamw.step()
    return dict(checkpoint_tensors({name: p.detach().clone() for name, p in model.named_parameters()}))


def checkpoint_tensors(parameters: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As a checkpoint has them: experts one by one, gate and up apart."""
    for name, tensor in parameters.items():
        if tensor.dim() < 3:
            yield name, tensor
            continue
        module, _, own = name.rpartition(".")
        parts = ("gate", "up") if own == "gate_up_proj" else ("down",)
        for number, expert in enumerate(tensor):
            for part, one in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{module}.{number}.{part}_proj.weight", one


def divided(
    kept: list[tuple[Recorded, float]], trajectories: list[Recorded], minibatches: int
) -> list[list[tuple[Recorded, float]]]:
    """What is trained of each mini-batch of whole groups; the first ones have one more where it does not go up."""
    groups = list(dict.fromkeys(t.group for t in trajectories))
    size, more = divmod(len(groups), minibatches)
    ends = [(number + 1) * size + min(number + 1, more) for number in range(minibatches)]
    parts = [groups[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [[(t, a) for t, a in kept if t.group in part] for part in parts]


def group_advantages(trajectories: list[Recorded], config: Config) -> list[float]:
    """(reward − mean) / (unbiased standard deviation + epsilon) within each group."""
    result = []
    for trajectory in trajectories:
        rewards = [t.reward for t in trajectories if t.group == trajectory.group]
        advantage = trajectory.reward - statistics.fmean(rewards)
        if config.algorithm.advantage.name == "grpo" and len(rewards) > 1:
            advantage /= statistics.stdev(rewards) + EPSILON
        result.append(0.0 if len(set(rewards)) == 1 else advantage)
    return result


def step_loss(
    model: torch.nn.Module,
    first: torch.nn.Module,
    before: torch.nn.Module,
    kept: list[tuple[Recorded, float]],
    step: int,
    config: Config,
) -> torch.Tensor:
    """Sum of the loss over all tokens of the trajectories, from one forward with padding on the right.

    With algorithm.kl it has k3's term against the `first` model; `before` is the model at the start of the step.

    The padding is needed for parity to rounding: AdamW's first steps move an element by the learning rate in the
    direction of its gradient however small that is, so elements of almost no gradient amplify rounding.
    """
    width = max(len(t.prompt_ids) + len(t.response_ids) for t, _ in kept)
    ids = torch.zeros(len(kept), width, dtype=torch.long)
    for row, (t, _) in enumerate(kept):
        ids[row, : len(t.prompt_ids) + len(t.response_ids)] = torch.tensor(t.prompt_ids + t.response_ids)
    logits = [each(input_ids=ids).logits.float() for each in (model, first, before)]
    logprobs = [torch.log_softmax(one / config.rollout.temperature, dim=-1) for one in logits]
    found, columns = [], []
    for row, (t, advantage) in enumerate(kept):
        for i, token in enumerate(t.response_ids):
            if t.loss_mask[i]:
                found.append(torch.stack([one[row, len(t.prompt_ids) + i - 1, token] for one in logprobs]))
                columns.append([t.logprobs[i], advantage, float(step - 1 - t.versions[i])])
    behaviour, advantages, lags = torch.tensor(columns).unbind(1)
    now, old, started = torch.stack(found).unbind(1)
    losses = token_losses(now, behaviour, started, advantages, lags, config)
    if config.algorithm.kl != "none":
        losses = losses + config.algorithm.kl_coef * (torch.exp(old - now) - 1 + now - old)
    return losses.sum()


def token_losses(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    started: torch.Tensor,
    advantages: torch.Tensor,
    lags: torch.Tensor,
    config: Config,
) -> torch.Tensor:
    """algorithm.loss of each token."""
    algorithm = config.algorithm
    if algorithm.loss.name == "policy_gradient":
        return -advantages * logprobs
    proximal, weight = behaviour, torch.ones_like(behaviour)
    if algorithm.proximal == "log_linear":
        proximal = behaviour + lags / (lags + 1) * (logprobs.detach() - behaviour)
        weight = torch.exp(proximal - behaviour).clamp(max=2.0)
    if algorithm.proximal == "current":
        proximal, weight = started, torch.exp(started - behaviour).clamp(max=2.0)
    ratio = torch.exp(logprobs - proximal)
    clip = {"clip_low": 0.2, "clip_high": 0.28} | dict(algorithm.loss.options)
    clipped = torch.clamp(ratio, 1 - clip["clip_low"], 1 + clip["clip_high"])
    return weight * torch.maximum(-advantages * ratio, -advantages * clipped)


def learning_rate(config: Config, step: int) -> float:
    """Linear warm-up, then the schedule."""
    learner = config.learner
    if step <= learner.warmup_steps:
        return learner.lr * step / learner.warmup_steps
    done = min(1.0, (step - learner.warmup_steps) / max(1, learner.total_steps - learner.warmup_steps))
    if learner.schedule == "linear":
        return learner.lr * (1 - 0.9 * done)
    if learner.schedule == "cosine":
        return learner.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
    return learner.lr
