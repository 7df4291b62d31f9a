"""The model that is sent, and a subscriber that holds it."""

import threading
from collections.abc import Iterable, Mapping

import torch

from configs.infrastructure import WeightBus
from scripts.bus_corruption.flips import Saboteur, flip, wires
from scripts.bus_corruption.observer import Observer
from weight_bus import BusClosed, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.manifest import Manifest, plan

HOST = "127.0.0.1"
RUN = "bus-corruption"
BUCKET_BYTES = 16 * 1024
CHANGED = 0.02
"""Share of the elements that differ from one version to the next."""

Weights = dict[str, torch.Tensor]


def model(rng: torch.Generator) -> Weights:
    """A tiny policy: matrices in bfloat16, vectors in float32, one of a single element."""
    named = {"embed": torch.randn(96, 64, generator=rng).bfloat16()}
    for layer in range(4):
        named[f"layers.{layer}.q"] = torch.randn(64, 64, generator=rng).bfloat16()
        named[f"layers.{layer}.norm"] = torch.randn(64, generator=rng)
    named["scale"] = torch.randn(1, generator=rng)
    return named


def step(named: Weights, rng: torch.Generator) -> Weights:
    """The next version: a few elements of each tensor have moved a little."""
    moved = {}
    for name, tensor in named.items():
        mask = torch.rand(tensor.shape, generator=rng) < CHANGED
        noise = 0.01 * torch.randn(tensor.shape, generator=rng)
        moved[name] = torch.where(mask, (tensor.float() + noise).to(tensor.dtype), tensor)
    return moved


def layout_of(named: Weights) -> Manifest:
    """Where each tensor lies in the buckets."""
    return plan([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in named.items()], BUCKET_BYTES)


class Receiver(threading.Thread):
    """A rollout server without an engine to serve: holds weights, and shows them to the observer."""

    def __init__(self, address: str, name: str, config: WeightBus, saboteur: Saboteur, observer: Observer) -> None:
        super().__init__(name=name, daemon=True)
        self.live: Weights = {}
        self.ended = ""
        self._saboteur, self._observer = saboteur, observer
        self._staged: Weights = {}
        self._subscriber = Subscriber(
            address, name=name, config=config, host=HOST, run_id=RUN, transport_factory=wires(saboteur, name)
        )
        self.start()

    def run(self) -> None:
        """Receive until the bus ends."""
        try:
            while True:
                self._subscriber.receive(self._load, activate=self._activate, quarantine=self._quarantine)
        except (BusClosed, RemovedFromBus) as error:
            self.ended = str(error)
        finally:
            self._subscriber.close()

    def _load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        self._staged = dict(named_tensors)  # views of the staging buffer
        self._spoil("staged", self._staged)
        for name, tensor in self._staged.items():
            self.live[name] = tensor.clone()
        self._spoil("base", self._staged)
        self._spoil("live", self.live)
        return {name: slice_digest(tensor) for name, tensor in self.live.items()}

    def _spoil(self, place: str, named: Weights) -> None:
        due = self._saboteur.take(place, self.name)
        if due is not None:
            flip(named[due.tensor], due.byte, due.bit)

    def _activate(self, version: int, _evaluate: bool) -> None:
        self._observer.look(self.name, version, self.live)

    def _quarantine(self, version: int, reason: str) -> None:
        """Nothing is served here that could be stopped."""
