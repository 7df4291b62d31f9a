"""The learner: optimizer, evaluation, checkpoints and the limits past which a run stops by itself."""

from typing import Literal, get_args

from pydantic import Field, field_validator

from configs.base import Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
"""Of attention and MLP, in the order of a decoder layer."""


class Lora(Section):
    """Low-rank adapters in training in place of the weights, which stay as they are (Hu et al. 2021, 2106.09685)."""

    rank: int = Field(default=0, ge=0)
    """Rows of A and columns of B of each adapter; 0 trains all weights."""
    alpha: float = Field(default=32.0, gt=0)
    """What an adapter adds is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[Projection] = "all-linear"
    """Projections that get an adapter; `all-linear` is all of attention and MLP."""

    @field_validator("targets")
    @classmethod
    def _are_some(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and (not value or len(set(value)) < len(value)):
            raise ValueError("name each projection once, such as [q_proj, v_proj], or take all-linear")
        return value

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The targets by name, in the order of a decoder layer."""
        return tuple(name for name in PROJECTIONS if self.targets == "all-linear" or name in self.targets)


class LearnerSettings(Section):
    """FSDP2 training with fp32 master weights."""

    total_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=5, ge=0)
    """Linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up (cosine and linear end at 10 % of the peak)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm clip."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Padded tokens that one rank holds in one forward."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the forward and backward, `auto` is float32 on a CPU and bfloat16 on GPUs; master weights, optimizer and
    reductions stay float32."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """`varlen` puts trajectories in one row without padding (torch's kernel on CUDA with bfloat16, a slow loop
    elsewhere); `sdpa` pads; `auto` takes the kernel where it runs."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward computes again: `selective` keeps products and attention, `full` keeps each layer's
    input only, for about a quarter more time; `auto` is the fastest that fits into the GPU's memory."""
    compile: bool = False
    """Compile each decoder layer, once for rows of any length: faster steps, a first step of half a minute."""

    lora: Lora = Lora()
    """Adapters in training in place of the weights; off with rank 0."""

    @field_validator("recompute", mode="before")
    @classmethod
    def _was_a_switch(cls, value: object) -> object:
        """Files of older runs say true or false."""
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""
    batch_deadline_s: float = Field(default=600.0, gt=0)
    """How long a rank waits for its batch before the run stops and names what was missing."""
    restarts: int = Field(default=3, ge=0)
    """How often the launcher starts a killed learner again, from its newest checkpoint (one learner node).
    An hour of good running refills it, or twice batch_deadline_s where that is longer."""


class Evaluation(Section):
    """Evaluation at one stated version, beside training."""

    every_steps: int = Field(default=10, ge=0)
    """Evaluate versions that are multiples of this, version 0 and the last; 0 switches it off."""
    num_prompts: int = Field(default=512, ge=1)
    """Prompts to evaluate, from the start of data.eval; a smaller file is evaluated whole."""
    greedy: bool = True
    """One greedy answer a prompt."""
    sampled: bool = True
    """One answer a prompt at rollout.temperature."""
    deadline_s: float = Field(default=300.0, gt=0)
    """An evaluation that takes longer is given up, counted and named."""


class Checkpoint(Section):
    """DCP state and a Hugging Face folder, written together."""

    every_steps: int = Field(default=50, ge=0)
    """Steps between checkpoints, which a killed learner repeats; 0 writes the last step only."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints kept, the newest first."""


class Limits(Section):
    """Health checks for runs that look fine and are not. Each counts consecutive steps; 0 switches it off."""

    flat_reward_steps: int = Field(default=50, ge=0)
    """Every group's rewards equal (nothing to learn from)."""
    zero_gradient_steps: int = Field(default=5, ge=0)
    """Gradient norm exactly zero although advantages are not."""
    nonfinite_steps: int = Field(default=3, ge=0)
    """Loss or gradient not finite; each such step is skipped and counted."""
    max_logprob_diff: float = Field(default=1e-3, gt=0)
    """At lag 0 in float32: mean difference of behaviour and trainer logprobs above which the run stops."""
