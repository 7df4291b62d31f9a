"""What a learner rank needs of its device's memory, and what is chosen so that it fits. Pure, no torch.

`learner.recompute: auto`, gathered weights that stay for the next microbatch and whole gradients all buy speed with
memory. The budget adds up what is known before a run and takes the fastest way that fits.

The counts were checked against the peaks of two shapes on an H200 (docs/benchmarks/learner.md).
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.errors import BadValue, NoRoom, SlipstreamError
from configs.learner import LearnerSettings
from configs.machine import gpu_bytes
from configs.schema import Config
from learner.advantages import facts_of
from learner.policy.activations import Recompute as Recompute
from learner.policy.activations import activation_bytes, tower_bytes
from learner.policy.divisibility import problem_with_kernel
from learner.policy.lane_bytes import lane_bytes
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes, heads_of
from slipstream.runtime.fingerprint import read_json

GIB = 1024**3
RESERVED_SHARE, RESERVED_BYTES = 0.05, GIB
"""Of the device: fragments, and what libraries allocate past torch."""
ENGINE_SHARE = 0.85
"""Of a rollout GPU, at most for weights and KV cache (SGLang's default is near it); CUDA graphs have the rest."""
OF_RANK_0 = " (rank 0)"
"""End of the name of an item that other ranks do not have."""
HEAD_BYTES = int(1.5 * GIB)
"""Float32 logits of a chunk and their gradient in 16 bit (learner/policy/logprobs.py)."""
PLACES_PER_TOKEN = 4
"""Of padded attention: answers of one row that are about a quarter as long as its longest one."""
MOMENT_SPAN_BYTES = 512 * 1024**2
"""Parameters whose moments are on the device at once where they live in host memory, largest tensors included."""
COST = {"none": 0.0, "selective": 0.02, "full": 0.25}
EXPERTS_COST, REGATHER_COST, SHARDED_COST, HOST_COST = 0.06, 0.04, 0.10, 0.01
"""Slowdown of a step, roughly: what the choice is ordered by. Selective recomputing makes a mixture again, of its
experts at least the first product, two ninths of their time: by arithmetic, not measured."""


class OutOfMemory(SlipstreamError, RuntimeError, code="SLIP-LEARN-03"):
    """The device's memory ran out; the message says which key to set to which value."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One way to train, and the bytes that it takes on the fullest rank."""

    recompute: Recompute
    keeps_gathered: bool
    """Gathered weights stay from one microbatch to the next."""
    whole_gradients: bool
    """Every rank adds up whole gradients, and they are summed over ranks once a step."""
    packs_on_device: bool = True
    """A rank holds the two packed versions that it sends on its GPU; else in pinned host memory."""
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
        ways += "" if self.packs_on_device else ", packed versions in host memory"
        return "\n".join([*lines, f"  {'together':<34}{self.total / GIB:8.1f} GiB{of}: {ways}"])


def usable(device_bytes: int) -> int:
    """What torch may allocate of a device's memory."""
    return int(device_bytes * (1 - RESERVED_SHARE)) - RESERVED_BYTES


def available_bytes(config: Config) -> int | None:
    """What a learner rank may allocate of its GPU; None on a CPU, and where no GPU is known.

    Raises:
        ConfigError: SGLang is to share the GPU and takes as much as it likes.
    """
    if config.placement.device == "cpu":
        return None
    given = config.placement.gpu_gib
    device = int(given * GIB) if given is not None else gpu_bytes()
    engine = 0.0
    if config.engines_share_gpus and config.rollout.facts.fills_gpus:
        if "mem_fraction_static" not in config.rollout.sglang:
            raise NoRoom(
                "placement.share_gpus: SGLang fills the GPU that it shares with the learner; leave room by"
                " rollout.sglang={mem_fraction_static: 0.35}, say"
            )
        engine = _fraction(config.rollout.sglang["mem_fraction_static"])
    return None if device is None else usable(device) - int(device * engine)


def _fraction(given: object) -> float:
    if not isinstance(given, float) or not 0 < given < 1:
        raise BadValue(
            f"rollout.sglang: mem_fraction_static {given!r} is no share of a GPU; give a number between 0 and 1, such"
            " as 0.35"
        )
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What decides how much a rank needs."""

    sizes: Sizes
    """Of the whole model."""
    learner: LearnerSettings
    """Its microbatch, `mesh`, `compile` and, where it is not `auto`, `recompute` are taken as given."""
    num_ranks: int
    """Ranks that share the model: all but those of other copies."""
    compute_bytes: int = 2
    """Of an element of learner.compute_dtype."""
    wire_bytes: int = 0
    """Of an element of the two packed versions that a rank holds on its GPU; 0 where it holds none there."""
    lane_bytes: int = 0
    """Of a version, what the fullest rank sends where each sends lanes of its own; 0 where rank 0 sends all."""
    staged_bytes: int = 0
    """Of the buffers through which versions in host memory are sent; 0 where they cannot lie there."""
    reference: Sizes | None = None
    """Of a reference model on the same ranks."""
    critic: Sizes | None = None
    """Of a critic on them, as one whose head is no more than its embedding."""
    teacher: Sizes | None = None
    """Of a teacher on them, as one whose head is no more than its embedding: its head is whole on each."""
    pads: bool = False
    """Attention pads trajectories to the longest of their row: `problem_with_kernel` says why, or it caps scores."""
    scores_of: int = 0
    """Tokens of the longest trajectory, where attention caps its scores and holds them for the backward."""
    refreshed: int = 0
    """Teachers that are copies or averages of the policy, each with two packed versions."""
    tower_bytes: int = 0
    """Of a frozen vision tower, and of what it makes of the largest picture."""

    @classmethod
    def of(cls, config: Config, model: Mapping[str, Any]) -> "Setup":
        """Of a configuration with every `auto` resolved, and config.json.

        Raises:
            FingerprintError: that of a reference model or critic of their own is missing or broken.
            ConfigError: it is of a family that is not trained.
        """
        bytes_of, bus, sizes = {"float32": 4, "bfloat16": 2}, config.weight_bus, Sizes.of(decoder_of(model))
        wire_bytes, (senders, positions) = bytes_of[config.rollout.dtype], config.lane_ends
        caps = sizes.keys.get(sizes.family.caps[0]) is not None
        may_lie_on_host = bus.on_gpus and not bus.delta  # changes are made where the versions lie, which takes a GPU
        algorithm = config.algorithm
        has_critic = facts_of(algorithm).needs_critic
        # adapters that are off are the reference, where no folder is named
        has_reference = config.has_reference and not (config.learner.lora.rank and algorithm.reference_path is None)
        return cls(
            sizes=sizes,
            learner=config.learner,
            num_ranks=config.num_learner_ranks // config.learner.mesh.replicate,
            compute_bytes=bytes_of[config.learner.compute_dtype],
            wire_bytes=wire_bytes if bus.on_gpus else 0,
            lane_bytes=lane_bytes(sizes, senders, positions, wire_bytes) if max(senders, positions) > 1 else 0,
            staged_bytes=2 * bus.bucket_bytes * -(-positions // senders) if may_lie_on_host else 0,
            reference=_sizes_of("algorithm.reference_path", algorithm.reference_path, model) if has_reference else None,
            pads=config.placement.device != "cpu"
            and (caps or bool(problem_with_kernel(config.learner, heads_of(decoder_of(model)).size))),
            scores_of=config.longest_trajectory if caps else 0,
            refreshed=sum(teacher.is_refreshed for teacher in config.teachers.values()),
            tower_bytes=tower_bytes(model, bytes_of[config.learner.compute_dtype], config.data.max_prompt_tokens),
            teacher=_teacher_of(config, model),
            # its head is a row
            critic=replace(_sizes_of("critic.path", config.critic.path, model), tied=True) if has_critic else None,
        )

    @property
    def num_buses(self) -> int:
        """The policy's, and those of teachers."""
        return 1 + self.refreshed

    def adapters(self, sizes: Sizes) -> int:
        """Parameters of the adapters of such a model; 0 where all of it is trained."""
        return sizes.adapter_parameters(self.learner.lora) if self.learner.lora.rank else 0

    def packed(self) -> tuple[str, int]:
        """What the two packed versions are called in a budget, and their bytes."""
        if self.lane_bytes:
            return "packed versions", 2 * self.lane_bytes
        carried = self.adapters(self.sizes) or self.sizes.parameters
        return f"packed versions{OF_RANK_0}", 2 * self.wire_bytes * carried

    def trained_share(self, sizes: Sizes) -> int:
        """What a rank trains of a model: `sizes` are what each tensor rank computes."""
        trained = self.adapters(sizes) or sizes.parameters
        return -(-trained * self.learner.mesh.tensor // self.num_ranks)

    def with_tokens(self, tokens: int) -> "Setup":
        """The same with other microbatches."""
        changed = self.learner.model_copy(update={"max_tokens_per_microbatch": tokens})
        return replace(self, learner=changed)


def _teacher_of(config: Config, model: Mapping[str, Any]) -> Sizes | None:
    """Of the one teacher in the learner's ranks; None without one."""
    inside = [(name, teacher.path) for name, teacher in config.teachers.items() if teacher.where == "learner"]
    return replace(_sizes_of(f"teachers.{inside[0][0]}.path", inside[0][1], model), tied=True) if inside else None


def _sizes_of(key: str, path: str | None, model: Mapping[str, Any]) -> Sizes:
    """Of a model in a folder of its own, else of the policy's."""
    if path is None:
        return Sizes.of(model)
    try:
        return Sizes.of(read_json(Path(path) / "config.json"))
    except LookupError as error:
        raise BadValue(f"{key}: {path!r} {error.args[0]}; take one of them") from error


def choose(setup: Setup, available: int | None) -> Budget:
    """The fastest way that fits into `available` bytes (see `usable`); the smallest one where none does.

    None is available where memory is no concern, as on a CPU.
    """
    smallest: Budget | None = None
    for way in sorted(_ways(setup), key=lambda way: _cost(setup.sizes, way)):
        budget = replace(way, items=items_of(setup, way))
        if available is None or budget.total <= available:
            return budget
        smallest = budget if smallest is None or budget.total < smallest.total else smallest
    assert smallest is not None
    return smallest


def largest_microbatch(setup: Setup, available: int) -> int:
    """Most tokens of a microbatch that fit, in steps of 1,024; 0 where not even those do."""

    def fits(thousands: int) -> bool:
        return choose(setup.with_tokens(thousands * 1024), available).total <= available

    low, high = 0, 1
    while fits(high) and high < 1 << 12:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * 1024


def refusal(config: Config, model: Mapping[str, Any], available: int) -> str:
    """What to change where no way fits; empty where one does."""
    setup = Setup.of(config, model)
    budget = choose(setup, available)
    if budget.total <= available:
        return ""
    tokens, longest = largest_microbatch(setup, available), config.longest_trajectory
    fits = f"{tokens} tokens fit" if tokens >= longest else f"{tokens} fit, and one trajectory may have {longest}"
    given = config.learner.max_tokens_per_microbatch
    return (
        f"learner.max_tokens_per_microbatch: {given} tokens need {budget.total / GIB:.1f} GiB on a learner GPU"
        f" (recompute {budget.recompute}), and {available / GIB:.1f} GiB are there to use; {fits} with"
        f" {config.num_learner_ranks} learner ranks; lower it, or give the learner more ranks in placement"
    )


def when_exhausted(config: Config, model: Mapping[str, Any], budget: Budget, said: str, device_bytes: int) -> str:
    """What to change after memory ran out, whatever the budget had promised. `said` is the allocator's message."""
    setup, given = Setup.of(config, model), config.learner.max_tokens_per_microbatch
    longest = config.longest_trajectory
    tokens = min(largest_microbatch(setup, usable(device_bytes)), given * 3 // 4) // 1024 * 1024
    knobs = [f"learner.max_tokens_per_microbatch={max(tokens, longest)}"] if longest < given else []
    knobs += ["learner.recompute=full"] if budget.recompute != "full" else []
    return (
        f"the GPU's memory ran out with microbatches of up to {given} tokens and recompute {budget.recompute} (budget:"
        f" {budget.total / GIB:.1f} GiB): {said.splitlines()[0]} Take {', or '.join([*knobs, 'more learner ranks'])};"
        " other processes on the GPU, such as a rollout server, count as well"
    )


def _ways(setup: Setup) -> Iterator[Budget]:
    levels: list[Recompute] = ["none", "selective", "full"]
    both = (True, False)
    for level, keeps, whole, packs in itertools.product(levels, both, both, both):
        if setup.learner.recompute not in ("auto", level) or not (whole or setup.num_ranks > 1):
            continue
        if setup.learner.offload_activations and level != "full":
            continue
        if packs or setup.staged_bytes:
            yield Budget(level, keeps, whole, packs)


def _cost(sizes: Sizes, way: Budget) -> float:
    experts = EXPERTS_COST if sizes.routed and way.recompute == "selective" else 0.0
    slower = {REGATHER_COST: way.keeps_gathered, SHARDED_COST: way.whole_gradients, HOST_COST: way.packs_on_device}
    return COST[way.recompute] + experts + sum(cost for cost, is_free in slower.items() if not is_free)


def items_of(setup: Setup, way: Budget) -> dict[str, int]:
    """Bytes of a rank by what they are for.

    Policy, critic and reference model take turns: one's gathered weights, gradients and activations are gone before the
    next begins; a teacher's turn is between two rows, and that of moments from host memory is after the backward. What
    the largest turn takes beyond the policy's is an item.
    """
    tensor, compute_bytes = setup.learner.mesh.tensor, setup.compute_bytes
    sizes, tokens = setup.sizes.over(tensor), setup.learner.max_tokens_per_microbatch
    adapters, mine = setup.adapters(sizes), setup.trained_share(sizes)
    step = _step_items(setup, way, sizes)
    # its chunk, and the gradient of its weights in float32 and the compute dtype
    step["output head"] = HEAD_BYTES + (0 if adapters else 4 + compute_bytes) * sizes.embedding_parameters
    offloads = setup.learner.offload_optimizer
    items = {"float32 weights": 4 * mine, **({} if offloads else {"AdamW state": 8 * mine}), **step}
    turns = [sum(step.values())]
    if offloads:  # moments come when activations are gone
        turns.append(step["gradients"] + 2 * min(4 * mine, MOMENT_SPAN_BYTES))
    if adapters:
        items["frozen weights"] = -(-compute_bytes * sizes.parameters // setup.num_ranks)
    if (reference := setup.reference) is not None:
        items["reference weights"] = -(-compute_bytes * reference.parameters // setup.num_ranks)
        layers = activation_bytes(reference, "none", compiled=False, element_bytes=compute_bytes)
        gathered = 2 * compute_bytes * reference.largest_unit
        turns.append(gathered + layers // reference.layers * tokens + HEAD_BYTES)
    if (critic := setup.critic) is not None:
        frozen = compute_bytes * critic.parameters if setup.adapters(critic) else 0
        held = setup.trained_share(critic) * (4 if offloads else 12)
        items["critic weights and AdamW state"] = held + -(-frozen // setup.num_ranks)
        # its head has the hidden states in float32, and their gradient
        turns.append(sum(_step_items(setup, way, critic).values()) + 8 * critic.hidden * tokens)
    if (teacher := setup.teacher) is not None:
        items["teacher weights"] = -(-compute_bytes * teacher.parameters // setup.num_ranks)
        # whole on each rank, and of each row what it is given
        items["teacher's output head"] = compute_bytes * (teacher.embedding_parameters + teacher.hidden * tokens)
        layers = activation_bytes(teacher, "none", compiled=False, element_bytes=compute_bytes) // teacher.layers
        kept = step["gradients"] + step["gathered weights"]
        turns.append(kept + 2 * compute_bytes * teacher.largest_unit + layers * tokens)
    if (more := max(turns) - turns[0]) > 0:
        items["critic, reference, teacher or moments in their turn"] = more
    if setup.refreshed:
        items["refreshed teachers"] = 4 * mine * setup.refreshed
    if setup.tower_bytes:
        items["vision tower"] = setup.tower_bytes
    if setup.wire_bytes:
        what, packed = setup.packed()
        items[what] = (packed if way.packs_on_device else setup.staged_bytes) * setup.num_buses
    return items


def host_items_of(setup: Setup, way: Budget) -> dict[str, int]:
    """Bytes of pinned host memory of a rank by what they are for, from the first checkpoint on."""
    sizes, learner = setup.sizes.over(setup.learner.mesh.tensor), setup.learner
    mine = setup.trained_share(sizes)
    items = {"copy for checkpoints": 12 * mine * 51 // 50}  # norms, and what blocks leave empty
    if learner.offload_optimizer:
        items["AdamW state"] = 8 * (mine + (setup.trained_share(setup.critic) if setup.critic is not None else 0))
    if learner.offload_activations:  # torch pins powers of two
        layer = setup.compute_bytes * sizes.hidden * learner.max_tokens_per_microbatch
        items["inputs of layers"] = sizes.layers * (1 << (layer - 1).bit_length())
    if not way.packs_on_device:
        what, packed = setup.packed()
        items[what] = packed * setup.num_buses
    return items


def _step_items(setup: Setup, way: Budget, sizes: Sizes) -> dict[str, int]:
    """What gradients of a model take beside its weights, but for its head."""
    compute_bytes, compiled, adapters = setup.compute_bytes, setup.learner.compile is True, setup.adapters(sizes)
    tokens = setup.learner.max_tokens_per_microbatch
    here = sizes.among(setup.learner.mesh.expert)  # of the experts a block
    layer, largest = (adapters // sizes.layers,) * 2 if adapters else (here.layer_parameters, here.largest_unit)
    divided = setup.learner.mesh.expert > 1
    given: Any = {"compiled": compiled, "element_bytes": compute_bytes, "divided": divided}
    per_token = activation_bytes(sizes, way.recompute, **given)
    if setup.learner.offload_activations:  # of the layers' inputs, one on its way out and one on its way back
        per_token -= max(0, sizes.layers - 2) * sizes.hidden * compute_bytes
    gathered = here.parameters + adapters
    # those of a unit in the making, what goes into a layer's reduction and what comes out
    whole, shared = (adapters or here.parameters) + 2 * layer, setup.trained_share(sizes) + max(largest, 3 * layer)
    items = {
        "gradients": 4 * (whole if way.whole_gradients else shared),
        "gathered weights": compute_bytes * (gathered if way.keeps_gathered else 2 * here.largest_unit),
        "activations": per_token * tokens,
    }
    if setup.pads:  # queries, keys, values and what comes out, which the backward needs again
        kept = 1 if way.recompute == "full" else sizes.layers
        places = PLACES_PER_TOKEN * tokens
        items["padding of attention"] = compute_bytes * places * (2 * sizes.query + sizes.key_value) * kept
        if setup.scores_of:  # a tanh, a float32 softmax and its copy of each layer; of one, three float32 besides
            scores = places * setup.scores_of * sizes.query // sizes.dims["head"]
            items["scores of attention"] = scores * ((2 * compute_bytes + 4) * kept + 12)
    return items
