"""Keys that are gone: files of older runs load, and another value than the fixed one is refused with the reason."""

import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError, load
from configs.loading import leaf_keys, validate
from configs.retired import RETIRED

FROZEN = Path(__file__).parents[1] / "frozen"


@pytest.mark.parametrize("run", ["finished", "killed"])
def test_the_configuration_of_an_older_run_loads_with_one_line(run, tmp_path, caplog):
    with tarfile.open(FROZEN / "runs_a694bf1.tar.gz") as archive:
        (tmp_path / "config.yaml").write_bytes(archive.extractfile(f"runs/{run}/config.yaml").read())  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "config.yaml", ["run.seed=3"])
        load("quickstart")
    (record,) = caplog.records
    assert record.getMessage().endswith(", ".join(sorted(RETIRED))), "and nothing of a new file"


def test_every_retired_key_is_gone_and_had_its_value_in_older_runs():
    assert not RETIRED.keys() & set(leaf_keys())
    trees: dict[str, dict[str, Any]] = json.loads((FROZEN / "presets.json").read_text())
    for key, (value, _) in RETIRED.items():
        section, leaf = key.split(".")
        assert {tree[section][leaf] for tree in trees.values()} == {value}


@pytest.mark.parametrize("key", sorted(RETIRED))
def test_another_value_is_refused_beside_other_problems(key):
    with pytest.raises(ConfigError) as refused:
        load("quickstart", [f"{key}=7", "learner.lr=0"])
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"--set {key}=7 over ") and f"{key}: 7 " in first
    assert "learner.lr" in second


def test_the_given_tree_is_left_alone():
    tree = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"top_p": 1.0}, "placement": {"device": "cpu"}}
    validate(tree, "here")
    assert tree["rollout"] == {"top_p": 1.0}
