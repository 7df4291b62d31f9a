"""The way in which a run spends memory, decided once and kept: memory_plan.json of the run folder.

Recomputation and whole or sharded gradients add up in another order, so a resumed run that chose anew by the memory
that happens to be free would make other digests. What is free decides in the first start alone; later it only refuses.

    runs/<name>/memory_plan.json     {"way": {"recompute": "none", ...}, "of": {"ranks": 8, ...}}

Checkpoints hold the same, for a folder that has lost it. A run that goes on with other ranks or microbatches, whose
digests differ anyway, plans anew.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import Config
from learner.checkpoints.agreement import Outcome, Said, exchange
from learner.checkpoints.folders import latest_complete, replace_json
from learner.policy.memory import GIB, Budget, OutOfMemory, Setup, choose, items_of, usable
from learner.policy.meshes import Meshes
from learner.policy.model import least_free
from learner.policy.pretrained import read_config

FILE, KEY = "memory_plan.json", "memory_plan"
WAY = ("recompute", "keeps_gathered", "whole_gradients", "packs_on_device")


def plan_memory(config: Config, mesh: DeviceMesh | Meshes, device: torch.device) -> Budget:
    """The run's plan where it has one, else the fastest way that fits, which is kept. A collective.

    Raises:
        OutOfMemory: the plan needs more than a rank has free.
    """
    setup = Setup.of(config, read_config(Path(config.model.path)).to_dict())
    free = least_free(mesh, device)
    mine = json.dumps(_read(config) if mesh.get_local_rank() == 0 else {})
    kept = json.loads(exchange(Said(Outcome.DONE, mine), mesh.get_group(), device)[0].text)
    if kept.get("of") != facts_of(config):
        budget = choose(setup, None if free is None else usable(free))
    else:
        way = Budget(**kept["way"])
        budget = replace(way, items=items_of(setup, way))
        if free is not None and budget.total > free:
            raise OutOfMemory(
                f"the run was planned with {budget.total / GIB:.1f} GiB on each learner GPU ({FILE}), and"
                f" {free / GIB:.1f} GiB are free on one; end what else uses it, or delete"
                f" {Path(config.run_dir) / FILE} to plan again, after which digests may differ from the journal's"
            )
    if mesh.get_local_rank() == 0:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        replace_json(Path(config.run_dir) / FILE, described(config, budget))
    return budget


def described(config: Config, budget: Budget) -> dict[str, Any]:
    """The plan and what it was made for, as plain data."""
    ways = asdict(budget)
    return {"way": {name: ways[name] for name in WAY}, "of": facts_of(config)}


def facts_of(config: Config) -> dict[str, Any]:
    """What else decides the order of additions, or is asked for by key."""
    learner = config.learner
    return {
        "ranks": config.num_learner_ranks,
        "mesh": learner.mesh.model_dump(),
        "max_tokens_per_microbatch": learner.max_tokens_per_microbatch,
        "recompute": learner.recompute,
        "offload_activations": learner.offload_activations,
    }


def _read(config: Config) -> dict[str, Any]:
    """The plan of the run folder, or of its newest checkpoint; empty without any."""
    path = Path(config.run_dir) / FILE
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    newest, _ = latest_complete(Path(config.run_dir))
    if newest is None:
        return {}
    state: dict[str, Any] = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    return state.get(KEY) or {}
