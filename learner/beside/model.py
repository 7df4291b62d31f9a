"""A model beside the policy, sharded as it is: of a reference or a critic."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.policy import attention
from learner.policy.layers import prepare
from learner.policy.memory import Budget
from learner.policy.meshes import Meshes
from learner.policy.model import Policy, TokenModel, meshes_of, shard
from learner.policy.pretrained import PolicyError, allocate, build_empty, read_config
from learner.policy.sharding import DTYPES


def build_model(
    config: Config,
    folder: Path,
    mesh: DeviceMesh | Meshes,
    device: torch.device,
    budget: Budget,
    *,
    root: type[TokenModel] = TokenModel,
    frozen: bool,
    key: str,
) -> Policy:
    """The model of a folder, allocated and sharded, its weights still without values. A collective.

    Args:
        root: the module around it. Embedding and output head are made apart where it has a head of its own.
        frozen: in the compute dtype and without gradients; else float32 masters for an optimizer.
        key: that named the folder, for errors.

    Raises:
        PolicyError: the folder holds no model that the learner can train.
    """
    with named(key):
        model_config = read_config(folder)
    if root is not TokenModel:
        model_config.tie_word_embeddings = False
    inner, dtype = build_empty(model_config, attention.choose(config.learner, model_config, device)), "float32"
    if frozen:
        dtype = config.learner.compute_dtype
        inner.requires_grad_(False)
    model = root(inner)
    prepare(inner.model.layers, "none" if frozen else budget.recompute, compiled=config.learner.compile is True)
    model.to(DTYPES[dtype])
    # what a forward without a backward has gathered would stay, beside the policy's own
    kept = replace(budget, keeps_gathered=False) if frozen else budget
    shard(model, meshes_of(mesh).data, DTYPES[config.learner.compute_dtype], kept)
    allocate(model, inner, model_config, device)
    return Policy(model, folder, mesh, device, budget)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Errors of a model folder name the key that it was given under."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(str(error).replace("model.path", key, 1)) from error
