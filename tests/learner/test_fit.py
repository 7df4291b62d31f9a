"""How large a microbatch may be: estimates for shapes of presets, and steps of one rank among many."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_config, save_model

from configs import Config
from configs.loading import load
from learner import fit
from learner.examples.random_qwen3 import SHAPES

CPU = torch.device("cpu")


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


def test_what_measured_steps_do_not_make_is_held(tmp_path: Path) -> None:
    """A reference model and a critic, each of its own size, and the packed versions."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(SHAPES["1.7B"]), encoding="utf-8")
    config = config_of(tmp_path, "0.6B", gpu_gib=200)
    algorithm = {"kl": "k3", "reference_path": str(other), "advantage": "gae"}
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=algorithm)})
    budget = fit.choose(fit.Setup.of(config, SHAPES["0.6B"]), None)
    reference, critic, packed = (budget.items[name] for name in fit.BESIDE)
    assert reference == pytest.approx(2 * 1.72e9, rel=0.01) and critic == pytest.approx(12 * 0.596e9, rel=0.01)
    assert fit.taken_by_others(config, budget, CPU) == reference + critic + packed


def test_a_rank_among_three_makes_its_steps_alone(tmp_path: Path) -> None:
    """The shards and gathers of three ranks, with collectives that move nothing."""
    model = json.loads((save_model(tmp_path / "model") / "config.json").read_text(encoding="utf-8"))
    config = make_config(tmp_path / "model", placement={"split": "1:3", "device": "cpu"})
    fit.make_steps(config, model, "full", 70, CPU)
    assert not torch.distributed.is_initialized()


def test_the_largest_microbatch_is_looked_for_around_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, "0.6B", gpu_gib=78)
    most, tried = 20_000, []

    def steps(config: Config, model: Any, level: str, tokens: int, device: Any) -> None:
        tried.append(tokens)
        if tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(fit, "make_steps", steps)
    # which collects garbage after each of 71 tries: seconds in a process that has much
    monkeypatch.setattr("accelerate.utils.memory.clear_device_cache", lambda *_, **__: None)
    one = fit.estimate(config, SHAPES["0.6B"], "none", fit.available_bytes(config))
    found = fit.measure(config, SHAPES["0.6B"], one)
    assert one.estimated is not None and tried[0] == one.estimated * 5 // 4
    assert most * 7 // 8 <= found <= most and tried[-1] == found
    assert f"{tried[0]} tokens do not fit" in capsys.readouterr().err
    most = 0
    assert fit.measure(config, SHAPES["0.6B"], one) == 0
