"""What a learner rank needs of its device's memory, and what is chosen so that it fits. Pure, no torch.

`learner.recompute: auto`, gathered weights that stay for the next microbatch and whole gradients all buy speed with
memory. The budget adds up what is known before a run and takes the fastest way that fits. Activations of a decoder
layer are counted in elements of the compute dtype, per token:

    none       every product, their normed and rotated inputs, the gate         (times EAGER without learner.compile)
    selective  outputs of products and attention
    full       the layer's input, and one layer at a time as with none

The counts were checked against the peaks of two shapes on an H200 (docs/benchmarks/learner.md).
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.learner import LearnerSettings
from configs.schema import Config

Recompute = Literal["none", "selective", "full"]
GIB = 1024**3
RESERVED_SHARE, RESERVED_BYTES = 0.05, GIB
"""Of the device: fragments, and what libraries allocate past torch."""
EAGER = 1.6
"""Activations without the compiler, over those with it: what it fuses is never written."""
HEAD_BYTES = int(1.5 * GIB)
"""Float32 logits of a chunk and their gradient in 16 bit (learner/policy/logprobs.py)."""
COST = {"none": 0.0, "selective": 0.02, "full": 0.25}
REGATHER_COST, SHARDED_COST = 0.04, 0.10
"""Slowdown of a step, roughly: what the choice is ordered by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A dense decoder, as its config.json describes it."""

    hidden: int
    layers: int
    intermediate: int
    query: int
    """Heads times their size."""
    key_value: int
    """Keys and values together."""
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Sizes":
        """From the keys of config.json."""
        heads = int(config["num_attention_heads"])
        dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return cls(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            intermediate=int(config["intermediate_size"]),
            query=heads * dim,
            key_value=2 * int(config.get("num_key_value_heads") or heads) * dim,
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings")),
        )

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer; norms and biases are too small to count."""
        return self.hidden * (2 * self.query + self.key_value + 3 * self.intermediate)

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding; an output head of its own has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.embedding_parameters


@dataclass(frozen=True, slots=True)
class Budget:
    """One way to train, and the bytes that it takes on the fullest rank."""

    recompute: Recompute
    keeps_gathered: bool
    """Gathered weights stay from one microbatch to the next."""
    whole_gradients: bool
    """Every rank adds up whole gradients, and they are summed over ranks once a step."""
    items: dict[str, int] = field(default_factory=dict)
    """Bytes by what they are for."""

    @property
    def total(self) -> int:
        return sum(self.items.values())

    def describe(self, available: int | None) -> str:
        """The lines of `--dry-run`."""
        lines = [f"  {what:<34}{num_bytes / GIB:8.1f} GiB" for what, num_bytes in self.items.items()]
        of = f" of {available / GIB:.1f} GiB" if available is not None else ""
        ways = (
            f"recompute {self.recompute}, weights {'kept' if self.keeps_gathered else 'gathered'} for each microbatch"
        )
        ways += f", gradients {'whole' if self.whole_gradients else 'sharded'}"
        return "\n".join([*lines, f"  {'together':<34}{self.total / GIB:8.1f} GiB{of}: {ways}"])


def usable(device_bytes: int) -> int:
    """What torch may allocate of a device's memory."""
    return int(device_bytes * (1 - RESERVED_SHARE)) - RESERVED_BYTES


def budget_of(config: Config, model: Mapping[str, Any], available: int | None) -> Budget:
    """How a run spends the memory of a learner rank.

    Args:
        config: with every `auto` resolved.
        model: config.json.
        available: bytes, see `usable`; None where memory is no concern.
    """
    return choose(Sizes.of(model), config.learner, available=available, **_bytes_of(config))


def refusal(config: Config, model: Mapping[str, Any], available: int) -> str:
    """What to change where no way fits; empty where one does."""
    budget, sizes = budget_of(config, model, available), Sizes.of(model)
    if budget.total <= available:
        return ""
    tokens = largest_microbatch(sizes, config.learner, available=available, **_bytes_of(config))
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    fits = f"{tokens} tokens fit" if tokens >= longest else f"{tokens} fit, and one trajectory may have {longest}"
    given = config.learner.max_tokens_per_microbatch
    return (
        f"learner.max_tokens_per_microbatch: {given} tokens need {budget.total / GIB:.1f} GiB on a learner GPU"
        f" (recompute {budget.recompute}), and {available / GIB:.1f} GiB are there to use; {fits} with"
        f" {config.num_learner_ranks} learner ranks; lower it, or give the learner more ranks in placement"
    )


def _bytes_of(config: Config) -> dict[str, int]:
    sizes = {"float32": 4, "bfloat16": 2}
    return {
        "num_ranks": config.num_learner_ranks,
        "compute_bytes": sizes[config.learner.compute_dtype],
        "wire_bytes": sizes[config.rollout.dtype] if config.weight_bus.backend == "nccl" else 0,
    }


def choose(
    sizes: Sizes,
    learner: LearnerSettings,
    *,
    num_ranks: int,
    compute_bytes: int,
    wire_bytes: int,
    available: int | None,
) -> Budget:
    """The fastest way that fits; the smallest one where none does.

    Args:
        sizes: of the model.
        learner: its microbatch, `compile` and, where it is not `auto`, `recompute` are taken as given.
        num_ranks: ranks that share the model.
        compute_bytes: of an element of learner.compute_dtype.
        wire_bytes: of an element of rollout.dtype, in which rank 0 holds two packed versions; 0 where it holds none
            on the device.
        available: bytes, see `usable`; None where memory is no concern, as on a CPU.
    """
    ways = sorted(_ways(learner.recompute, num_ranks), key=_cost)
    budgets = (replace(way, items=_items(sizes, learner, way, num_ranks, compute_bytes, wire_bytes)) for way in ways)
    smallest: Budget | None = None
    for budget in budgets:
        if available is None or budget.total <= available:
            return budget
        smallest = budget if smallest is None or budget.total < smallest.total else smallest
    assert smallest is not None
    return smallest


def largest_microbatch(
    sizes: Sizes, learner: LearnerSettings, *, num_ranks: int, compute_bytes: int, wire_bytes: int, available: int
) -> int:
    """Most tokens of a microbatch that fit, in steps of 1,024; 0 where not even those do."""

    def fits(tokens: int) -> bool:
        changed = learner.model_copy(update={"max_tokens_per_microbatch": tokens})
        needed = choose(
            sizes, changed, num_ranks=num_ranks, compute_bytes=compute_bytes, wire_bytes=wire_bytes, available=available
        )
        return needed.total <= available

    low, high = 0, 1024
    while fits(high * 1024) and high < 1 << 20:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * 1024) else (low, middle)
    return low * 1024


def _ways(recompute: str, num_ranks: int) -> Iterator[Budget]:
    levels: list[Recompute] = ["none", "selective", "full"]
    for level, keeps, whole in itertools.product(levels, (True, False), (True, False)):
        if recompute in ("auto", level) and (whole or num_ranks > 1):
            yield Budget(level, keeps, whole)


def _cost(way: Budget) -> float:
    return COST[way.recompute] + REGATHER_COST * (not way.keeps_gathered) + SHARDED_COST * (not way.whole_gradients)


def _items(
    sizes: Sizes, learner: LearnerSettings, way: Budget, num_ranks: int, compute_bytes: int, wire_bytes: int
) -> dict[str, int]:
    mine = -(-sizes.parameters // num_ranks)
    largest_unit = max(sizes.layer_parameters, sizes.embedding_parameters)
    whole = 4 * sizes.parameters
    items = {
        "float32 weights": 4 * mine,
        "AdamW state": 8 * mine,
        "gradients": whole if way.whole_gradients else 4 * mine + 4 * largest_unit,
        "gathered weights": compute_bytes * (sizes.parameters if way.keeps_gathered else 2 * largest_unit),
        "activations": activation_bytes(sizes, way.recompute, compiled=learner.compile, element_bytes=compute_bytes)
        * learner.max_tokens_per_microbatch,
        # its chunk, and the gradient of its weights in float32 and the compute dtype
        "output head": HEAD_BYTES + (4 + compute_bytes) * sizes.embedding_parameters,
    }
    if wire_bytes:
        items["two packed versions (rank 0)"] = 2 * wire_bytes * sizes.parameters
    return items


def activation_bytes(sizes: Sizes, recompute: Recompute, *, compiled: bool, element_bytes: int) -> int:
    """Per token of a microbatch, over all layers."""
    s = sizes
    products = s.query + s.key_value + s.query + s.hidden + 2 * s.intermediate + s.hidden
    everything = int(
        (products + s.intermediate + 2 * s.hidden + 1.2 * (s.query + s.key_value)) * (1 if compiled else EAGER)
    )
    per_token = {
        "none": s.layers * everything,
        "selective": s.layers * products + everything,
        "full": s.layers * s.hidden + everything,
    }[recompute]
    return element_bytes * per_token
