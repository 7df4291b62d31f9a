"""How answers become updates: sampling, groups, lag, advantages and the loss."""

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.auto import ENGINE_S
from configs.base import Dtype, ModelFolder, Own, OwnPath, Section
from configs.engines import ENGINES, EngineFacts
from configs.variants import Choice, Chosen, ChosenOrNone


class Rollout(Section):
    """Rollout servers: the engine and how it samples."""

    engine: Literal["auto", *ENGINES] = "auto"  # type: ignore[valid-type]
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
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=16)
    """Strings that end an answer; its text ends before the first, and the token that completes it is trained."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; behaviour and trainer logprobs are both taken at it."""
    max_running: Own[int] = Field(default=256, ge=1)
    """Trajectories that one engine decodes at once."""
    on_new_weights: Literal["auto", "keep_kv", "recompute_kv", "drain"] = "auto"
    """What running requests do at an update; `auto` is `drain` at lag 0 and `keep_kv` above."""
    dtype: Dtype = "auto"
    """Dtype of the engine's weights and of the weight bus's wire; `auto` is float32 on a CPU, bfloat16 on GPUs."""
    num_threads: Own[int] = Field(default=1, ge=1)
    """CPU threads of the embedded torch engine."""
    sglang: Own[dict[str, Any]] = Field(default={})
    """Passed to SGLang's ServerArgs as it is, for example `{mem_fraction_static: 0.7, attention_backend: fa3}`."""
    engine_deadline_s: Own[float] = Field(default=ENGINE_S, gt=0)
    """An engine that runs requests and shows no token for this long, or does not answer a call, is dead (SGLang)."""
    restarts: Own[int] = Field(default=3, ge=0)
    """How often the launcher starts a dead local rollout server again; an hour of good running refills it."""
    restart_backoff_s: Own[float] = Field(default=1.0, ge=0)
    """Wait before the first restart; doubles with each, to 8 s at most."""
    wait_for_servers_s: float = Field(default=300.0, gt=0)
    """How long the run waits for any rollout server before it stops with an error."""

    @property
    def facts(self) -> EngineFacts:
        """Of the engine, once `auto` is resolved."""
        return ENGINES[self.engine]


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
    journal_dir: Own[str | None] = None
    """Where the journal is, instead of the run folder: a local NVMe of the first learner node, say, where that is on a
    shared disk. Each run has a folder of its own in it, and `journal` in the run folder leads there."""
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


class Algorithm(Section):
    """Advantages and loss. Formulas and sources stand in docs/algorithms.md."""

    advantage: Chosen = Choice("grpo")
    """What a reward is compared with: group mean and standard deviation (`grpo`), group mean (`dr_grpo`), the other
    answers of the group (`rloo`), group mean, as a divisor too (`maxrl`), the batch (`reinforce++`), both
    (`reinforce++_baseline`), a critic's values of each token (`gae`, section critic), or one of yours."""
    dynamic_sampling: ChosenOrNone = None
    """Filter of finished groups; another prompt takes the place of one that it drops: `none`, `flat` (or true), which
    drops groups whose rewards are all equal (DAPO), or one of yours."""
    max_flat_drops: float = Field(default=4.0, gt=0)
    """Most groups that algorithm.dynamic_sampling drops for a step, in units of rollout.groups_per_step; more are
    kept."""
    drop_zero_advantage: bool = True
    """Leave trajectories of zero advantage out of the batch and of its token count; not with `gae`, kl_in `reward`
    or distillation, where tokens teach more than rewards do."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Last tokens before rollout.max_new_tokens that cost reward, more with each (DAPO); 0 has no such tokens."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What an answer as long as rollout.max_new_tokens loses to overlong_buffer."""
    overlong_filter: bool = False
    """Leave answers that were cut at rollout.max_new_tokens out of the loss; their rewards still count in their group
    (DAPO)."""
    loss: Chosen = Choice("ppo_clip")
    """`ppo_clip`, `gspo`, `cispo`, `sapo`, `dppo_tv`, `policy_gradient`, or one of yours, with its options, such as
    {ppo_clip: {clip_low: 0.2, clip_high: 0.28}}."""
    proximal: Literal["behaviour", "log_linear", "current"] = "behaviour"
    """The policy that ratios are taken against: the one that sampled the token, a log-linear mean of it and the one in
    training, or the policy at the start of the step (decoupled PPO). The last two need a correction, `log_linear`
    also a loss with a ratio."""
    correction: ChosenOrNone = None
    """Weight for the distance to the policy that sampled, truncated or masked, per token or per answer: `none`,
    `token_tis`, `icepop`, `sequence_tis`, `sequence_mis`, `geometric_mis`, or one of yours, with its options, such as
    {icepop: {low: 0.5, high: 5}}."""
    veto_low: float = Field(default=0.0, ge=0, lt=1)
    """Leave out an answer with a token whose importance ratio is below this (slime: 1e-4); 0 has no such bound."""
    veto_high: float = Field(default=0.0, ge=0)
    """Leave out an answer with a token whose importance ratio is above this (SkyRL: 100); 0 has no such bound."""
    routing_replay: bool = True
    """Of a mixture of experts: the learner computes a token by the experts that the engine has chosen for it, which
    travel with the answers (R3, 2510.11370); false has its router choose anew."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Loss of a batch: mean over tokens (DAPO), mean over answers of their token means (GRPO, GSPO), or mean over
    answers of their token sums over rollout.max_new_tokens (Dr. GRPO)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus, averaged like the loss."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Factor of the load balancing loss of a mixture of experts, over the tokens of each microbatch and the mean over
    layers (transformers: 0.001); with it, gradients depend on how a batch is divided into microbatches."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL divergence from a reference model; `none` needs no such model, and `k1` goes into the reward
    alone."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: into the loss, or into the reward, before advantages."""
    kl_coef: float = Field(default=1e-3, ge=0)
    """Factor of the KL term (verl: 0.001)."""
    reference_path: OwnPath[ModelFolder | None] = None
    """The reference model, as in model.path a folder, a checkpoint or a run; unset: model.path, the policy as it
    began."""
    reference_refresh_steps: int = Field(default=0, ge=0)
    """Steps after which the reference becomes a copy of the policy; 0 keeps it as it began."""
    distillation: ChosenOrNone = None
    """What is learned from `teachers`: `none`; `sampled_advantage`, their logprobs of the sampled tokens as advantages;
    `sampled`, the same as a loss; `top_k`, their own k likeliest tokens; `full`, their whole vocabulary, or one of
    yours, with its options, such as {top_k: {k: 20, task: 0.0}}."""
    i_know_this_is_biased: bool = False
    """Allow an asynchronous run without an off-policy correction (negative controls)."""

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _is_of_flat_groups(cls, value: Any) -> Any:
        return {True: "flat", False: None}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _is_possible(self) -> "Algorithm":
        """Raises ValueError with the first thing that a check has found; learner/rules.py has those of variants."""
        for problem in itertools.chain(self._kl(), self._bounds()):
            raise ValueError(problem)
        return self

    def _kl(self) -> Iterator[str]:
        """The KL term does nothing, or a key of it has no term to act on."""
        if self.kl_in == "reward" and self.kl == "none":
            yield "kl_in: 'reward' without an estimator; set algorithm.kl to k1, k2 or k3"
        if self.kl == "k1" and self.kl_in == "loss":
            yield (
                "kl: 'k1' with kl_in 'loss' has a gradient of 0 in expectation and regularises nothing; take kl 'k2' or"
                " 'k3', or kl_in 'reward'"
            )

    def _bounds(self) -> Iterator[str]:
        """A token of the policy itself has the ratio 1."""
        if 0 < self.veto_high <= 1:
            yield (
                f"veto_high: {self.veto_high:g} leaves out every answer, whose ratios are about 1; take more than 1,"
                " such as 100, or 0 for no such bound"
            )


class Critic(Section):
    """The value model of algorithm.advantage `gae`: the policy's backbone with a scalar head, and its own optimizer."""

    path: OwnPath[ModelFolder | None] = None
    """What the critic starts from, as in model.path a folder, a checkpoint or a run, with its `score.weight` as head
    where it has one; unset: model.path, with a head of zeros."""
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
