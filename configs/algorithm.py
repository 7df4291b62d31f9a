"""How answers become updates: sampling, groups, lag, advantages and the loss."""

from typing import Any, Literal

from pydantic import Field

from configs.base import Section


class Rollout(Section):
    """Rollout servers: the engine and how it samples."""

    engine: Literal["auto", "torch", "sglang"] = "auto"
    """`torch` is embedded and made for CPUs and small models, `sglang` the production engine; `auto` is torch on a CPU
    and sglang on GPUs."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per prompt (verl: rollout.n)."""
    groups_per_step: int = Field(default=64, ge=1)
    """Groups in one optimizer step (verl: data.train_batch_size)."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """An answer is cut (finish reason `length`) after this many tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; behaviour and trainer logprobs are both taken at it."""
    max_running: int = Field(default=256, ge=1)
    """Trajectories that one engine decodes at once."""
    on_new_weights: Literal["auto", "keep_kv", "recompute_kv", "drain"] = "auto"
    """What running requests do at an update; `auto` is `drain` at lag 0 and `keep_kv` above."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the engine's weights and of the weight bus's wire; `auto` is float32 on a CPU, bfloat16 on GPUs."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the embedded torch engine."""
    sglang: dict[str, Any] = Field(default={})
    """Passed to SGLang's ServerArgs as it is, for example `{mem_fraction_static: 0.7, attention_backend: fa3}`."""
    engine_deadline_s: float = Field(default=120.0, gt=0)
    """An engine that runs requests and shows no token for this long, or does not answer a call, is dead (SGLang)."""
    restarts: int = Field(default=3, ge=0)
    """How often the launcher starts a dead local rollout server again; an hour of good running refills it."""
    restart_backoff_s: float = Field(default=1.0, ge=0)
    """Wait before the first restart; doubles with each."""
    wait_for_servers_s: float = Field(default=300.0, gt=0)
    """How long the run waits for any rollout server before it stops with an error."""


class Replay(Section):
    """Leases, admission and staleness."""

    async_lag: int = Field(default=1, ge=0)
    """Most policy versions between sampling a token and training on it; 0 is synchronous."""
    on_stale: Literal["wait", "mask", "drop"] = "wait"
    """What happens to tokens above the bound: `wait` never admits any; `mask` leaves them out of the
    loss; `drop` leases the prompt once more, then drops it as `too_slow`."""
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


class Algorithm(Section):
    """Advantages and loss. Formulas and sources stand in learner/advantages.py and learner/losses/."""

    advantage: Literal["grpo"] = "grpo"
    """GRPO: reward minus group mean, over the group's standard deviation."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO)."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and take another prompt instead (DAPO)."""
    max_flat_drops: float = Field(default=4.0, gt=0)
    """Most groups that dynamic sampling drops for a step, in units of rollout.groups_per_step; more are kept."""
    drop_zero_advantage: bool = True
    """Leave trajectories of zero advantage out of the batch and of its token count."""
    loss: Literal["ppo_clip", "decoupled_ppo", "policy_gradient"] = "ppo_clip"
    """`ppo_clip` corrects for lag by its ratio against the behaviour logprobs; `policy_gradient`
    corrects nothing and is refused above lag 0 unless i_know_this_is_biased is set."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """PPO clip range below 1."""
    clip_high: float = Field(default=0.28, gt=0)
    """PPO clip range above 1 (clip-higher, DAPO)."""
    max_prox_weight: float = Field(default=2.0, gt=0)
    """Cap of the proximal importance weight in decoupled_ppo."""
    i_know_this_is_biased: bool = False
    """Allow an asynchronous run without an off-policy correction (negative controls)."""
