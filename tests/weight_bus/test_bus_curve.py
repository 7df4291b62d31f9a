"""Versions reach engines over a control plane with keys; who has none, or others, is told so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from replay import keys as make_keys
from replay.channel import ChannelError, Keys, handshake, load_keys
from tests.support.bus_receiver import Rollout, digests, learner, publish, until, weights
from weight_bus import BusClosed, Publisher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bus-keys")
    make_keys.make(root / "learner", ["node1"], force=False)
    make_keys.export(root / "learner", "node1", root / "node1")
    make_keys.make(root / "other", [], force=False)
    return root


@pytest.fixture
def publisher(folder: Path) -> Iterator[Publisher]:
    with learner(keys=load_keys(folder / "learner")) as made:
        yield made


def follow(publisher: Publisher, keys: Keys | None) -> Rollout:
    return Rollout(publisher, "r0", keys=keys, ends=(BusClosed, ChannelError))


def test_versions_arrive(publisher: Publisher, folder: Path) -> None:
    server = follow(publisher, load_keys(folder / "node1"))
    for version in (0, 1):
        assert publish(publisher, version).failed == {}
        until(lambda version=version: version in server.engine.activated, f"v{version}")
        assert digests(server.engine.live) == digests(weights(version))
    publisher.close()
    server.join(10.0)
    assert isinstance(server.ended, BusClosed) and "said goodbye" in str(server.ended)


@pytest.mark.parametrize(
    ("name", "says"), [(None, "wants CURVE keys"), ("other", r"its key is not .*other/server\.key")]
)
def test_refused_subscribers_end_with_the_reason(
    publisher: Publisher, folder: Path, name: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.3)
    server = follow(publisher, load_keys(folder / name if name is not None else None))
    server.join(20.0)
    assert isinstance(server.ended, ChannelError)
    with pytest.raises(ChannelError, match=says):
        raise server.ended
    assert publish(publisher, 0).served == []
