"""weight_bus.stage_in: what it goes with."""

import pytest

from configs.loading import ConfigError, load

ENGINE = ("rollout.engine=sglang", "weight_bus.stage_in=engine")
NCCL = (*ENGINE, "weight_bus.backend=nccl")


@pytest.mark.parametrize(
    "overrides",
    [ENGINE, NCCL, (*NCCL, "placement.tensor_parallel=2", "placement.split=2:1"), (*ENGINE, "weight_bus.delta=true")],
)
def test_updates_can_be_staged_in_the_engine(overrides: tuple[str, ...]) -> None:
    assert load("quickstart", list(overrides)).weight_bus.stage_in == "engine"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["weight_bus.stage_in=engine"], ["rollout.engine 'torch'", "rollout.engine=sglang"]),
        ([*ENGINE, "weight_bus.apply=direct"], ["weight_bus.apply 'direct'", "weight_bus.apply=staged"]),
        (
            [*ENGINE, "weight_bus.transport=disk", "weight_bus.folder=/tmp"],
            ["weight_bus.transport 'disk'", "weight_bus.transport=collective"],
        ),
        ([*ENGINE, "weight_bus.backend=ucc"], ["weight_bus.backend 'ucc'", "weight_bus.backend=gloo or nccl"]),
        (
            [*ENGINE, "placement.tensor_parallel=2", "placement.split=2:1"],
            ["weight_bus.backend 'gloo'", "placement.tensor_parallel 2", "weight_bus.backend=nccl"],
        ),
        (["rollout.engine=sglang", "weight_bus.stage_in=gpu"], ["weight_bus.stage_in"]),
    ],
)
def test_what_cannot_stage_in_the_engine_is_refused_by_name(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", overrides)
    for word in ["weight_bus.stage_in", *words]:
        assert word in str(refused.value)
