"""How answers become updates: sampling, groups, lag, advantages and the loss."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.base import Own, OwnPath, Section


class Rollout(Section):
    """Rollout servers: the engine and how it samples."""

    engine: Literal["auto", "torch", "sglang"] = "auto"
    """`torch` is embedded and made for CPUs and small models, `sglang` the production engine; `auto` is torch on a CPU
    and sglang on GPUs."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per prompt (verl: rollout.n)."""
    min_group: int | None = Field(default=None, ge=1)
    """Valid answers that a group trains from; with fewer its prompt is leased again, and at last dropped as `poison`.
    null takes half of rollout.group_size, and 2 at least."""
    groups_per_step: int = Field(default=64, ge=1)
    """Groups in one step (verl: data.train_batch_size)."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """An answer is cut (finish reason `length`) after this many tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; behaviour and trainer logprobs are both taken at it."""
    max_running: Own[int] = Field(default=256, ge=1)
    """Trajectories that one engine decodes at once."""
    on_new_weights: Literal["auto", "keep_kv", "recompute_kv", "drain"] = "auto"
    """What running requests do at an update; `auto` is `drain` at lag 0 and `keep_kv` above."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the engine's weights and of the weight bus's wire; `auto` is float32 on a CPU, bfloat16 on GPUs."""
    num_threads: Own[int] = Field(default=1, ge=1)
    """CPU threads of the embedded torch engine."""
    sglang: Own[dict[str, Any]] = Field(default={})
    """Passed to SGLang's ServerArgs as it is, for example `{mem_fraction_static: 0.7, attention_backend: fa3}`."""
    engine_deadline_s: Own[float] = Field(default=120.0, gt=0)
    """An engine that runs requests and shows no token for this long, or does not answer a call, is dead (SGLang)."""
    restarts: Own[int] = Field(default=3, ge=0)
    """How often the launcher starts a dead local rollout server again; an hour of good running refills it."""
    restart_backoff_s: Own[float] = Field(default=1.0, ge=0)
    """Wait before the first restart; doubles with each."""
    wait_for_servers_s: float = Field(default=300.0, gt=0)
    """How long the run waits for any rollout server before it stops with an error."""


class Replay(Section):
    """Leases, admission and staleness."""

    async_lag: int = Field(default=1, ge=0)
    """Most policy versions between sampling a token and training on it; 0 is synchronous."""
    on_stale: Literal["wait", "mask", "drop", "substitute"] = "wait"
    """What happens to tokens above the bound: `wait` never admits any; `mask` leaves them out of the
    loss; `drop` leases the prompt once more, then drops it as `too_slow`; `substitute` is `wait`, but a group that
    holds its step up past replay.substitute_after_s is dropped as `substituted`."""
    substitute_after_s: float = Field(default=60.0, gt=0)
    """With on_stale `substitute`: from a group's first lease on; then the next finished group takes its place."""
    lease_s: float = Field(default=120.0, gt=0)
    """A lease that is not renewed for this long goes back to the queue."""
    max_attempts: int = Field(default=3, ge=1)
    """Failures of one prompt before it is dropped as `poison`. Lost servers and expired leases do not count; ten times
    as many of them drop it as `interrupted`."""
    partial_rollouts: bool = False
    """Servers report the tokens of running answers, and a server that takes over a lease goes on from them."""
    fsync: Literal["every", "interval", "never"] = "interval"
    """When the journal reaches the disk: before each ack, every second, or when the system likes. `kill -9` costs
    nothing in any mode; a power failure costs nothing, about a second, or about half a minute. With `never` it may
    leave a journal that is refused as damaged."""
    journal_keep: Literal["checkpoint", "all"] = "checkpoint"
    """`checkpoint` deletes what no kept checkpoint needs; `all` keeps every group, for `--replay` from step 0."""
    journal_max_bytes: int = Field(default=32 * 1024**3, ge=1024 * 1024)
    """Above this size replay asks the learner for a checkpoint, which frees the journal (not with journal_keep all)."""
    on_divergence: Literal["supersede", "stop"] = "supersede"
    """A resumed step whose weights differ from the journalled ones: `supersede` throws away what the lost policies have
    sampled and goes on; `stop` ends the run."""
    wait_for_learner_s: float = Field(default=300.0, gt=0)
    """How long replay waits for a dead learner to return before the run stops with an error."""
    restarts: int = Field(default=3, ge=0)
    """How often the launcher starts a dead replay again, in place; an hour of good running refills it."""


Clip = tuple[float, float]
Ratio = Literal["none", "token", "answer"]
PPO_CLIP: Clip = (0.2, 0.28)
BOUNDS = ("clip_low", "clip_high", "clip_dual")
LEAST_ANSWER_CLIP = 0.01
"""Narrowest bounds of an answer's ratio against a 16-bit engine, whose rounding moves it by up to half as much."""
WIDE_ANSWER_CLIP = 0.02


@dataclass(frozen=True, slots=True)
class LossTraits:
    """What the guards of lag, correction and bounds go by."""

    ratio: Ratio = "none"
    """Of policy to proximal policy that the loss takes: none, each token's own, or one of the whole answer."""
    bounds: tuple[str, ...] | None = ()
    """Which of BOUNDS it reads; None: nobody knows."""
    clip: Clip = PPO_CLIP
    """(clip_low, clip_high) where the configuration gives none."""

    @property
    def has_ratio(self) -> bool:
        return self.ratio in ("token", "answer")


LOSSES: dict[str, LossTraits] = {
    "ppo_clip": LossTraits("token", BOUNDS),  # bounds of DAPO
    "gspo": LossTraits("answer", ("clip_low", "clip_high"), (3e-4, 4e-4)),  # of the paper
    "cispo": LossTraits("token", ("clip_high",), (1.0, 4.0)),  # of TRL and ScaleRL
    "sapo": LossTraits("token"),
    "dppo_tv": LossTraits("token"),
    "policy_gradient": LossTraits(),
}
UNDECLARED = LossTraits(bounds=None)
"""Of a loss from a file that says nothing: uncorrected, unless algorithm.correction is set."""
CORRECTIONS: dict[str, Clip] = {
    "token_tis": (0.0, 2.0),
    "icepop": (0.5, 2.0),
    "sequence_tis": (0.0, 5.0),
    "sequence_mis": (0.0, 3.0),
    "geometric_mis": (0.99, 1.01),
}
"""(correction_low, correction_high), where the configuration gives none: see learner/objective/corrections.py."""


class Algorithm(Section):
    """Advantages and loss. Formulas and sources stand in docs/algorithms.md."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce++", "reinforce++_baseline", "gae"] = "grpo"
    """What a reward is compared with: group mean and standard deviation (`grpo`), group mean (`dr_grpo`), the other
    answers of the group (`rloo`), group mean, as a divisor too (`maxrl`), the batch (`reinforce++`), both
    (`reinforce++_baseline`), a critic's values of each token (`gae`, section critic)."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and take another prompt instead (DAPO)."""
    max_flat_drops: float = Field(default=4.0, gt=0)
    """Most groups that dynamic sampling drops for a step, in units of rollout.groups_per_step; more are kept."""
    drop_zero_advantage: bool = True
    """Leave trajectories of zero advantage out of the batch and of its token count; not with `gae` nor kl_in `reward`,
    where advantages follow from more than rewards."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Last tokens before rollout.max_new_tokens that cost reward, more with each (DAPO); 0 has no such tokens."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What an answer as long as rollout.max_new_tokens loses to overlong_buffer."""
    overlong_filter: bool = False
    """Leave answers that were cut at rollout.max_new_tokens out of the loss; their rewards still count in their group
    (DAPO)."""
    loss: str = "ppo_clip"
    """`ppo_clip`, `gspo`, `cispo`, `sapo`, `dppo_tv`, `policy_gradient`, or one of yours: `path/to/file.py:name`."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Clip range below 1; unset: the loss's own, 0.2 for ppo_clip."""
    clip_high: float | None = Field(default=None, gt=0)
    """Clip range above 1; unset: the loss's own, 0.28 for ppo_clip (clip-higher, DAPO)."""
    clip_dual: float = Field(default=0.0, ge=0)
    """Bound of ppo_clip's ratio for negative advantages (dual clip; verl 3); 0 has none."""
    sapo_tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of sapo's gate for positive advantages."""
    sapo_tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of sapo's gate for negative advantages."""
    dppo_delta: float = Field(default=0.2, gt=0, lt=1)
    """Change of a token's probability above which dppo_tv leaves it out."""
    dppo_kl: float = Field(default=1e-3, ge=0)
    """Factor of dppo_tv's squared log ratio."""
    proximal: Literal["behaviour", "log_linear", "current"] = "behaviour"
    """The policy that ratios are taken against: the one that sampled the token, a log-linear mean of it and the one in
    training, or the policy at the start of the step (decoupled PPO). The last two need a correction, `log_linear`
    also a loss with a ratio."""
    correction: Literal["none", "token_tis", "icepop", "sequence_tis", "sequence_mis", "geometric_mis"] = "none"
    """Weight for the distance to the policy that sampled: truncated or masked, per token or per answer."""
    correction_low: float | None = Field(default=None, ge=0)
    """Lower bound of the correction; unset: its own."""
    correction_high: float | None = Field(default=None, gt=0)
    """Upper bound of the correction; unset: its own, 2 for token_tis."""
    veto_low: float = Field(default=0.0, ge=0, lt=1)
    """Leave out an answer with a token whose importance ratio is below this (slime: 1e-4); 0 has no such bound."""
    veto_high: float = Field(default=0.0, ge=0)
    """Leave out an answer with a token whose importance ratio is above this (SkyRL: 100); 0 has no such bound."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Loss of a batch: mean over tokens (DAPO), mean over answers of their token means (GRPO, GSPO), or mean over
    answers of their token sums over rollout.max_new_tokens (Dr. GRPO)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus, averaged like the loss."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL divergence from a reference model; `none` needs no such model, and `k1` goes into the reward
    alone."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: into the loss, or into the reward, before advantages."""
    kl_coef: float = Field(default=1e-3, ge=0)
    """Factor of the KL term (verl: 0.001)."""
    reference_path: OwnPath[str | None] = None
    """Hugging Face folder of the reference model; unset: model.path, the policy as it began."""
    reference_refresh_steps: int = Field(default=0, ge=0)
    """Steps after which the reference becomes a copy of the policy; 0 keeps it as it began."""
    i_know_this_is_biased: bool = False
    """Allow an asynchronous run without an off-policy correction (negative controls)."""

    @field_validator("loss")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in LOSSES or (".py:" in value and value.rpartition(":")[2].isidentifier()):
            return value
        raise ValueError(f"{value!r} is no loss; take one of {', '.join(LOSSES)}, or path/to/file.py:name")

    @model_validator(mode="after")
    def _is_possible(self) -> "Algorithm":
        """Raises ValueError with the first thing that a check has found."""
        own = self.built_in
        if own is not None and (problem := self.problem_with_loss(own)):
            raise ValueError(problem)
        for problem in itertools.chain(self._kl(), self._bounds(), self._advantages()):
            raise ValueError(problem)
        return self

    def problem_with_loss(self, loss: LossTraits) -> str:
        """What keys do not go with a loss of these traits: the distance to the sampler counts twice, or in part.

        Of a loss from a file the traits are known where the file lies, so the launcher and the learner ask there.
        """
        unused = [key for key in BOUNDS if loss.bounds is not None and key not in loss.bounds and getattr(self, key)]
        if unused:
            return (
                f"{unused[0]}: {getattr(self, unused[0]):g} with loss {self.loss!r}, which has no such bound; leave it"
                f" out ({unused[0]}={'0' if unused[0] == 'clip_dual' else 'null'}), or take loss 'ppo_clip'"
            )
        if loss.has_ratio and self.proximal == "behaviour" and self.correction in ("token_tis", "sequence_tis"):
            return (
                f"correction: {self.correction!r} truncates weights only, and the ratio of {self.loss!r} is that weight"
                " already; take proximal 'log_linear', or loss 'policy_gradient', or a correction that masks"
            )
        if not loss.has_ratio and self.proximal == "log_linear":
            return (
                f"proximal: 'log_linear' with loss {self.loss!r}, which declares no ratio against that policy, so that"
                " a correction would weigh only a part of the distance to the policy that sampled; take proximal"
                " 'behaviour', with which it weighs all of it, or loss 'ppo_clip'"
            )
        return ""

    def problem_with_ratio(self, loss: LossTraits, *, lag: int, updates: int, is_exact: bool) -> str:
        """Why its ratio does not correct this lag, or is of rounding alone; empty where all is well.

        Args:
            loss: its traits.
            lag: most policy versions between sampling and training.
            updates: optimizer updates of one step at most.
            is_exact: engine and learner compute in float32.
        """
        if self.i_know_this_is_biased:
            return ""
        if lag > 0 and not self.is_corrected(loss):
            what = f"proximal: {self.proximal!r}" if loss.has_ratio else f"loss: {self.loss!r}"
            return (
                f"{what} corrects nothing for replay.async_lag {lag}, and such runs collapse; take 'ppo_clip', or an"
                " algorithm.correction, or declare the ratio of a loss of your own (docs/algorithms.md), or set"
                " algorithm.i_know_this_is_biased=true for a negative control"
            )
        if updates > 1 and not (loss.has_ratio or (self.proximal == "behaviour" and self.correction != "none")):
            return (
                f"loss: {self.loss!r} has no ratio against the policy that sampled, so updates after the first are off"
                f" by all before them, and learner.minibatches × learner.epochs is {updates}; take 'ppo_clip', or"
                " algorithm.proximal=behaviour with an algorithm.correction, or one update a step"
            )
        low, high = self.clip
        is_narrow = loss.ratio == "answer" and min(low, high) < LEAST_ANSWER_CLIP
        if is_narrow and self.proximal == "behaviour" and not is_exact:
            return (
                f"clip_low: {low:g} and clip_high {high:g} of {self.loss!r} are for a ratio against logprobs that the"
                " trainer computed again; here it is against a 16-bit engine, whose rounding alone passes them; set"
                f" algorithm.clip_low and algorithm.clip_high to {WIDE_ANSWER_CLIP:g} (at least {LEAST_ANSWER_CLIP:g}),"
                " or algorithm.proximal=current with algorithm.correction=token_tis"
            )
        return ""

    def _kl(self) -> Iterator[str]:
        """The KL term does nothing, or a key of it has no term to act on."""
        if self.kl_in == "reward" and self.kl == "none":
            yield "kl_in: 'reward' without an estimator; set algorithm.kl to k1, k2 or k3"
        if self.kl_in == "reward" and self.advantage == "grpo":
            yield (
                "kl_in: 'reward' with advantage 'grpo', whose standard deviation blows the KL term of a group with"
                " equal rewards up to full strength; take advantage 'dr_grpo' or 'rloo', or kl_in 'loss'"
            )
        if self.kl == "k1" and self.kl_in == "loss":
            yield (
                "kl: 'k1' with kl_in 'loss' has a gradient of 0 in expectation and regularises nothing; take kl 'k2' or"
                " 'k3', or kl_in 'reward'"
            )
        if self.kl == "none" and (self.reference_path is not None or self.reference_refresh_steps):
            key = "reference_path" if self.reference_path is not None else "reference_refresh_steps"
            yield f"{key}: nothing uses a reference model; set algorithm.kl to k2 or k3, or leave it out"

    def _bounds(self) -> Iterator[str]:
        """A token of the policy itself has the ratio 1, and what is set and read by nothing would seem to count."""
        if 0 < self.clip_dual <= 1:
            yield (
                f"clip_dual: {self.clip_dual:g} bounds the ratio of every answer of negative advantage where it starts,"
                " at 1, so none has a gradient; take more than 1 + clip_high, such as 3, or 0 for no such bound"
            )
        if 0 < self.veto_high <= 1:
            yield (
                f"veto_high: {self.veto_high:g} leaves out every answer, whose ratios are about 1; take more than 1,"
                " such as 100, or 0 for no such bound"
            )
        low, high = self.correction_bounds
        if self.correction != "none" and not low <= 1 <= high:
            yield (
                f"correction_{'low' if low > 1 else 'high'}: {self.correction!r} with bounds {low:g} and {high:g}, and"
                " a token of the policy itself has the weight 1; take bounds on both sides of 1, or leave them out"
            )
        masks = self.correction in ("icepop", "sequence_mis", "geometric_mis")
        unused = {
            "correction_low": not masks and self.correction_low is not None,
            "correction_high": self.correction == "none" and self.correction_high is not None,
        }
        if key := next((key for key, is_unused in unused.items() if is_unused), None):
            yield (
                f"{key}: {getattr(self, key):g} with correction {self.correction!r}, which has no such bound; leave it"
                f" out ({key}=null), or take a correction that has it, such as 'icepop'"
            )

    def _advantages(self) -> Iterator[str]:
        if self.dynamic_sampling and self.advantages_need_tokens:
            what = "advantage: 'gae'" if self.advantage == "gae" else "kl_in: 'reward'"
            yield (
                f"{what} with dynamic_sampling, which drops groups of equal rewards as if they taught nothing, and here"
                " they do; take dynamic_sampling=false"
            )
        if self.advantage == "maxrl" and (self.kl_in == "reward" or self.overlong_buffer):
            key = "kl_in: 'reward'" if self.kl_in == "reward" else f"overlong_buffer: {self.overlong_buffer}"
            yield (
                f"{key} makes rewards negative, and advantage 'maxrl' takes rewards >= 0 only; leave it out, or take"
                " advantage 'dr_grpo'"
            )

    @property
    def clip(self) -> Clip:
        """(low, high) of the loss."""
        low, high = (self.built_in or UNDECLARED).clip
        return (low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high)

    @property
    def correction_bounds(self) -> Clip:
        """(low, high) of the correction; without one, those of none."""
        low, high = CORRECTIONS.get(self.correction, (0.0, 1.0))
        low = low if self.correction_low is None else self.correction_low
        return low, high if self.correction_high is None else self.correction_high

    @property
    def flat_groups_are_left_out(self) -> bool:
        """Groups whose rewards are all equal cost the learner nothing."""
        compares_groups = self.advantage in ("grpo", "dr_grpo", "rloo", "maxrl")
        return self.drop_zero_advantage and compares_groups and not self.advantages_need_tokens

    @property
    def advantages_need_tokens(self) -> bool:
        """Advantages follow from forwards over the tokens, not from rewards alone."""
        return self.advantage == "gae" or self.kl_in == "reward"

    @property
    def compares_within_groups(self) -> bool:
        """A group of one answer has advantage 0."""
        return self.advantage not in ("gae", "reinforce++")

    @property
    def built_in(self) -> LossTraits | None:
        """Of algorithm.loss; None for one from a file, which only the hosts that have the file can look at."""
        return LOSSES.get(self.loss)

    def is_corrected(self, loss: LossTraits) -> bool:
        """Something accounts for the distance between the policy in training and the one that sampled."""
        return (loss.has_ratio and self.proximal == "behaviour") or self.correction != "none"


class Critic(Section):
    """The value model of algorithm.advantage `gae`: the policy's backbone with a scalar head, and its own optimizer."""

    path: OwnPath[str | None] = None
    """Hugging Face folder that the critic starts from, with its `score.weight` as head where it has one; unset:
    model.path, with a head of zeros."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic; warm-up, schedule, betas and clipping are those of the learner section."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the critic learns and the policy stays as it is; its own warm-up begins after them."""
    updates: int = Field(default=1, ge=1)
    """Critic updates a step, each over the whole batch."""
    clip: float = Field(default=0.5, gt=0)
    """Furthest that a value may move within a step before its loss stops pulling (verl: 0.5); matters from the second
    update on."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation; 1 compares the return with the value, 0 one step ahead."""
    whiten: bool = True
    """Advantages get mean 0 and variance 1 over all tokens of the batch, as in verl."""
