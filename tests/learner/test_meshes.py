"""Meshes: what they do not divide is refused; three and four ranks train what one does (two: test_two_ranks.py)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from configs import ConfigError
from configs.learner import LearnerSettings, Lora, Mesh
from examples.random_qwen3 import SHAPES
from learner.policy.divisibility import problem_with
from learner.policy.model import build_policy
from learner.policy.pretrained import PolicyError
from slipstream.check import checks, model_folders
from tests.learner import mesh_ranks
from tests.learner.recorded import random_step
from tests.learner.reference import train
from tests.learner.tiny_models import CPU, make_config
from tests.support.ranks import two_ranks

MODEL = SHAPES["0.6B"]
NUM_STEPS = 5


@pytest.mark.parametrize(
    ("sizes", "changes", "said"),
    [
        ({"tensor": 3}, {}, "learner.mesh.tensor: 3 does not divide num_attention_heads 16"),
        ({"tensor": 16}, {}, "16 does not divide num_key_value_heads 8 of the model; take 8"),
        ({"tensor": 4}, {"vocab_size": 151_938}, "vocab_size 151938 of the model; take 2"),
        ({"tensor": 2}, {"intermediate_size": 3071}, "intermediate_size 3071 of the model; take 1"),
        ({"tensor": 2}, {"model_type": "olmo2"}, "norms all heads together"),
        ({"expert": 2}, {}, "learner.mesh.expert: 2 with a qwen3 model, which has no experts; take 1"),
        ({"expert": 12}, SHAPES["30B-A3B"], "12 does not divide the 128 experts of the model; take 8"),
        ({"tensor": 2}, SHAPES["30B-A3B"], "its experts are divided by learner.mesh.expert; take 1"),
    ],
)
def test_what_a_mesh_does_not_divide_is_named_with_what_works(sizes: Any, changes: Any, said: str) -> None:
    assert said in problem_with(LearnerSettings(mesh=Mesh(**sizes)), MODEL | changes)


def test_experts_are_compiled_in_bfloat16_alone() -> None:
    given = {"compile": True, "compute_dtype": "float32"}
    said = problem_with(LearnerSettings(**given), SHAPES["30B-A3B"])
    assert "float32 and a qwen3_moe model" in said and said.endswith("take learner.compile=false")
    assert not problem_with(LearnerSettings(**given), MODEL)
    assert not problem_with(LearnerSettings(**given | {"compute_dtype": "bfloat16"}), SHAPES["30B-A3B"])


def test_a_target_that_the_model_has_not_is_named_with_those_it_has() -> None:
    learner = LearnerSettings(lora=Lora(rank=1, targets=["q_proj"]))
    assert not problem_with(learner, MODEL)
    assert not problem_with(learner, SHAPES["30B-A3B"], 0.01)
    assert "0.01 with a qwen3 model, which has no experts" in problem_with(learner, MODEL, 0.01)
    assert "it has qkv_proj, o_proj, gate_up_proj, down_proj" in problem_with(learner, MODEL | {"model_type": "phi3"})


def test_the_dry_run_and_every_rank_look_at_the_model(
    qwen3: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(qwen3, placement={"split": "1:4"}, learner={"mesh": {"tensor": 4}})
    monkeypatch.setattr(model_folders, "model_fingerprint", lambda *_: None)
    with pytest.raises(ConfigError, match="tensor: 4 does not divide num_key_value_heads 2"):
        list(checks.model(checks.Subject(config)))
    with pytest.raises(PolicyError, match="tensor: 4 does not divide num_key_value_heads 2"):
        build_policy(config, mesh, CPU)


@pytest.mark.slow  # up to four processes that train
def test_every_mesh_has_the_weights_the_norm_the_export_and_the_checkpoint_of_one_rank(tmp_path: Path) -> None:
    mesh_ranks.save_models(tmp_path)
    seen: dict[str, Any] = {}
    for ranks in mesh_ranks.SAME:
        place = {"WORLD_SIZE": str(ranks), "SAME": "1"}
        ranks_saw = two_ranks(
            Path(mesh_ranks.__file__), tmp_path, lambda rank, place=place: place, deadline_s=380, ranks=ranks
        )
        assert all(saw == ranks_saw[0] for saw in ranks_saw)
        seen |= ranks_saw[0]
    assert len(seen) == 18
    for name, found in seen.items():
        alone = f"{name.split('_')[0]}_1"
        weights, expected = (load_file(tmp_path / f"same_{one}.safetensors") for one in (name, alone))
        exports = [
            load_file(tmp_path / "runs" / one / "checkpoints/step_2/hf/model.safetensors") for one in (name, alone)
        ]
        worst = max(float((weights[key] - tensor).abs().max()) for key, tensor in expected.items())
        print(f"{name}: norm {found['norm']:.9g}, max |difference of a parameter after a step| = {worst:.3g}")
        assert found["start"] == seen[alone]["start"] and found["resumed"] == seen[alone]["resumed"]
        assert found["norm"] == pytest.approx(seen[alone]["norm"], rel=1e-6)
        assert weights.keys() == expected.keys() and worst <= 1e-6
        assert exports[0].keys() == exports[1].keys()
        assert all(torch.equal(exports[0][key], tensor) for key, tensor in exports[1].items())


@pytest.mark.slow  # up to four processes that train
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_train_what_the_reference_trains(tmp_path: Path, ranks: int) -> None:
    mesh_ranks.save_models(tmp_path)
    place, cases = {"WORLD_SIZE": str(ranks), "MESH_STEPS": str(NUM_STEPS)}, mesh_ranks.CASES[ranks]
    seen = two_ranks(Path(mesh_ranks.__file__), tmp_path, lambda rank: place, deadline_s=380, ranks=ranks)
    recorded = [random_step(step) for step in range(1, NUM_STEPS + 1)]
    for case in [case for case in cases if not case[4]]:  # the reference has one loss
        expected = train(tmp_path / case[1], recorded, mesh_ranks.configured(tmp_path, case, 1))
        found = load_file(tmp_path / f"mesh_{case[0]}.safetensors")
        differences = {name: float((found[name] - expected[name]).abs().max()) for name in expected}
        assert found.keys() == expected.keys() and max(differences.values()) <= 1e-5, (case[0], differences)
        assert all(rank[case[0]]["steps"] == seen[0][case[0]]["steps"] for rank in seen)
    for moved in seen[0].get("moved", []):
        assert moved["saved"] == moved["loaded"]
