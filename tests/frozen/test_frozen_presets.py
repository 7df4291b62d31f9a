"""Every preset resolves to what it was at commit a694bf1, but for the changes named here."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.loading import load

FROZEN = json.loads((Path(__file__).parent / "presets.json").read_text())
CHANGED: dict[str, dict[str, Any]] = {
    "*": {
        "network.silent_after_s": 30.0,
        "rollout.forced_length_median": "gone",
        "rollout.forced_length_sigma": "gone",
        "rollout.top_p": "gone",
        "rollout.top_k": "gone",
        "algorithm.advantage_epsilon": "gone",
        "algorithm.normalize_by_std": "gone",
        "algorithm.max_prox_weight": "gone",
        "algorithm.clip_low": None,  # that of the loss: for ppo_clip 0.2 and 0.28, as they were
        "algorithm.clip_high": None,
        "learner.recompute": "auto",
        "tracking.tensorboard": "gone",  # accepted still, as tracking.trackers
        "tracking.wandb": "gone",
        "tracking.wandb_project": "gone",
    },
    "quickstart": {"replay.journal_keep": "all"},
}
"""By preset (`*`: all), the keys that have another value now. Each has a line in CHANGELOG.md."""


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


@pytest.mark.parametrize("preset", sorted(FROZEN))
def test_a_preset_means_what_it_meant(preset: str) -> None:
    now, frozen = leaves(load(preset).model_dump(mode="json")), leaves(FROZEN[preset])
    expected = frozen | CHANGED.get("*", {}) | CHANGED.get(preset, {})
    assert {key: now.get(key, "gone") for key in expected if now.get(key, "gone") != expected[key]} == {}
