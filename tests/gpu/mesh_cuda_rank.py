"""One of several learner ranks on GPUs: `python mesh_cuda_rank.py FOLDER`, with the environment of a rank.

Every mesh of so many ranks from the same weights, with a critic and a reference model, and checkpoints that move
between the meshes. What it sees goes to FOLDER/rank_R.json; tests/gpu/test_meshes_cuda.py looks at it.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

import torch

from configs import Config
from learner.beside.beside import build_beside
from learner.checkpoints.checkpointer import Checkpointer
from learner.policy.meshes import make_meshes
from learner.ranks import Ranks, join_ranks
from learner.trainer import Trainer
from tests.learner import beside_ranks
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import built, make_config, saved
from weight_bus.digest import combined

STEPS = 2
MICROBATCHES = 2
MESHES: dict[int, dict[str, dict[str, int]]] = {
    1: {"alone": {}},
    2: {"shard": {}, "replicate": {"replicate": 2}, "tensor": {"tensor": 2}},
    4: {
        "shard": {},
        "replicate_shard": {"replicate": 2},
        "tensor_shard": {"tensor": 2},
        "replicate_tensor": {"replicate": 2, "tensor": 2},
    },
}
LEARNERS: dict[str, dict[str, Any]] = {
    "float32": {"compute_dtype": "float32", "attention": "sdpa"},
    "bfloat16": {"compute_dtype": "bfloat16"},
}
"""The second compiled, but for tensor ranks, which do not compile."""
BESIDE = {"none": {}, "critic": beside_ranks.PPO, "reference": beside_ranks.BOTH}


def configured(folder: Path, name: str, mesh: dict[str, int], learner: str, ranks: int, beside: str = "none") -> Config:
    """The configuration of all ranks."""
    settings = LEARNERS[learner] | {"compile": learner == "bfloat16" and "tensor" not in mesh}
    return make_config(
        folder / "model",
        **{
            "replay": {"async_lag": 2},
            "placement": {"device": "cuda", "split": f"1:{ranks}"},
            "limits": {"max_logprob_diff": 1e3, "max_logprob_diff_16bit": 1e3},
            "run": {"dir": str(folder / "runs"), "name": f"{name}-{beside}"},
            **BESIDE[beside],
            "learner": {"adam_epsilon": 1e-6, "max_grad_norm": 10.0, **settings, "mesh": mesh},
        },
    )


def train(config: Config, mesh: Any, device: torch.device) -> tuple[dict[str, Any], Checkpointer]:
    """Loss and gradient norm of each step, and the digests before and after, with what stands beside the policy."""
    policy, optimizer = built(config, mesh, device)
    beside = build_beside(config, policy)
    tensor = config.learner.mesh.tensor
    place = {"rank": policy.rank // tensor, "world_size": policy.world_size // tensor}
    seen: dict[str, Any] = {"start": policy.parameter_digest(), "steps": []}
    for step in range(1, STEPS + 1):
        batch = batch_of(random_step(step), step, num_microbatches=MICROBATCHES, **place)
        update = Trainer(config, policy, optimizer, beside=beside).train_step(batch)
        assert not update.reason, update.reason
        values = {name: update.values[name] for name in update.values if name.startswith(("critic/vf", "actor/kl"))}
        seen["steps"].append({"loss": update.sums.loss, "norm": update.sums.grad_norm, **values})
    seen |= {"end": policy.parameter_digest(), "beside": combined(beside.digests())}
    seen["held"] = sum(shard.local.numel() for shard in policy.shards())
    return seen, Checkpointer(config, policy, optimizer, beside.parts)


def moved(folder: Path, ranks: Ranks, meshes: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of each mesh, taken up by every other: digests before and after."""
    seen: dict[str, Any] = {}
    for source, given in meshes.items():
        config = configured(folder, f"move-{source}", MESHES[ranks.world_size][source], "float32", ranks.world_size)
        made, keeper = train(config, given, ranks.device)
        path = saved(keeper, STEPS)
        seen[source] = {"path": str(path), "end": made["end"], "loaded": {}}
        for target, other in meshes.items():
            its = configured(folder, f"move-{source}", MESHES[ranks.world_size][target], "float32", ranks.world_size)
            policy, optimizer = built(its, other, ranks.device)
            Checkpointer(its, policy, optimizer).load(path)
            seen[source]["loaded"][target] = [policy.parameter_digest(), optimizer.num_steps]
    return seen


def observe(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """All meshes of so many ranks."""
    sizes = MESHES[ranks.world_size]
    meshes = {
        name: make_meshes(configured(folder, name, mesh, "float32", ranks.world_size).learner.mesh, ranks.device,
                          timedelta(seconds=60))
        for name, mesh in sizes.items()
    }  # fmt: skip
    cases = [(learner, "none") for learner in LEARNERS] + [("float32", "critic"), ("float32", "reference")]
    seen: dict[str, Any] = {"trained": {}}
    for name, mesh in sizes.items():
        for learner, beside in cases:
            if beside != "none" and mesh:
                continue  # refused: models beside the policy know ranks that shard
            config = configured(folder, name, mesh, learner, ranks.world_size, beside)
            seen["trained"][f"{name}; {learner}; {beside}"] = train(config, meshes[name], ranks.device)[0]
    if ranks.world_size > 1:
        seen["moved"] = moved(folder, ranks, meshes)
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    count = int(os.environ.get("WORLD_SIZE", "1"))
    with join_ranks(configured(folder, "all", {}, "float32", count)) as ranks:
        seen = observe(folder, ranks)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(seen))
    os._exit(0)


if __name__ == "__main__":
    main()
