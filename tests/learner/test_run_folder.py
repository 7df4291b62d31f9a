"""A run folder belongs to one run, and what cannot be written is refused before anything starts."""

import pytest
from tiny_models import make_config

from configs import ConfigError, load
from learner.launch.preflight import check_run_dir, check_trackers, claim_run_dir


def test_of_two_runs_that_checked_the_same_name_one_takes_the_next(tmp_path):
    config = make_config(tmp_path, run={"dir": str(tmp_path), "name": "same"})
    first = claim_run_dir(config, new=True)
    second = claim_run_dir(
        config.model_copy(update={"learner": config.learner.model_copy(update={"lr": 1.0})}), new=True
    )
    third = claim_run_dir(config, new=True)
    assert [c.run.name for c in (first, second, third)] == ["same", "same-2", "same-3"]
    assert [load(tmp_path / c.run.name / "config.yaml", []) for c in (first, second, third)] == [first, second, third]


def test_a_resumed_run_keeps_its_folder(tmp_path):
    config = make_config(tmp_path, run={"dir": str(tmp_path), "name": "same"})
    claim_run_dir(config, new=True)
    changed = config.model_copy(update={"learner": config.learner.model_copy(update={"total_steps": 20})})
    assert claim_run_dir(changed, new=False) == changed
    assert load(tmp_path / "same" / "config.yaml", []) == changed


@pytest.mark.parametrize("place", ["/proc/runs", "{tmp}/file", "{tmp}/file/below"])
def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").touch()
    config = make_config(tmp_path, run={"dir": place.format(tmp=tmp_path), "name": "run"})
    for refuse in (check_run_dir, lambda config: claim_run_dir(config, new=True)):
        with pytest.raises(ConfigError, match=r"^run.dir: .*name a folder"):
            refuse(config)


def test_an_empty_wandb_mode_is_refused_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "")
    with pytest.raises(ConfigError, match="unset WANDB_MODE"):
        check_trackers(make_config(tmp_path, tracking={"wandb": "offline"}))
    check_trackers(make_config(tmp_path))
