"""Versions reach engines over a control plane with keys; who has none, or others, is told so."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay import keys as make_keys
from replay.channel import ChannelError, Keys, handshake, load_keys
from tests.support.bus_receiver import CONFIG, HOST, RUN, Engine, digests, until, weights
from weight_bus import BusClosed, Publisher, Subscriber


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bus-keys")
    make_keys.make(root / "learner", ["node1"], force=False)
    make_keys.export(root / "learner", "node1", root / "node1")
    make_keys.make(root / "other", [], force=False)
    return root


@pytest.fixture
def publisher(folder: Path) -> Iterator[Publisher]:
    made = Publisher(CONFIG, host=HOST, run_id=RUN, incarnation=1, keys=load_keys(folder / "learner"))
    yield made
    made.close()


def receive_all(subscriber: Subscriber, engine: Engine, ended: list[BaseException]) -> None:
    try:
        while True:
            subscriber.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
    except (BusClosed, ChannelError) as error:
        ended.append(error)
    finally:
        subscriber.close()


def follow(publisher: Publisher, keys: Keys | None) -> tuple[Engine, list[BaseException], threading.Thread]:
    subscriber = Subscriber(publisher.address, name="r0", config=CONFIG, host=HOST, run_id=RUN, keys=keys)
    engine, ended = Engine(), list[BaseException]()
    thread = threading.Thread(target=receive_all, args=(subscriber, engine, ended), daemon=True)
    thread.start()
    return engine, ended, thread


def test_versions_arrive(publisher: Publisher, folder: Path) -> None:
    engine, ended, thread = follow(publisher, load_keys(folder / "node1"))
    for version in (0, 1):
        report = publisher.publish(version, weights(version).items(), digests(weights(version)))
        assert report.failed == {}
        until(lambda version=version: version in engine.activated, f"v{version}")
        assert digests(engine.live) == digests(weights(version))
    publisher.close()
    thread.join(10.0)
    assert isinstance(ended[0], BusClosed) and "said goodbye" in str(ended[0])


@pytest.mark.parametrize(
    ("name", "says"), [(None, "wants CURVE keys"), ("other", r"its key is not .*other/server\.key")]
)
def test_refused_subscribers_end_with_the_reason(
    publisher: Publisher, folder: Path, name: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.3)
    _, ended, thread = follow(publisher, load_keys(folder / name if name is not None else None))
    thread.join(20.0)
    assert not thread.is_alive()
    with pytest.raises(ChannelError, match=says):
        raise ended[0]
    report = publisher.publish(0, weights(0).items(), digests(weights(0)))
    assert report.served == []
