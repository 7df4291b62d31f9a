"""Saved rollouts: tokens with every digit of their logprobs, and the text that a person reads."""

import json

import numpy as np
from recorded import batch_of, random_step
from tiny_models import make_config

from learner.report import rollouts
from learner.report.rollouts import RolloutWriter


class Letters:
    """A tokenizer with one letter a token."""

    def decode(self, token_ids, **_settings):
        return "".join(chr(65 + token) for token in token_ids)


def test_a_saved_trajectory_has_text_score_and_exact_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "load_tokenizer", lambda folder: Letters())
    config = make_config(tmp_path, run={"dir": str(tmp_path), "name": "run"}, tracking={"save_rollouts_every": 2})
    writer = RolloutWriter(config)
    for step in (1, 2):
        trajectories = random_step(step)
        batch = batch_of(trajectories, step, rank=1, world_size=2)
        writer.write_if_due(batch, np.arange(len(trajectories), dtype=np.float32))
    assert [path.name for path in (tmp_path / "run" / "rollouts").iterdir()] == ["step_2"]
    lines = (tmp_path / "run" / "rollouts" / "step_2" / "rank_1.jsonl").read_text().splitlines()
    own = trajectories[1::2]
    assert len(lines) == len(own)
    for row, trajectory in zip(map(json.loads, lines), own, strict=True):
        assert row["prompt_ids"] == trajectory.prompt_ids and row["response_ids"] == trajectory.response_ids
        assert row["logprobs"] == trajectory.logprobs and row["versions"] == trajectory.versions
        assert row["prompt"] == Letters().decode(trajectory.prompt_ids)
        assert row["text"] == Letters().decode(trajectory.response_ids)
        assert row["score"] == row["reward"] == trajectory.reward
