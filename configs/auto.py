"""`auto` in keys whose best value follows from devices and other keys: resolved before a configuration is checked."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from configs import machine
from configs.engines import ENGINES

BY_DEVICE: dict[str, tuple[str | bool, str | bool]] = {
    "rollout.engine": ("torch", "sglang"),
    "rollout.dtype": ("float32", "bfloat16"),
    "learner.compute_dtype": ("float32", "bfloat16"),
    "learner.compile": (False, True),
    "checkpoint.hf_dtype": ("float32", "bfloat16"),
    "weight_bus.backend": ("gloo", "nccl"),
    "weight_bus.stage_in": ("server", "engine"),
}
"""Value on a CPU, value on GPUs; of stage_in: value where the engine cannot receive, value where it can."""
BROADCAST_S, ENGINE_S = 5.0, 120.0
"""Defaults of weight_bus.collective_timeout_s and rollout.engine_deadline_s."""
STAGING_BACKENDS = ("gloo", "nccl")
"""Over which an engine receives updates itself."""
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
        elif leaf == "stage_in":  # the last: the others are there
            takes_gpu = _engine_receives(resolved, placement)
        resolved[name] = {**resolved.get(name, {}), leaf: BY_DEVICE[LEAVES[leaf]][takes_gpu]}
    return resolved


def _keeps_from_compiling(learner: Mapping[str, Any]) -> bool:
    """Whether something else is asked for that does not go with compiled layers."""
    mesh = learner.get("mesh", {})
    divided = isinstance(mesh, Mapping) and mesh.get("tensor", 1) != 1
    return bool(divided or learner.get("offload_activations", False))


def _engine_receives(tree: Mapping[str, Any], placement: Mapping[str, Any]) -> bool:
    """Whether updates can be received in the engine's processes; engine and backend are resolved."""

    def given(section: str, key: str, default: Any = None) -> Any:
        found = tree.get(section, {})
        found = found.model_dump() if isinstance(found, BaseModel) else found
        return found.get(key, default) if isinstance(found, Mapping) else default

    facts = ENGINES.get(str(given("rollout", "engine")))
    limits = given("weight_bus", "collective_timeout_s", BROADCAST_S), given("rollout", "engine_deadline_s", ENGINE_S)
    return (
        facts is not None
        and facts.has_processes
        and placement.get("tensor_parallel", 1) == 1  # scheduler ranks that receive their slices have not run on GPUs
        and given("weight_bus", "transport", "collective") == "collective"
        and given("weight_bus", "backend") in STAGING_BACKENDS
        and all(isinstance(limit, int | float) for limit in limits)
        and limits[0] < limits[1]
    )


def on_gpus(placement: Mapping[str, Any]) -> bool:
    """Whether a placement is of GPUs; device `auto` asks this machine, and takes named nodes for GPU nodes."""
    device = placement.get("device", "auto")
    if device != "auto":
        return bool(device == "cuda")
    if placement.get("rollout") is not None or placement.get("learner") is not None:
        return True
    return machine.has_usable_gpu(os.environ)
