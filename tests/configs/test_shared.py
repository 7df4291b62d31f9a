"""Keys that every process of a run has alike: which they are, and how their values are shown."""

from typing import Any

import pytest

from configs.loading import parse
from configs.shared import concerns, shared_values

MINIMAL = "model: {path: m}\ndata: {train: d.jsonl}\nreward: {function: numeric}\n"
DIGEST = "digest "


@pytest.mark.parametrize(
    ("overrides", "differing"),
    [
        (["learner.lr=3e-4", "algorithm.loss=gspo", "run.seed=3"], ["run.seed", "algorithm.loss", "learner.lr"]),
        (["reward.function={numeric: {tolerance: 0.1}}"], ["reward.function"]),
        (["network.env={A: b}"], ["network.env"]),
        # of a host or a process alone: names, addresses, paths, cores, memory
        (["run.name=other", "run.dir=elsewhere", "model.path=/mnt/m", "data.train=/mnt/d.jsonl"], []),
        (["network.host=127.0.0.2", "network.replay_port=5757", "weight_bus.port=7"], []),
        (["rollout.max_running=8", "rollout.sglang={mem_fraction_static: 0.6}", "reward.workers=4"], []),
    ],
)
def test_what_differs_is_named_by_key(overrides: list[str], differing: list[str]) -> None:
    ours, theirs = shared_values(parse(MINIMAL, "a")), shared_values(parse(MINIMAL, "b", overrides))
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if ours[key] != theirs[key]] == differing


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment.options", "{tools: [calculator], api_key: hidden}"),
        ("environment.options", "{long: " + "x" * 300 + "}"),
        ("network.env", "{TRACKER_KEY: hidden}"),
    ],
)
def test_secrets_and_long_values_are_compared_by_digest(key: str, value: str) -> None:
    given: dict[str, Any] = shared_values(parse(MINIMAL, "a", ["environment.function=tools", f"{key}={value}"]))
    assert given[key].startswith(DIGEST) and "hidden" not in str(given)


def test_a_rollout_server_is_not_compared_in_what_the_learner_alone_reads() -> None:
    keys = shared_values(parse(MINIMAL, "a"))
    ignored = {key.partition(".")[0] for key in keys if not concerns("rollout_server", key)}
    assert ignored == {"algorithm", "critic", "learner", "evaluation", "checkpoint", "placement", "tracking", "limits"}
    assert concerns("rollout_server", "learner.lora.rank") and concerns("rollout_server", "tokenizer")
    assert all(concerns("learner", key) for key in keys)
