"""Buckets travel while later ones are packed; an update that does not come to its end is applied by nobody."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.bus_receiver import CONFIG, Weights, digests, faulty, learner, servers, until, weights
from weight_bus import NonFiniteWeights

NAMES = list(weights(0))
Late = Callable[[Weights], None]


class Pair:
    """A publisher whose first bucket of each version is seen to leave, and two rollout servers."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self.publisher = learner(transport_factory=faulty(0, lambda _: self.left.set()))
        self.servers = servers(self.publisher, "one", "two")

    def publish(self, version: int, late: Late | None = None) -> list[str]:
        """Who is served; `late` is called before the last tensor, when the first bucket has left."""
        named = weights(version)
        changed = {name: tensor.clone() for name, tensor in named.items()}
        self.left.clear()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name in NAMES:
                if name == NAMES[-1] and late is not None:
                    assert self.left.wait(20.0), "no bucket left before the last tensor was there"
                    late(changed)
                yield name, changed[name]

        report = self.publisher.publish(version, tensors(), digests(named))
        return sorted(report.served)


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.publisher.close()


@pytest.mark.parametrize("again", [2, 3])
def test_what_turns_out_not_to_be_finite_is_applied_by_nobody_though_it_was_sent(pair, again):
    def spoil(named: Weights) -> None:
        named[NAMES[-1]][7] = float("nan")

    assert pair.publish(1) == ["one", "two"]
    with pytest.raises(NonFiniteWeights, match=r"norm\.weight"):
        pair.publish(2, late=spoil)
    assert pair.publisher.version == 1 and pair.publisher.wait().version == 1
    until(lambda: {state for state, _ in pair.publisher.members().values()} == {"waiting for weights"}, "called off")
    assert all(digests(server.engine.live) == digests(weights(1)) for server in pair.servers)
    assert pair.publish(again) == ["one", "two"], "the number may come again"
    stats = pair.publisher.stats()
    assert stats["corrupt"] == stats["lost_peers"] == stats["heals"] == 0
    assert all(server.engine.activated == [1, again] and not server.engine.quarantined for server in pair.servers)


def test_a_gather_that_stalls_costs_a_group_and_is_named(pair, caplog):
    assert pair.publish(1) == ["one", "two"]
    assert pair.publish(2, late=lambda _: time.sleep(2 * CONFIG.collective_timeout_s)) == ["one", "two"]
    assert "of v2 was not packed in 0.8 s: the learner is still gathering [slow]" in caplog.text
    assert pair.publisher.stats()["lost_peers"] == 0 and pair.publisher.epoch == 2
    assert all(server.engine.activated == [1, 2] for server in pair.servers)
