"""What the variants of the algorithm section refuse, each of itself and together. Imports no torch.

The launcher asks before anything starts, the learner when it does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from configs import Config
from configs.learner import Mesh
from learner.advantages import ADVANTAGES, AdvantageFacts, need_tokens
from learner.corrections import CORRECTIONS, CorrectionFacts
from learner.distillation import Distillation, build_distillation
from learner.losses import LOSSES
from learner.losses.base import LossFacts
from learner.losses.taught import TAUGHT
from replay.filters import FILTERS
from slipstream.runtime.variants import Variant


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a run's algorithm section names."""

    loss: Variant[LossFacts]
    advantage: Variant[AdvantageFacts]
    correction: Variant[CorrectionFacts] | None
    distillation: Distillation | None


def chosen(config: Config) -> Chosen:
    """The variants of a run, where their files lie. Raises BadValue."""
    algorithm = config.algorithm
    correction = None if algorithm.correction is None else CORRECTIONS.build(algorithm.correction)
    return Chosen(
        LOSSES.build(algorithm.loss),
        ADVANTAGES.build(algorithm.advantage),
        correction,
        build_distillation(algorithm),
    )


def problems(config: Config, parts: Chosen) -> Iterator[str]:
    """Why these variants cannot train this run, each with the key, the value and a way out."""
    if config.learner.facts.from_data:
        named = TAUGHT.build(config.learner.objective).name
        if parts.advantage.facts.needs_critic:
            yield (
                f"algorithm.advantage: {parts.advantage.name!r} with learner.objective {config.learner.objective},"
                " which has no rewards to compare; leave it out"
            )
        yield from _of_mesh(config, "reference", f"learner.objective={named}", is_needed=config.has_reference)
        return
    algorithm, beside = config.algorithm, config.learner.sft.data is not None
    if beside and (need_tokens(algorithm) or algorithm.distillation is not None):
        yield (
            f"learner.sft.data: {config.learner.sft.data!r} with algorithm.advantage {parts.advantage.name!r}, kl_in"
            f" {algorithm.kl_in!r} and distillation {algorithm.distillation or 'none'}: a term beside rewards goes with"
            " advantages that follow from rewards alone, and without distillation; leave learner.sft out"
        )
    for part in (parts.loss, parts.advantage):
        refuses = None if config.algorithm.i_know_this_is_biased else part.facts.refuses
        if refuses is not None and (why := refuses(config, dict(part.options))):
            yield f"algorithm.{'loss' if part is parts.loss else 'advantage'}: {part.name!r}: {why}"
    yield from _of_ratio(config, parts)
    yield from _of_groups(config, parts)
    yield from _of_critic(config, parts.advantage)
    if parts.distillation is not None:
        yield from _of_teachers(config, parts.distillation)


def _of_ratio(config: Config, parts: Chosen) -> Iterator[str]:
    """The distance to the policy that sampled counts twice, in part, or not at all."""
    algorithm, loss, correction = config.algorithm, parts.loss.facts, parts.correction
    behaviour, updates = algorithm.proximal == "behaviour", config.learner.updates_per_step
    if correction is not None and loss.has_ratio and behaviour and not correction.facts.masks:
        yield (
            f"algorithm.correction: {correction.name!r} truncates weights only, and the ratio of {parts.loss.name!r} is"
            " that weight already; take proximal 'log_linear', or loss 'policy_gradient', or a correction that masks"
        )
    if not loss.has_ratio and algorithm.proximal == "log_linear":
        yield (
            f"algorithm.proximal: 'log_linear' with loss {parts.loss.name!r}, which declares no ratio against that"
            " policy, so that a correction would weigh only a part of the distance to the policy that sampled; take"
            " proximal 'behaviour', with which it weighs all of it, or loss 'ppo_clip'"
        )
    if algorithm.i_know_this_is_biased:
        return
    if (lag := config.replay.async_lag) > 0 and correction is None and not (loss.has_ratio and behaviour):
        what = f"proximal: {algorithm.proximal!r}" if loss.has_ratio else f"loss: {parts.loss.name!r}"
        yield (
            f"algorithm.{what} corrects nothing for replay.async_lag {lag}, and such runs collapse; take 'ppo_clip', or"
            " an algorithm.correction, or declare the ratio of a loss of your own (docs/algorithms.md), or set"
            " algorithm.i_know_this_is_biased=true for a negative control"
        )
    if updates > 1 and not loss.has_ratio and not (behaviour and correction is not None):
        yield (
            f"algorithm.loss: {parts.loss.name!r} has no ratio against the policy that sampled, so updates after the"
            f" first are off by all before them, and learner.minibatches × learner.epochs is {updates}; take"
            " 'ppo_clip', or algorithm.proximal=behaviour with an algorithm.correction, or one update a step"
        )


def _of_groups(config: Config, parts: Chosen) -> Iterator[str]:
    rollout, algorithm, advantage, distillation = config.rollout, config.algorithm, parts.advantage, parts.distillation
    facts = advantage.facts
    needs_tokens = facts.needs_critic or algorithm.kl_in == "reward"
    sampling = None if algorithm.dynamic_sampling is None else FILTERS.build(algorithm.dynamic_sampling)
    if sampling is not None and needs_tokens and sampling.facts.drops_flat_groups:
        what = f"advantage: {advantage.name!r}" if facts.needs_critic else "kl_in: 'reward'"
        yield (
            f"algorithm.{what} with dynamic_sampling, which drops groups of equal rewards as if they taught nothing,"
            " and here they do; take dynamic_sampling=none"
        )
    if distillation is not None and sampling is not None and sampling.facts.drops_flat_groups:
        yield (
            f"algorithm.distillation: {distillation.name!r} with dynamic_sampling, which drops groups of equal rewards,"
            " and teachers speak of their tokens all the same; take dynamic_sampling=none"
        )
    compares = facts.compares_within_groups and (distillation is None or distillation.task > 0)
    if (compares or sampling is not None) and config.min_group < 2:
        yield (
            f"rollout.group_size: {rollout.group_size} with algorithm.advantage {advantage.name!r}, and"
            f" rollout.min_group {config.min_group}: take 2 or more, and a group that is as large; only an advantage"
            " that compares no answers of a group, such as 'gae', with algorithm.dynamic_sampling=none does with one"
        )


def _of_critic(config: Config, advantage: Variant[AdvantageFacts]) -> Iterator[str]:
    learner, critic, needs_critic = config.learner, config.critic, advantage.facts.needs_critic
    yield from _of_mesh(config, "critic", f"algorithm.advantage={advantage.name}", is_needed=needs_critic)
    yield from _of_mesh(config, "reference", f"algorithm.kl={config.algorithm.kl}", is_needed=config.has_reference)
    if critic.path is not None and not needs_critic:
        yield (
            f"critic.path: {critic.path!r}, but nothing here needs a critic; set algorithm.advantage=gae, or leave it"
            " out"
        )
    if needs_critic and learner.total_steps <= critic.warmup_steps > 0:
        yield (
            f"critic.warmup_steps: {critic.warmup_steps} of learner.total_steps {learner.total_steps}, so the policy"
            " would never learn; take fewer"
        )


def _of_mesh(config: Config, role: str, named: str, *, is_needed: bool) -> Iterator[str]:
    if is_needed and config.learner.mesh != Mesh():
        yield (
            f"learner.mesh: {config.learner.mesh} with a {role} ({named}), which knows ranks that shard and nothing"
            " else; leave learner.mesh out"
        )


def _of_teachers(config: Config, chosen: Distillation) -> Iterator[str]:
    key, options = f"algorithm.distillation: {chosen.name!r}", chosen.options
    is_full, inside = (
        chosen.facts.gives == "vocabulary",
        [n for n, t in config.teachers.items() if t.where == "learner"],
    )
    if is_full and not inside:
        yield (
            f"{key} compares whole vocabularies with a teacher in the learner's ranks, and {', '.join(config.teachers)}"
            " is asked by rollout servers; give it where: learner, or take 'top_k'"
        )
    if inside and not is_full:
        yield (
            f"teachers.{inside[0]}.where: 'learner' with algorithm.distillation {chosen.name!r}, whose teachers rollout"
            " servers ask; take where: own, or distillation 'full'"
        )
    for name in inside:
        teacher = config.teachers[name]
        if wrong := [part for part in ("rows", "context") if getattr(teacher, part)]:
            yield (
                f"teachers.{name}.{wrong[0]}: {getattr(teacher, wrong[0])!r} with where 'learner': that teacher sees"
                " all that the policy is trained on, after the same prompts; leave it out, or take where: own"
            )
    if is_full and config.learner.mesh != Mesh():
        yield (
            f"learner.mesh: {config.learner.mesh} with a teacher in the learner ({key}), which knows ranks that shard"
            " and nothing else; leave learner.mesh out, or take 'top_k'"
        )
    if (options["coef_end"] is None) != (options["over_steps"] == 0):
        yield f"{key}: coef_end and over_steps make a schedule together; give both, or neither"
    if options["coef"] == 0 and not options["coef_end"]:
        yield f"{key}: coef 0 distils nothing; raise it, or take distillation=none and no teachers"
