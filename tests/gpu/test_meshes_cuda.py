"""Meshes of learner ranks over NCCL against one GPU: digests, losses, norms, checkpoints, and digests after a kill.

`python -m pytest tests/gpu/test_meshes_cuda.py -s` needs two GPUs, goes over four meshes where there are four GPUs, and
prints the largest relative differences.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

from tests.gpu import mesh_cuda_rank, test_deterministic_cuda
from tests.gpu.test_learner_cuda import LARGER
from tests.learner.tiny_models import save_model
from tests.support.ranks import two_ranks
from tests.support.runs import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
RANKS = 4 if torch.cuda.device_count() >= 4 else 2
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative difference to one GPU."""


def seen_by(folder: Path, ranks: int) -> list[dict[str, Any]]:
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = Path(mesh_cuda_rank.__file__)
    return two_ranks(
        program, folder, lambda rank: where | {"LOCAL_RANK": str(rank)}, deadline_s=240, ranks=ranks, forks=False
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What one rank saw, and what several did, with the same weights."""
    found = {}
    for ranks in (1, RANKS):
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        save_model(folder / "model", **{**LARGER, "vocab_size": 64})
        found[ranks] = seen_by(folder, ranks)
    return found


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", mesh_cuda_rank.MESHES[RANKS])
def test_a_mesh_trains_what_one_gpu_trains(seen: dict[int, list[dict[str, Any]]], name: str) -> None:
    alone, several = seen[1][0]["trained"], [rank["trained"] for rank in seen[RANKS]]
    for case, expected in alone.items():
        learner, beside = case.split("; ")[1:]
        if beside != "none" and name != "shard":
            continue
        its = [rank[f"{name}; {learner}; {beside}"] for rank in several]
        assert all(one["start"] == expected["start"] for one in its), "the same weights"
        assert all(one["end"] == its[0]["end"] and one["beside"] == its[0]["beside"] for one in its)
        off = [
            (abs(found[key] - value) / max(abs(value), 1e-6), key)
            for found, right in zip(its[0]["steps"], expected["steps"], strict=True)
            for key, value in right.items()
        ]
        print(f"\n{name}; {learner}; {beside}: largest relative difference {max(off)[0]:.1e} ({max(off)[1]})")
        assert max(off)[0] <= BOUNDS[learner], (case, its[0]["steps"], expected["steps"])
    held = sum(rank[f"{name}; float32; none"]["held"] for rank in several)
    assert held < alone["alone; float32; none"]["held"] * (2.5 if "replicate" in name else 1.5), (
        "ranks divide the model"
    )


@pytest.mark.timeout(500)
def test_a_checkpoint_moves_between_meshes(seen: dict[int, list[dict[str, Any]]]) -> None:
    for rank in seen[RANKS]:
        for source, its in rank["moved"].items():
            for target, (digest, steps) in its["loaded"].items():
                assert (digest, steps) == (its["end"], mesh_cuda_rank.STEPS), (source, target)


@pytest.mark.timeout(400)
def test_killed_ranks_make_the_same_weights_again(tmp_path: Path) -> None:
    """Two ranks that shard, compiled, killed after step 7 and started again."""
    save_model(tmp_path / "model", **LARGER)
    run, made = test_deterministic_cuda.run, test_deterministic_cuda.made
    assert run(tmp_path, "straight", ranks=2, compile=True) == 0
    assert run(tmp_path, "killed", ranks=2, kill_at=test_deterministic_cuda.KILL_AT, compile=True) == -9
    assert run(tmp_path, "killed", ranks=2, compile=True) == 0
    straight, killed = made(tmp_path, "straight")[0], made(tmp_path, "killed")[0]
    assert len(killed[test_deterministic_cuda.KILL_AT]) == 2
    assert {step: set(found) for step, found in killed.items()} == {step: set(each) for step, each in straight.items()}
    assert len(set(itertools.chain(*straight.values()))) == test_deterministic_cuda.STEPS
