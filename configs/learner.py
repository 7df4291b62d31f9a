"""The learner: optimizer, meshes, adapters and checkpoints."""

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from configs.base import Dtype, Own, Section
from configs.errors import did_you_mean
from configs.variants import Choice, Chosen
from slipstream.families.record import Projection

PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
"""Of attention and MLP, in the order of a decoder layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveFacts:
    """What is learned, and where its groups come from."""

    answers: int = 0
    """Trajectories that replay makes of a row of data.train; 0: rollout servers sample rollout.group_size of them."""
    compares: bool = False
    """Whether the loss compares the trajectories of a group, which then lie in one microbatch, and trajectories count
    alike, however long."""
    has_reference: bool = False
    """Whether the loss compares with algorithm.reference_path, or model.path as it began."""

    @property
    def from_data(self) -> bool:
        """Whether answers come from the dataset: nothing is sampled, so there is no lease, reward nor lag."""
        return self.answers > 0


OBJECTIVES = {
    "rl": ObjectiveFacts(),
    "sft": ObjectiveFacts(answers=1),
    "dpo": ObjectiveFacts(answers=2, compares=True, has_reference=True),
}
"""By learner.objective, what processes go by; the losses are in learner/losses/taught.py."""


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


class SftTerm(Section):
    """A loss on answers in a dataset of its own, beside what is learned from rewards."""

    data: Own[str | None] = None
    """Rows with their answers, as data.train has them with learner.objective `sft`; null has no such term."""
    coef: float = Field(default=0.1, gt=0)
    """Factor of their mean cross-entropy in the loss."""
    rows_per_step: int = Field(default=16, ge=1)
    """Rows in each batch; which ones follows from run.seed and the step."""

    @model_validator(mode="after")
    def _has_data(self) -> "SftTerm":
        changed = any(getattr(self, name) != field.default for name, field in type(self).model_fields.items())
        if self.data is None and changed:
            raise ValueError("data: missing; name the rows that the term is about, or leave its other keys out")
        return self


class Mesh(Section):
    """How learner ranks share the model. Their number over the product of these shards parameters (FSDP2)."""

    replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model, whose gradients are added up (HSDP): less traffic between nodes, more memory."""
    tensor: int = Field(default=1, ge=1)
    """Ranks of one node that divide heads, the MLP and the vocabulary among them, and compute the same rows."""

    expert: int = Field(default=1, ge=1)
    """Neighbouring ranks that divide the experts of a mixture among them and send tokens to each other; each has rows
    of its own. The rest of the model, and blocks of experts, are sharded as without."""

    def __str__(self) -> str:
        return f"replicate {self.replicate} × tensor {self.tensor} × expert {self.expert}"

    @property
    def size(self) -> int:
        """Ranks must be a multiple of it."""
        return self.replicate * self.tensor * self.expert


class LearnerSettings(Section):
    """FSDP2 training with fp32 master weights."""

    objective: Chosen = Choice("rl")
    """What is learned: `rl`, from rewards of sampled answers; from data.train, which replay makes groups of by itself,
    `sft`, its answers, or `dpo`, the better of two, with options beta and label_smoothing (docs/howto/sft.md)."""
    total_steps: int = Field(default=100, ge=0)
    """Steps of the run, each of one batch and one version; 0 evaluates the model and trains nothing."""
    minibatches: int = Field(default=1, ge=1)
    """Parts of a batch, each of whole groups, that get an optimizer update of their own."""
    epochs: int = Field(default=1, ge=1)
    """How often a step goes through its batch (PPO epochs)."""
    target_kl: float = Field(default=0.0, ge=0)
    """A step makes no further update once its KL estimate is above this: k3 over a mini-batch, from the policy that
    sampled, or with algorithm.proximal `current` from the one at the start of the step; 0 has no such bound."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW, the same for all updates of a step."""
    warmup_steps: int = Field(default=5, ge=0)
    """Linear warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up (cosine and linear end at 10 % of the peak)."""
    decay_steps: int = Field(default=0, ge=0)
    """Step at which cosine and linear end, for a run that is to go on longer or shorter; 0: total_steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms, biases and the token embedding have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm clip."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Tokens that one rank holds in one forward. A prompt that is computed once counts once; what is copied for it, see
    share_prefixes, counts an eighth."""
    share_prefixes: Literal["auto"] | bool = "auto"
    """Compute a prompt once for the answers of its group that lie in one microbatch: the same gradients from fewer
    tokens. `auto`: where that saves more than the copies of keys and values cost, from 64 prompt tokens on."""
    mesh: Mesh = Mesh()
    """What ranks do beside sharding (docs/howto/memory.md)."""
    compute_dtype: Dtype = "auto"
    """Dtype of the forward and backward, `auto` is float32 on a CPU and bfloat16 on GPUs; master weights, optimizer and
    reductions stay float32."""
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """`varlen` puts trajectories in one row without padding (torch's kernel on CUDA with bfloat16, a slow loop
    elsewhere); `sdpa` pads; `auto` takes the kernel where it runs."""
    recompute: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward computes again: `selective` keeps products and attention, and makes a mixture of
    experts again; `full` keeps each layer's input only, for about a quarter more time; `auto` is the fastest that fits
    into the GPU's memory."""
    compile: Literal["auto"] | bool = "auto"
    """Compile each decoder layer, once for rows of any length: faster steps with less memory, a first step of a minute.
    `auto` does so on GPUs, except with tensor ranks and offload_activations."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in pinned host memory, 8 bytes a parameter of a rank: the same numbers, and a copy each way
    in every step."""
    offload_activations: bool = False
    """Keep the layers' inputs in pinned host memory until the backward computes the layers again (`recompute` full)."""
    lora: Lora = Lora()
    """Adapters in training in place of the weights; off with rank 0."""
    sft: SftTerm = SftTerm()
    """A term of supervised learning beside `rl`."""

    @property
    def facts(self) -> ObjectiveFacts:
        """Of learner.objective."""
        return OBJECTIVES[self.objective.name]

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates that a step makes at most."""
        return self.minibatches * self.epochs

    @field_validator("objective")
    @classmethod
    def _is_known(cls, value: Choice) -> Choice:
        if value.name not in OBJECTIVES:
            hint = did_you_mean(value.name, OBJECTIVES) or f"take one of {', '.join(OBJECTIVES)}"
            raise ValueError(f"{value.name!r} is no objective; {hint}")
        if value.options and not OBJECTIVES[value.name].from_data:
            raise ValueError(f"{value.name!r} has no options of its own; section algorithm has them")
        return value

    @field_validator("betas")
    @classmethod
    def _are_of_a_mean(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each is the share of the old moment in a moving mean; give two from 0 to below 1")
        return value

    deterministic: bool = False
    """Kernels that make the same bits of the same batch, so that a resumed run on GPUs repeats its digests; slower."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank."""
    batch_deadline_s: float = Field(default=600.0, gt=0)
    """How long a rank waits for its batch before the run stops and names what was missing: longer than the rollout
    servers need for a step."""
    collective_deadline_s: float = Field(default=300.0, gt=0)
    """How long a rank waits for the others inside a collective, before a dead link or a rank that stands still ends the
    learner; above weight_bus.deadline_s, for which rank 0 may be late."""
    restarts: int = Field(default=3, ge=0)
    """How often the launcher starts a killed learner again, from its newest checkpoint (one learner node).
    An hour of good running refills it, or twice batch_deadline_s where that is longer."""


class Checkpoint(Section):
    """DCP state and a Hugging Face folder, written together."""

    every_steps: int = Field(default=50, ge=0)
    """Steps between checkpoints, which a killed learner repeats; 0 writes the last step only."""
    keep: int = Field(default=2, ge=1)
    """Complete checkpoints kept, the newest first."""
    keep_best: int = Field(default=0, ge=0)
    """Further checkpoints kept for their evaluation, the best first, as weights alone (hf/)."""
    best_metric: str | None = None
    """What keep_best goes by: a name of an evaluation in metrics.jsonl, such as `val-core/gsm8k/greedy`."""
    best_is: Literal["max", "min"] = "max"
    """Whether more of best_metric is better, or less."""
    hf_dtype: Dtype = "auto"
    """Dtype of hf/; `auto` is that of the engines on a CPU (float32) and on GPUs (bfloat16). dcp/ is always float32."""
    asynchronous: bool = True
    """Copy to host memory and write while training goes on; false trains on when all is on the disk."""
    deadline_s: float = Field(default=1800.0, gt=0)
    """A checkpoint that takes longer to write ends the run."""
