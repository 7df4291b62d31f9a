"""Whether a group that arrived is one that may be trained. Pure: every refusal is a sentence."""

import math
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from replay.messages import EvaluationResult, Float32, Group, Int32
from replay.routing import problem_with_group
from replay.scores import problem_with_scores
from replay.state.answers import problem_with_errors
from replay.state.buffer import IN_ORDER
from replay.state.evaluation_parts import EvaluationWork
from replay.state.leases import Slot
from slipstream.families.experts import Experts
from slipstream.families.pictures import problem_with as problem_with_pictures

LOGPROB_SLACK = 1e-3


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no token can be above."""

    newest_version: int
    vocab_size: int | None
    """None where the model's config does not say."""
    experts: Experts | None = None
    """Of which the routing is replayed."""


def problem_with(group: Group, slot: Slot, config: Config, bounds: Bounds) -> str | None:
    """What is wrong with a decoded group (so types and dtypes are those of the schema) for its slot, or None."""
    n, trajectories = config.rollout.group_size, group.samples.size or group.lengths.size
    if trajectories != n or group.rewards.size != n or len(group.finish_reasons) != n:
        return f"{trajectories} trajectories, {group.rewards.size} rewards; a group has {n}"
    if (problem := problem_with_errors(group, n)) is not None:
        return problem
    fewest = 1 - group.left_out.astype(np.int32) if group.left_out.size else np.ones(n, np.int32)
    if group.samples.size and ((group.samples < fewest).any() or int(group.samples.sum()) != group.lengths.size):
        return f"samples {group.samples[:8].tolist()}... do not add up to {group.lengths.size} lengths"
    if group.samples.size and (most := int(group.samples.max())) > config.environment.max_turns:
        return f"{most} samples of a trajectory (environment.max_turns {config.environment.max_turns})"
    if group.attempt > slot.attempt or group.attempt < 1:
        return f"attempt {group.attempt} was never leased (the last is {slot.attempt})"
    if not group.lengths.size:
        return None  # every episode failed before its first turn
    problem = _shape_problem(group, config) or _value_problem(group, bounds.vocab_size)
    problem = problem or problem_with_pictures(group.pictures, group.picture_bytes, slot.row)
    problem = problem or problem_with_group(group, bounds.experts)
    problem = problem or problem_with_scores(group, n, config.scoring, bounds.vocab_size, bounds.newest_version)
    return problem or _version_problem(group, slot, config, bounds.newest_version)


def _shape_problem(group: Group, config: Config) -> str | None:
    if int(group.lengths.min()) < 1:
        return "a trajectory has no tokens"
    problem = _prompt_problem(group, config)
    if problem is not None:
        return problem
    if int(group.lengths.max()) > config.rollout.max_new_tokens:
        return f"answer of {int(group.lengths.max())} tokens (rollout.max_new_tokens {config.rollout.max_new_tokens})"
    total = int(group.lengths.sum(dtype=np.int64))
    if any(len(policy) != 2 for policy in group.policies):
        return "an entry of policies is not [incarnation, version]"
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        size = getattr(group, name).size
        if size != total:
            return f"{name} has {size} entries for {total} tokens"
    return None


def _prompt_problem(group: Group, config: Config) -> str | None:
    limit, own = config.data.max_prompt_tokens, group.prompt_lengths
    if not own.size:
        size = group.prompt_ids.size
        return f"prompt of {size} tokens (data.max_prompt_tokens {limit})" if not 1 <= size <= limit else None
    total = int(own.sum(dtype=np.int64))
    if own.size != group.lengths.size or int(own.min()) < 1 or total != group.prompt_ids.size:
        return f"{own.size} prompts of {total} tokens for {group.lengths.size} samples and {group.prompt_ids.size} ids"
    longest = int((own + group.lengths).max())
    if longest > (most := limit + config.rollout.max_new_tokens):
        return f"a sample of {longest} tokens (data.max_prompt_tokens + rollout.max_new_tokens is {most})"
    return None


def _value_problem(group: Group, vocab_size: int | None) -> str | None:
    problem = id_problem(group.token_ids, vocab_size) or id_problem(group.prompt_ids, vocab_size)
    if problem is not None:
        return problem
    if int(group.loss_mask.max()) > 1:
        return "a loss mask that is not 0 or 1"
    problem = logprob_problem(group.logprobs)
    if problem is not None:  # tokens that were not sampled may carry anything
        problem = logprob_problem(group.logprobs[group.loss_mask != 0])
    if problem is not None:
        return problem
    if not np.isfinite(group.rewards).all():
        return "a reward that is not finite"
    if not all(map(math.isfinite, (group.generate_s, *group.reward_metrics.values()))):
        return "a metric that is not finite"
    return None


def id_problem(token_ids: Int32, vocab_size: int | None) -> str | None:
    """What is wrong with token ids (at least one), or None."""
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0:
        return f"a negative token id {low}"
    return f"token id {high} of a vocabulary of {vocab_size}" if vocab_size is not None and high >= vocab_size else None


def logprob_problem(logprobs: Float32) -> str | None:
    if not logprobs.size:
        return None
    lowest, highest = float(logprobs.min()), float(logprobs.max())  # both are NaN where one token's is
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return "a logprob that is not finite"
    return f"a positive logprob ({highest:.3g})" if highest > LOGPROB_SLACK else None


def _version_problem(group: Group, slot: Slot, config: Config, newest_version: int) -> str | None:
    oldest, newest = int(group.versions.min()), int(group.versions.max())
    if group.policies and newest != max(policy[-1] for policy in group.policies):
        return f"policies {group.policies[-3:]}, and its newest token is of version {newest}"
    if newest > newest_version or oldest < 0:
        return f"tokens of version {newest if newest > newest_version else oldest}, published are 0 to {newest_version}"
    if config.replay.on_stale in IN_ORDER and oldest < slot.min_version:
        return f"tokens of version {oldest}, this lease needs {slot.min_version} or newer"
    return None


def problem_with_evaluation(result: EvaluationResult, work: EvaluationWork | None) -> str | None:
    if work is None:
        return f"set {result.set!r} from prompt {result.first} on was not asked for"
    sizes = {result.rewards.size, result.lengths.size, len(result.texts), len(result.finish_reasons)}
    if sizes != {work.num_answers} or result.samples != work.samples:
        return f"{sorted(sizes)} answers, {result.samples} each, for {len(work.prompts)} prompts, {work.samples} each"
    if not np.isfinite(result.rewards).all():
        return "a reward that is not finite"
    return problem_with_errors(result, work.num_answers)
