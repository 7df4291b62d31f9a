"""Versions reach engines over a control plane with keys; refusals: tests/replay/test_curve.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replay import keys as make_keys
from replay.channel import load_keys
from tests.support.bus_receiver import Rollout, digests, learner, publish, until, weights
from weight_bus import BusClosed, Publisher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bus-keys")
    make_keys.make(root / "learner", ["node1"], force=False)
    make_keys.export(root / "learner", "node1", root / "node1")
    return root


@pytest.fixture
def publisher(folder: Path) -> Iterator[Publisher]:
    with learner(keys=load_keys(folder / "learner")) as made:
        yield made


def test_versions_arrive(publisher: Publisher, folder: Path) -> None:
    server = Rollout(publisher, "r0", keys=load_keys(folder / "node1"))
    for version in (0, 1):
        assert publish(publisher, version).failed == {}
        until(lambda version=version: version in server.engine.activated, f"v{version}")
        assert digests(server.engine.live) == digests(weights(version))
    publisher.close()
    server.join(10.0)
    assert isinstance(server.ended, BusClosed) and "said goodbye" in str(server.ended)
