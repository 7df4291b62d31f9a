"""The policy in training: a Hugging Face model sharded by FSDP2, with float32 master weights.

Each decoder layer is one FSDP unit, and so are embedding and output head where they share no weights; the rest belongs
to the root. Most runs have a mesh of one dimension (also of size 1, so that one rank runs the same code as many);
learner/policy/meshes.py names the others. Gradients are summed over ranks, not averaged: the loss is already divided by
the tokens of the whole batch.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from configs import Config
from configs.learner import Lora
from learner.layout import DTYPES, Inner, Layout, Shard, digester, digests, gather, local_of
from learner.policy import attention, lora
from learner.policy.communication import Communication
from learner.policy.divisibility import problem_with
from learner.policy.layers import RECOMPUTED, prepare
from learner.policy.logprobs import head_logprobs
from learner.policy.memory import Budget, Setup, choose, usable, when_exhausted
from learner.policy.meshes import Meshes, meshes_of
from learner.policy.moe.mixtures import Mixtures
from learner.policy.pretrained import (
    PolicyError,
    allocate,
    build_empty,
    fill,
    has_tower,
    read_config,
)
from learner.policy.tensor_parallel import local_weight, parallelize
from learner.policy.units import shard
from learner.rows import Row
from slipstream.families.names import inside
from slipstream.families.sizes import Sizes
from slipstream.families.table import family_of
from slipstream.vision import VisionTower
from slipstream.weight_files import weight_files
from weight_bus.adapters import PREFIX, SCALE, scale_digest
from weight_bus.digest import Digester, combined


class Head(torch.nn.Module):
    """The output head, over positions in the loss alone; its logits are never whole."""

    def __init__(self, weight: torch.nn.Parameter, factor: float, softcap: float | None) -> None:
        super().__init__()
        self.weight, self.factor, self.softcap = weight, factor, softcap
        """Products times `factor` are logits, which are capped where `softcap` is no None."""
        self.vocabulary: dist.ProcessGroup | None = None
        """Tensor ranks, each with its part of the vocabulary."""

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, **beside: Any
    ) -> tuple[torch.Tensor, ...]:
        """See `head_logprobs`."""
        weight, divisor = local_weight(self.weight), temperature / self.factor
        return head_logprobs(hidden, weight, targets, divisor, self.vocabulary, softcap=self.softcap, **beside)


class TokenModel(torch.nn.Module):
    """The root module: from a row to logprobs and entropies of its tokens, and what distillation asks for besides."""

    PREFIX = "transformer."

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer
        sizes = Sizes.of(transformer.config.to_dict())
        factor, (_, cap) = sizes.family.logits(sizes.keys), sizes.family.caps
        transformer.lm_head = Head(transformer.lm_head.weight, factor, sizes.keys.get(cap))

    def forward(self, row: Row, temperature: float) -> tuple[torch.Tensor, ...]:
        """Two [n] float32 tensors; more where the row has a teacher's own tokens, or its view."""
        inputs: dict[str, Any] = {"input_ids": row.input_ids}
        if row.pictures is not None:
            seen: Tensor = self.transformer.model.embed_tokens(row.input_ids)[0]
            inputs = {"inputs_embeds": row.pictures.over(seen)[None]}
        hidden = self.transformer.model(
            **inputs,
            position_ids=row.position_ids,
            use_cache=False,
            **attention.arguments(row),
        ).last_hidden_state
        of_teacher = {"ids": row.teacher_ids, "teacher": row.teacher_view}
        beside = {name: given for name, given in of_teacher.items() if given is not None}
        return self.transformer.lm_head(hidden[0, row.kept], row.targets, temperature, **beside)  # type: ignore[no-any-return]


class Policy:
    """Weights, forward and gather. All ranks call collective methods, in one order."""

    def __init__(
        self,
        model: TokenModel,
        source: Path,
        mesh: DeviceMesh | Meshes,
        device: torch.device,
        budget: Budget,
        adapters: Lora | None = None,
        mixtures: Mixtures | None = None,
    ) -> None:
        """A collective of the ranks of the mesh."""
        self.model = model
        self.budget = budget
        self.source = source
        """The Hugging Face folder that the weights, the tokenizer and config.json came from."""
        self.device = device
        self.vocab_size = int(model.transformer.config.vocab_size)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.communication = Communication(self._units, device)
        """Time in their collectives; in none on a single rank."""
        self.mesh, self.meshes = mesh, meshes_of(mesh)
        self.group = mesh.get_group()
        """All ranks, with the copies of a model that is replicated."""
        self.rank, self.world_size = mesh.get_local_rank(), mesh.size()
        self.leads = self.meshes.leads
        """Whether this rank speaks for those that compute the same rows."""
        self._digesters: dict[str, tuple[list[Shard], Digester]] = {}
        """By dtype: shards, and what digests them."""
        self._shards: tuple[list[int], list[Shard]] = [], []
        """Where parameters lay, and their shards."""
        self.tower: VisionTower | None = None
        """What makes features of pictures: frozen, whole on each rank, in the dtype of the forward."""
        self.mixtures = mixtures
        """Of experts, in a model that has any."""
        self.lora = adapters
        """Adapters are in training, and all else is frozen."""
        family = family_of(model.transformer.config.to_dict())
        self.layout = Layout.gathered(
            self._all_parameters(), self.group, lambda *parameter: map(Inner.of, inside(family, *parameter))
        )
        self.frozen_digests: dict[str, int] = {}
        """Of `frozen`, in its own dtype, and of the scale of adapters."""

    def forward(self, row: Row, temperature: float) -> tuple[torch.Tensor, ...]:
        """Logprob and entropy of each of the n tokens in the loss, float32 with gradients. A collective."""
        if row.pictures is not None:
            assert self.tower is not None, "a batch with pictures is refused where the model takes none"
            row = replace(row, pictures=row.pictures.seen_by(self.tower))
        if self.mixtures is not None:
            self.mixtures.begin(row)
        attention.warn_of_padding(row, self.model.transformer.config._attn_implementation)
        return tuple(self.model(row, temperature))

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """[n] float32 of each row (of a critic values), without gradients, in host memory. A collective."""
        found = [self.forward(row.to(self.device), temperature)[0] for row in rows]
        self.clear_gradients()  # there are none, but the root module holds what it has gathered until then
        return [values.cpu() for values in found]

    def when_exhausted(self, error: RuntimeError, config: Config) -> str:
        """What to change where the error says that memory ran out; empty for other errors."""
        from accelerate.utils.memory import should_reduce_batch_size  # half a second that only errors are worth

        if not should_reduce_batch_size(error):
            return ""
        device_bytes = torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0
        return when_exhausted(config, self.model.transformer.config.to_dict(), self.budget, str(error), device_bytes)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters in training by HF name, adapters by peft's, in the order used everywhere; tied ones once."""
        return ((name, p) for name, p in self._all_parameters() if self.lora is None or p.requires_grad)

    def _all_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        # After a forward without a backward the modules still hold gathered copies. Those are no parameters.
        for unit in self._units:
            unit.reshard()
        for name, parameter in self.model.named_parameters():
            name = name.removeprefix(TokenModel.PREFIX).replace(RECOMPUTED, "")
            yield name if self.lora is None or not parameter.requires_grad else f"{PREFIX}{name}", parameter

    def frozen(self) -> list[Shard]:
        """This rank's box of each tensor that stays as it is, sharing memory: with LoRA the model, else none."""
        if self.lora is None:
            return []
        return self.layout.shards({n: local_of(p).detach() for n, p in self._all_parameters() if not p.requires_grad})

    def shards(self) -> list[Shard]:
        """This rank's box of each logical tensor in training, sharing memory."""
        local = self.local_parameters()
        places = [part.data_ptr() for part in local.values()]
        if self._shards[0] != places:
            self._shards = places, self.layout.shards(local)
        return self._shards[1]

    def local_parameters(self) -> dict[str, torch.Tensor]:
        """What of each parameter in training is here, sharing memory; a fused one has several logical tensors."""
        return {name: local_of(parameter).detach() for name, parameter in self.named_parameters()}

    def as_global(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A parameter, or what lies as it does, as torch.distributed.checkpoint knows it, sharing memory."""
        shape, mesh, placements = self._placements[name]
        # not from_local, which would move what lies in host memory to the mesh's device
        whole = torch.empty(shape, device="meta")
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), local.dtype))
        return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    @functools.cached_property
    def _placements(self) -> dict[str, tuple[torch.Size, DeviceMesh, tuple[Placement, ...]]]:
        """By parameter: its shape, on which mesh it lies, and how."""
        named = self.named_parameters()
        return {name: (p.shape, p.device_mesh, p.placements) for name, p in named if isinstance(p, DTensor)}

    def prepare_row(self, *, last: bool) -> None:
        """Set what the next backward leaves behind: summed gradients after the step's last one, and shards only.

        Before that, gradients and gathered weights are kept whole where the budget has room for them.
        """
        for unit in self._units:
            unit.set_requires_gradient_sync(last or not self.budget.whole_gradients, recurse=False)
            if self.meshes.replicas > 1:
                unit.set_requires_all_reduce(last, recurse=False)
            unit.set_reshard_after_backward(last or not self.budget.keeps_gathered, recurse=False)

    def local_gradients(self) -> list[torch.Tensor]:
        """What of each parameter's gradient is here, sharing memory.

        Raises:
            RuntimeError: a parameter has none; the forward did not use it, or there was no backward.
        """
        gradients = {name: parameter.grad for name, parameter in self.named_parameters()}
        if missing := [name for name, gradient in gradients.items() if gradient is None]:
            raise RuntimeError(f"{missing[0]} has no gradient")
        return [local_of(gradient) for gradient in gradients.values() if gradient is not None]

    def settle_gradients(self) -> None:
        """Give tensor ranks the same gradients of what each of them has whole. A collective.

        They compute the same, but a reduction over shards may add up in another order for each; the first rank's are
        taken, so that copies stay equal to the bit.
        """
        if self.meshes.tensor is None:
            return
        group = self.meshes.tensor.get_group()
        together = set(dist.get_process_group_ranks(group))
        named = zip(self.local_parameters(), self.local_gradients(), strict=True)
        repeated = [gradient for name, gradient in named if together <= set(self.layout.ranks_beside(name))]
        if not repeated:
            return
        flat = torch.cat([gradient.flatten() for gradient in repeated])
        dist.broadcast(flat, group=group, group_src=0)
        parts = torch.split(flat, [gradient.numel() for gradient in repeated])
        for gradient, part in zip(repeated, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))

    def squared_gradient(self) -> torch.Tensor:
        """This rank's term of the squared norm of the gradient, 0-dim float64: over ranks they add up to it."""
        return self.layout.squared_norm(dict(zip(self.local_parameters(), self.local_gradients(), strict=True)))

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def named_full_tensors(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by HF name in the wire dtype, on every rank. A collective: exhaust it.

        With tied embeddings model.embed_tokens.weight is sent and lm_head.weight left out. Memory is bounded by
        learner.layout.gathering.GATHER_BYTES; the tensors are copies, safe to keep.
        """
        yield from gather(self.layout, self.shards(), DTYPES[dtype], self.meshes.replica)

    def shard_digests(self, dtype: str) -> dict[str, int]:
        """weight_bus.digest.slice_digest of each whole tensor in `dtype`, without a gather. A collective.

        Tensors that stay as they are come along, in the dtype that they have.
        """
        shards = self.shards()
        known = self._digesters.get(dtype)
        if known is None or known[0] is not shards:
            known = self._digesters[dtype] = (shards, digester(shards, DTYPES[dtype]))
        return digests(shards, DTYPES[dtype], self.group, known[1]) | self.frozen_digests

    def parameter_digest(self) -> str:
        """Digest of master and frozen weights, equal at every world size. A collective."""
        return combined(self.shard_digests("float32"))


def build_policy(
    config: Config, mesh: DeviceMesh | Meshes, device: torch.device, budget: Budget | None = None
) -> Policy:
    """Load model.path onto the device and divide it over the mesh. A collective.

    Args:
        budget: how memory is spent; by default the fastest way that fits into what every rank has free.

    Raises:
        PolicyError: the folder, its weights or its model family cannot be trained.
    """
    folder = Path(config.model.path)
    model_config = read_config(folder)
    files = weight_files(folder, PolicyError)
    setup = Setup.of(config, model_config.to_dict())
    policy = shaped_policy(config, mesh, device, budget or choose_for(setup, mesh, device))
    fill(policy.frozen() or policy.shards(), files, folder)
    if has_tower(folder):
        policy.tower = VisionTower(folder, DTYPES[config.learner.compute_dtype], device)
    begin_adapters(policy, config)
    return policy


def begin_adapters(policy: Policy, config: Config) -> None:
    """Give a model whose frozen weights are loaded its first adapters; nothing without LoRA. A collective."""
    if policy.lora is not None:
        lora.initialize(policy.shards(), config.run.seed)
        frozen = digests(policy.frozen(), DTYPES[config.learner.compute_dtype], policy.group)
        policy.frozen_digests = {**frozen, SCALE: scale_digest(policy.lora.scale)}


def shaped_policy(
    config: Config,
    mesh: DeviceMesh | Meshes,
    device: torch.device,
    budget: Budget,
    folder: Path | None = None,
    root: type[TokenModel] = TokenModel,
    *,
    is_frozen: bool = False,
) -> Policy:
    """A model in memory without values: the policy, or one beside it. A collective.

    Args:
        folder: with its config.json; model.path by default.
        root: the module around it. Embedding and output head are made apart where it has a head of its own.
        is_frozen: in the compute dtype and without gradients; else float32 masters for an optimizer.

    Raises:
        PolicyError: the folder holds no model that the learner can train.
    """
    learner, dtype = config.learner, DTYPES[config.learner.compute_dtype]
    folder, meshes = folder or Path(config.model.path), meshes_of(mesh)
    model_config = read_config(folder)
    aux_coef = config.algorithm.router_aux_loss_coef if root is TokenModel and not is_frozen else 0.0
    if problem := problem_with(learner, model_config.to_dict(), aux_coef):
        raise PolicyError(problem)
    if root is not TokenModel:
        model_config.tie_word_embeddings = False
    transformer = build_empty(model_config, attention.choose(learner, model_config, device))
    mixtures = Mixtures.adopt(transformer, aux_coef)
    if mixtures is not None and meshes.expert is not None:
        mixtures.divide(meshes.expert)
    adapters = learner.lora if learner.lora.rank and not is_frozen else None
    if adapters is not None:
        lora.adapt(transformer, adapters, dtype)
    recompute, kept = budget.recompute, budget
    if is_frozen:  # what a forward without a backward has gathered would stay, beside the policy's own
        transformer.to(dtype).requires_grad_(False)
        recompute, kept = "none", replace(budget, keeps_gathered=False)
    model = root(transformer)
    if meshes.tensor is not None:
        parallelize(model.transformer, meshes.tensor)
    offloaded = learner.offload_activations and not is_frozen
    prepare(model.transformer.model.layers, recompute, compiled=learner.compile is True, offloaded=offloaded)
    shard(model, meshes, dtype, kept)
    allocate(model, model.transformer, model_config, device)
    return Policy(model, folder, mesh, device, budget, adapters, mixtures)


def least_free(mesh: DeviceMesh | Meshes, device: torch.device) -> int | None:
    """Bytes that every rank has free on its GPU; None on a CPU. A collective."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    least = torch.tensor(free, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.get_group())
    return int(least)


def choose_for(setup: Setup, mesh: DeviceMesh | Meshes, device: torch.device) -> Budget:
    """The fastest way that fits into what every rank has free. A collective."""
    free = least_free(mesh, device)
    return choose(setup, None if free is None else usable(free))
