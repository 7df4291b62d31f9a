"""Every mesh over the ranks of one process group, as they see it; tests/learner/test_two_ranks.py looks at two of them.

`RANK=R WORLD_SIZE=N python mesh_ranks.py FOLDER` does the same for N ranks: three and four in test_meshes.py.
"""

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs import Config
from learner.checkpoints.checkpointer import Checkpointer
from learner.layout import CopiesDiffer
from learner.optimizer import Optimizer
from learner.policy.meshes import Meshes, make_meshes
from learner.policy.model import Policy
from tests.learner.recorded import batch_of, random_step, scored, train_on
from tests.learner.tiny_models import CPU, built, make_config, process_group, save_model
from tests.learner.tiny_models import saved as saved_folder
from weight_bus.digest import slice_digest

CONDITIONED = {"adam_epsilon": 1e-6}
NUM_STEPS = int(os.environ.get("MESH_STEPS", "3"))
MICROBATCHES = 2
Case = tuple[str, str, dict[str, int], dict[str, Any], dict[str, Any]]
SEQUENCE = {"loss": "gspo", "aggregation": "sequence"}
"""A loss that looks at whole trajectories."""
TAUGHT = {"distillation": {"top_k": {"k": 5, "direction": "forward"}}}
"""A teacher's own tokens, which lie on either rank of a vocabulary."""
NONE, FULL = {"recompute": "none"}, {"recompute": "full"}
CASES: dict[int, list[Case]] = {
    2: [
        ("replicate", "even", {"replicate": 2}, NONE, {}),
        ("tensor", "even", {"tensor": 2}, FULL | {"minibatches": 3}, {}),
        ("biased", "biased", {"tensor": 2}, {"recompute": "selective"}, {}),
        ("taught", "biased", {"tensor": 2}, NONE, TAUGHT),
        ("gemma3", "gemma3", {"tensor": 2}, NONE, {}),
        ("granite", "granite", {"tensor": 2}, NONE, {}),
        ("phi3", "phi3", {}, NONE, {}),
        ("sequence", "even", {}, NONE, SEQUENCE),
        ("expert", "mixture", {"expert": 2}, FULL, {}),
        ("expert_selective", "mixture", {"expert": 2}, {"recompute": "selective"}, {}),
        ("updates", "even", {}, {"minibatches": 2, "epochs": 2}, {"proximal": "current", "correction": "token_tis"}),
    ],
    3: [("shard", "even", {}, NONE, {}), ("shard_again", "biased", {}, FULL, {})],
    4: [
        (f"{name}_{learner['recompute']}", model, sizes, learner, {})
        for name, model, sizes in (
            ("tensor_shard", "uneven", {"tensor": 2}),
            ("replicate_shard", "uneven", {"replicate": 2}),
            ("replicate_tensor", "even", {"replicate": 2, "tensor": 2}),
        )
        for learner in (NONE, FULL)
    ],
}
"""By number of ranks: name, model, learner.mesh, other keys of the learner and the algorithm."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SAME: dict[int, list[Case]] = {
    ranks: [
        (f"{model}_{ranks}" + "".join(f"_{name}" for name in sizes), model, sizes, NONE, {})
        for model, *meshes in (
            ("uneven", {}, {"tensor": 2}, {"replicate": 2}, {"replicate": 2, "tensor": 2}),
            ("mixture", {}, {"expert": 2}, {"replicate": 2}, {"replicate": 2, "expert": 2}),
        )
        for sizes in meshes
        if ranks % math.prod(sizes.values()) == 0
    ]
    for ranks in range(1, 5)
}
"""By number of ranks: every mesh that has the same weights as one rank, before and after a step."""


def save_models(folder: Path) -> None:
    """Qwen3, also with columns that four ranks share unevenly; Qwen2 with biases; a mixture; families with more."""
    save_model(folder / "mixture", "qwen3_moe", **EXPERTS)
    save_model(folder / "even")
    save_model(folder / "uneven", intermediate_size=190)
    save_model(folder / "biased", "qwen2", tied=False)
    save_model(folder / "gemma3", "gemma3_text", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    save_model(folder / "granite", "granite", logits_scaling=0.4, embedding_multiplier=3.0, attention_multiplier=0.4)
    save_model(folder / "phi3", "phi3", tied=False, intermediate_size=191)


def configured(folder: Path, case: Case, ranks: int) -> Config:
    """The configuration of a case; `ranks` 1 is the same without a mesh."""
    name, model, sizes, learner, algorithm = case
    return make_config(
        folder / model,
        placement={"split": f"1:{ranks}"},
        learner={**CONDITIONED, **learner, "mesh": sizes if ranks > 1 else {}},
        algorithm=algorithm,
        teachers={"big": {"path": "unused"}} if "distillation" in algorithm else {},
        run={"dir": str(folder / "runs"), "name": name},
    )


def steps(
    policy: Policy, optimizer: Optimizer, config: Config, numbers: range, microbatches: int = MICROBATCHES
) -> list[dict[str, float]]:
    """Train on these steps; the metrics of each."""
    seen, tensor = [], config.learner.mesh.tensor
    place = {"rank": policy.rank // tensor, "world_size": policy.world_size // tensor, "num_microbatches": microbatches}
    place["minibatches"] = config.learner.minibatches
    for step in numbers:
        batch = batch_of(random_step(step), step, **place)
        if (scoring := config.scoring) is not None:
            batch = scored(batch, *scoring.names, scoring.k)
        sums, reason = train_on(batch, policy, optimizer, config)
        assert not reason
        seen.append(sums.metrics() | {"actor/grad_norm": sums.grad_norm})
    return seen


def observe(folder: Path, case: Case, meshes: Any, world_size: int) -> dict[str, Any]:
    """Train; check gather, digests and layout against each other; the weights go to FOLDER/mesh_<name>."""
    config = configured(folder, case, world_size)
    policy, optimizer = built(config, meshes)
    seen: dict[str, Any] = {"start": policy.parameter_digest()}
    seen["steps"] = steps(policy, optimizer, config, range(1, NUM_STEPS + 1))
    full = dict(policy.named_full_tensors("float32"))
    assert policy.shard_digests("float32") == {name: slice_digest(tensor) for name, tensor in full.items()}
    rounded = dict(policy.named_full_tensors("bfloat16"))
    assert policy.shard_digests("bfloat16") == {name: slice_digest(tensor) for name, tensor in rounded.items()}
    if policy.rank == 0:
        save_file(full, folder / f"mesh_{case[0]}.safetensors")
    return seen | {"end": policy.parameter_digest(), "held": sum(shard.local.numel() for shard in policy.shards())}


def moved(folder: Path, saved: Case, loaded: Case, world_size: int, meshes: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of one mesh, taken up by another: the same weights, moments and next step."""
    seen = {}
    for name, case in (("saved", saved), ("loaded", loaded)):
        config = configured(folder, case, world_size)
        policy, optimizer = built(config, meshes[case[0]])
        keeper = Checkpointer(config, policy, optimizer)
        if name == "saved":
            steps(policy, optimizer, config, range(1, 3))
            checkpoint = saved_folder(keeper, 2)
        else:
            keeper.load(checkpoint)
        seen[name] = [policy.parameter_digest(), optimizer.num_steps]
    return seen


def same(folder: Path, case: Case, meshes: Any, world_size: int) -> dict[str, Any]:
    """Digest, norm and weights of a step; what one rank's checkpoint becomes here; the checkpoint of the case before.

    Checkpoints are FOLDER/runs/NAME/checkpoints/step_2, those of one rank step_1; loading compares all digests.
    """
    config = configured(folder, case, world_size)
    policy, optimizer = built(config, meshes)
    seen: dict[str, Any] = {"start": policy.parameter_digest()}
    seen["norm"] = steps(policy, optimizer, config, range(1, 2))[0]["actor/grad_norm"]
    full = dict(policy.named_full_tensors("float32"))
    first, last = folder / "runs" / f"{case[1]}_1" / "checkpoints" / "step_1", folder / f"last_{case[1]}"
    keeper = Checkpointer(config, policy, optimizer)
    if world_size == 1:
        saved_folder(keeper, 1)
    keeper.load(first)
    written = saved_folder(keeper, 2)
    keeper.load(Path(last.read_text()) if last.exists() else first)
    seen["resumed"] = policy.parameter_digest()
    if policy.rank == 0:
        save_file(full, folder / f"same_{case[0]}.safetensors")
        last.write_text(str(written))
    return seen


def drifted(folder: Path, case: Case, meshes: Meshes, world_size: int) -> str:
    """What is said after the last rank's copy of one parameter has changed by itself."""
    policy, _ = built(configured(folder, case, world_size), meshes)
    policy.parameter_digest()
    if policy.rank == world_size - 1:
        next(shard for shard in policy.shards() if shard.name == "model.norm.weight").local[:1] += 1e-3
    try:
        policy.parameter_digest()
    except CopiesDiffer as error:
        return str(error)
    return ""


def copies_are_settled(folder: Path, case: Case, meshes: Meshes, world_size: int) -> bool:
    """Gradients of what every tensor rank has: those of the first rank count, whatever another has computed."""
    config = configured(folder, case, world_size)
    policy, optimizer = built(config, meshes)
    policy.model.transformer.model.norm.register_full_backward_pre_hook(
        lambda _, grads: tuple(grad * (1 - 2 * policy.rank) for grad in grads)
    )
    steps(policy, optimizer, config, range(1, 2))
    try:
        return bool(policy.parameter_digest())
    except CopiesDiffer:
        return False


def meshes_for(folder: Path, cases: list[Case], world_size: int) -> dict[str, Any]:
    """Of each case by name; equal ones share their groups."""
    sizes = {case[0]: configured(folder, case, world_size).learner.mesh for case in cases}
    made = {mesh: make_meshes(mesh, CPU, timedelta(seconds=60)) for mesh in dict.fromkeys(sizes.values())}
    return {name: made[mesh] for name, mesh in sizes.items()}


def everything(folder: Path, world_size: int) -> dict[str, Any]:
    """Of all cases of so many ranks, and of checkpoints between the meshes."""
    cases = CASES[world_size]
    named, meshes = {case[0]: case for case in cases}, meshes_for(folder, cases, world_size)
    seen: dict[str, Any] = {case[0]: observe(folder, case, meshes[case[0]], world_size) for case in cases}
    if world_size == 2:
        seen["moved"] = moved(folder, named["tensor"], named["replicate"], world_size, meshes)
        seen["moved_experts"] = moved(folder, named["expert"], named["expert"], world_size, meshes)
        seen["drifted"] = [drifted(folder, named[name], meshes[name], world_size) for name in ("tensor", "replicate")]
        seen["settled"] = copies_are_settled(folder, named["tensor"], meshes["tensor"], world_size)
    if world_size == 4:
        pairs = [("tensor_shard_none", "replicate_shard_none")]
        seen["moved"] = [moved(folder, named[a], named[b], world_size, meshes) for a, b in pairs]
    return seen


def main() -> None:
    rank, world_size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    with process_group(folder / f"store_{world_size}", rank, world_size):
        if "SAME" in os.environ:
            meshes = meshes_for(folder, SAME[world_size], world_size)
            seen = {case[0]: same(folder, case, meshes[case[0]], world_size) for case in SAME[world_size]}
        else:
            seen = everything(folder, world_size)
    (folder / f"rank_{rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # as two_ranks.py does


if __name__ == "__main__":
    main()
