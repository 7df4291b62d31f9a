"""How large a microbatch may be: estimates for shapes of presets."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs import Config
from configs.loading import load
from examples.random_qwen3 import SHAPES
from slipstream.check import fit
from tests.learner.tiny_models import make_config


def config_of(folder: Path, shape: str, **placement: Any) -> Config:
    """A shape as its config.json alone says it."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return make_config(
        folder,
        learner={"compile": True, "compute_dtype": "bfloat16", "max_tokens_per_microbatch": 16384},
        placement={"device": "cuda", "split": "1:1", **placement},
    )


def test_the_page_on_memory_shows_what_the_command_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "memory.md").read_text(encoding="utf-8")
    config = load("qwen3-8b-2nodes", ["placement.gpu_gib=80"])
    assert fit.estimated(config, SHAPES["8B"], fit.available_bytes(config))[0] in page


@pytest.mark.parametrize(("shape", "fits"), [("1.7B", True), ("8B", False)])
def test_recomputing_makes_room_and_the_configured_microbatch_is_judged(tmp_path: Path, shape: str, fits: bool) -> None:
    config = config_of(tmp_path, shape, gpu_gib=78)
    said = fit.estimated(config, SHAPES[shape], fit.available_bytes(config))[1]
    tokens = list(said["estimated"].values())
    assert said["fits"] is fits and tokens == sorted(tokens) and list(said["estimated"]) == list(fit.LEVELS)


def test_without_a_gpu_the_table_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.policy.memory.gpu_bytes", lambda: None)
    config = config_of(tmp_path, "0.6B")
    table, verdict = fit.estimated(config, SHAPES["0.6B"], fit.available_bytes(config))
    assert "set placement.gpu_gib" in table and verdict["estimated"]["none"] is None and verdict["fits"]


def test_activations_that_travel_leave_one_way(tmp_path: Path) -> None:
    config = config_of(tmp_path, "0.6B", gpu_gib=78)
    changed = {"offload_activations": True, "compile": False}
    config = config.model_copy(update={"learner": config.learner.model_copy(update=changed)})
    verdict = fit.estimated(config, SHAPES["0.6B"], 70 * 1024**3)[1]
    assert verdict["fits"] and set(verdict["estimated"]) == {"full"}


@pytest.mark.parametrize(
    ("share", "said"), [(None, "mem_fraction_static"), (1.5, r"mem_fraction_static .* between 0 and 1"), (0.35, "")]
)
def test_a_gpu_that_sglang_shares_has_less(tmp_path: Path, share: float | None, said: str) -> None:
    alone = fit.available_bytes(config_of(tmp_path, "0.6B", gpu_gib=80))
    shared = config_of(tmp_path, "0.6B", gpu_gib=80, share_gpus=True)
    if share is not None:
        rollout = shared.rollout.model_copy(update={"sglang": {"mem_fraction_static": share}})
        shared = shared.model_copy(update={"rollout": rollout})
    if said:
        with pytest.raises(fit.ConfigError, match=said):
            fit.available_bytes(shared)
    else:
        assert alone is not None and fit.available_bytes(shared) == alone - int(80 * 1024**3 * share)
