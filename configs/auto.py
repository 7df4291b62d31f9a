"""`auto` in keys whose best value follows from the devices: resolved before a configuration is checked."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from configs import machine

BY_DEVICE: dict[str, tuple[str | bool, str | bool]] = {
    "rollout.engine": ("torch", "sglang"),
    "rollout.dtype": ("float32", "bfloat16"),
    "learner.compute_dtype": ("float32", "bfloat16"),
    "learner.compile": (False, True),
    "checkpoint.hf_dtype": ("float32", "bfloat16"),
    "weight_bus.backend": ("gloo", "nccl"),
}
"""Value on a CPU, value on GPUs."""
LEAVES = {key.partition(".")[2]: key for key in BY_DEVICE}


def resolve(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree of a configuration with a value for each key of BY_DEVICE that it leaves out or gives as `auto`.

    Sections that are no mappings are left to the schema: to be refused, or because they are whole already.
    """
    placement = tree.get("placement", {})
    if isinstance(placement, BaseModel):
        placement = placement.model_dump()
    missing = []
    for leaf, key in LEAVES.items():
        name = key.partition(".")[0]
        section = tree.get(name, {})
        if isinstance(section, Mapping) and section.get(leaf, "auto") == "auto":
            missing.append((name, leaf))
    if not missing or not isinstance(placement, Mapping):
        return tree
    gpus, resolved = on_gpus(placement), dict(tree)
    learner = tree.get("learner", {})
    for name, leaf in missing:
        takes_gpu = gpus
        if leaf == "backend":  # NCCL refuses two processes of a group on one GPU
            takes_gpu = gpus and not placement.get("share_gpus", False)
        elif leaf == "compile" and isinstance(learner, Mapping):
            takes_gpu = gpus and not _keeps_from_compiling(learner)
        resolved[name] = {**resolved.get(name, {}), leaf: BY_DEVICE[LEAVES[leaf]][takes_gpu]}
    return resolved


def _keeps_from_compiling(learner: Mapping[str, Any]) -> bool:
    """Whether something else is asked for that does not go with compiled layers."""
    mesh = learner.get("mesh", {})
    divided = isinstance(mesh, Mapping) and mesh.get("tensor", 1) != 1
    return bool(divided or learner.get("offload_activations", False))


def on_gpus(placement: Mapping[str, Any]) -> bool:
    """Whether a placement is of GPUs; device `auto` asks this machine, and takes named nodes for GPU nodes."""
    device = placement.get("device", "auto")
    if device != "auto":
        return bool(device == "cuda")
    if placement.get("rollout") is not None or placement.get("learner") is not None:
        return True
    return machine.has_usable_gpu(os.environ)
