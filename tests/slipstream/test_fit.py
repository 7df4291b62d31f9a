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


@pytest.mark.parametrize(
    ("shape", "gib", "fits", "ways"),
    [
        ("0.6B", 78, True, ["none", "selective", "full"]),
        ("1.7B", 78, True, ["none", "selective", "full"]),
        ("8B", 78, False, []),
    ],
)
def test_estimates_follow_from_config_json(
    tmp_path: Path, shape: str, gib: float, fits: bool, ways: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, shape, gpu_gib=gib)
    model, available = SHAPES[shape], fit.available_bytes(config)
    found = [fit.estimate(config, model, level, available) for level in fit.LEVELS]
    said = json.loads(fit.report(config, found, available).splitlines()[-1])
    assert said["fits"] is fits
    assert [way for way, tokens in said["estimated"].items() if tokens >= said["configured"]] == ways
    tokens = list(said["estimated"].values())
    assert tokens == sorted(tokens), "recomputing makes room"


def test_the_page_on_memory_shows_what_the_command_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "memory.md").read_text(encoding="utf-8")
    config = load("qwen3-8b-2nodes", ["placement.gpu_gib=80"])
    available = fit.available_bytes(config)
    found = [fit.estimate(config, SHAPES["8B"], level, available) for level in fit.LEVELS]
    assert "\n".join(fit.report(config, found, available).splitlines()[:-1]) in page


def test_without_a_gpu_the_table_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.policy.memory.gpu_bytes", lambda: None)
    config = config_of(tmp_path, "0.6B")
    found = [fit.estimate(config, SHAPES["0.6B"], level, None) for level in fit.LEVELS]
    assert "set placement.gpu_gib" in fit.report(config, found, None)
    assert fit.verdict(config, found)["estimated"]["none"] is None


def test_a_gpu_that_sglang_shares_has_less(tmp_path: Path) -> None:
    alone = fit.available_bytes(config_of(tmp_path, "0.6B", gpu_gib=80))
    shared = config_of(tmp_path, "0.6B", gpu_gib=80, share_gpus=True)
    with pytest.raises(fit.ConfigError, match="mem_fraction_static"):
        fit.available_bytes(shared)
    rollout = shared.rollout.model_copy(update={"sglang": {"mem_fraction_static": 0.35}})
    less = fit.available_bytes(shared.model_copy(update={"rollout": rollout}))
    assert alone is not None and less == alone - int(80 * 1024**3 * 0.35)


@pytest.mark.parametrize("share", ["0.35", 1, 1.5])
def test_a_share_that_is_none_is_refused(tmp_path: Path, share: object) -> None:
    config = config_of(tmp_path, "0.6B", gpu_gib=80, share_gpus=True)
    rollout = config.rollout.model_copy(update={"sglang": {"mem_fraction_static": share}})
    with pytest.raises(fit.ConfigError, match=r"rollout\.sglang: mem_fraction_static .* between 0 and 1"):
        fit.available_bytes(config.model_copy(update={"rollout": rollout}))


def test_activations_that_travel_leave_one_way(tmp_path: Path) -> None:
    config = config_of(tmp_path, "0.6B", gpu_gib=78)
    changed = {"offload_activations": True, "compile": False}
    config = config.model_copy(update={"learner": config.learner.model_copy(update=changed)})
    assert fit.levels_of(config) == ("full",)
    found = [fit.estimate(config, SHAPES["0.6B"], level, 70 * 1024**3) for level in fit.levels_of(config)]
    assert fit.verdict(config, found)["fits"] and set(fit.verdict(config, found)["estimated"]) == {"full"}
