"""Tensors that never travel, as under adapters: an engine must hold them, or it is refused by their names."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from tests.support.bus_receiver import CONFIG, Engine, digests, learner, servers, weights
from weight_bus import RemovedFromBus

KEPT = {"model.embed.weight": 11, "model.norm.weight": 2**64 - 1}
TRANSPORTS = {"gloo": {}, "disk": {"transport": "disk"}, "delta": {"delta": True}}


class Adapted(Engine):
    """Holds what no update carries, too."""

    def __init__(self, kept: Mapping[str, int]) -> None:
        super().__init__()
        self._kept = kept

    def load(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        return {**super().load(version, named_tensors), **self._kept}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_holds_them_is_served_and_one_that_does_not_is_refused_by_name(
    transport: str, tmp_path: Path
) -> None:
    keys = {"folder": str(tmp_path), "max_heals": 1, **TRANSPORTS[transport]}
    config = CONFIG.model_copy(update=keys)
    with learner(config, kept=KEPT) as publisher:
        (good,) = servers(publisher, "good", engine=Adapted(KEPT), config=config)
        (bad,) = servers(publisher, "bad", engine=Adapted(KEPT | {"model.norm.weight": 3}), config=config)
        for version in (0, 1):
            named = weights(version, dtype=torch.float32)
            report = publisher.publish(version, named.items(), {**digests(named), **KEPT})
            assert "good" in report.served and report.num_bytes < 1.1 * sum(t.nbytes for t in named.values())
        bad.join(20.0)
        assert isinstance(bad.ended, RemovedFromBus) and bad.engine.activated == []
        assert (
            "1 tensors of the engine differ, first 'model.norm.weight'; no update carries that: start the engine"
            in (bad.engine.quarantined[0][1])
        )
        (late,) = servers(publisher, "late", engine=Adapted(KEPT), config=config)
        publisher.publish(2, named.items(), {**digests(named), **KEPT})
        assert good.engine.activated[-1] == 2 and late.engine.activated[-1] == 2
        with pytest.raises(ValueError, match="first difference: 'model\\.embed"):
            publisher.start_publish(3, named.items(), digests(named))
