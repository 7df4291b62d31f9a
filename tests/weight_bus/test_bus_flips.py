"""Bits that flip anywhere on their way into an engine: each is named and healed, and none is served."""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch

from configs.infrastructure import WeightBus
from tests.support.bus_receiver import CONFIG, Engine, Weights, digests, faulty, learner, servers, weights
from tests.weight_bus.test_bus_changes import DELTA, stepped
from weight_bus.staging import Staging

UPDATES = int(os.environ.get("SLIPSTREAM_FLIP_UPDATES", "24"))
NAME = "layers.1.weight"


class Spoilt(Engine):
    """Flips the bit that is due where it belongs, once, and looks at what it is to serve byte by byte."""

    def __init__(self, flip: Callable[[str, torch.Tensor], None], truth: Weights) -> None:
        super().__init__(lambda _, live: flip("live", live[NAME]))
        self.flip, self.truth, self.wrong = flip, truth, list[int]()

    def load(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        def staged() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_tensors:
                if name == NAME:
                    self.flip("staged", tensor)  # proven, and not copied yet
                yield name, tensor
                if name == NAME:
                    self.flip("base", tensor)  # copied: a change of the next version builds on it

        return super().load(version, staged())

    def activate(self, version: int, evaluate: bool) -> None:
        super().activate(version, evaluate)
        held = {name: tensor.view(torch.uint8) for name, tensor in self.live.items()}
        if not all(torch.equal(held[name], tensor.view(torch.uint8)) for name, tensor in self.truth.items()):
            self.wrong.append(version)


@pytest.mark.parametrize("proves_staged", [True, False])
@pytest.mark.parametrize("config", [CONFIG, DELTA], ids=["whole", "changes"])
def test_every_flipped_bit_is_found_and_healed_and_none_is_served(
    config: WeightBus, proves_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the proof of staged bytes, by the digests of live weights alone."""
    if not proves_staged:
        monkeypatch.setattr(Staging, "corrupt", lambda self: [])
    rng, due, truth, planted = random.Random(3), set[str](), dict(weights(0, rows=60)), dict[str, int]()

    def flip(place: str, tensor: torch.Tensor) -> None:
        if place in due:
            due.remove(place)
            data = tensor.view(-1).view(torch.uint8)
            data[rng.randrange(data.numel())] ^= 1 << rng.randrange(8)

    engine, wire = Spoilt(flip, truth), faulty(0, lambda bucket: flip("wire", bucket))
    with learner(config) as publisher:
        made = servers(publisher, "hit", config=config, engine=engine, factory=wire)
        made += servers(publisher, "spared", config=config)
        for version in range(UPDATES):
            place = "" if version % 2 == 0 else rng.choice(["wire", "staged", "live", *["base"] * config.delta])
            due |= {place} - {""}
            planted[place] = planted.get(place, 0) + 1
            truth |= stepped(truth, version)
            report = publisher.publish(version, truth.items(), digests(truth))
            assert sorted(report.served) == ["hit", "spared"] and not report.failed and not due
        stats = publisher.stats()
    for rollout in made:
        rollout.join(20.0)
    assert engine.wrong == [] and engine.activated == list(range(UPDATES))
    harmless = planted["wire"] if config.delta else 0  # bits of a coded change that carry nothing
    assert UPDATES // 2 - harmless <= stats["corrupt"] + stats["quarantines"] <= UPDATES // 2
    assert planted.keys() == {"", "wire", "staged", "live", *["base"] * config.delta}
