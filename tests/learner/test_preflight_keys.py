"""The launcher refuses keys that cannot serve a run before anything starts, and a bind without keys by name."""

from pathlib import Path

import pytest

from configs.loading import ConfigError, load
from learner.launch.preflight import check_keys
from replay import keys as make_keys
from replay.channel import KeysError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys.make(tmp_path / "keys", ["node1"], force=False)
    return tmp_path / "keys"


def check(folder: Path) -> None:
    check_keys(load("quickstart", [f"network.keys={folder}"]))


def test_keys_of_the_learner_and_no_keys_pass(folder: Path) -> None:
    check(folder)
    check_keys(load("quickstart"))


def test_what_cannot_serve_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"network\.keys: no folder"):
        check(tmp_path / "nowhere")
    make_keys.export(folder, "node1", tmp_path / "node1")
    with pytest.raises(KeysError, match=r"node1/server\.key_secret is missing"):
        check(tmp_path / "node1")
    (folder / "clients" / "learner.key").unlink()
    with pytest.raises(ConfigError, match=r"admits node1, but not the key 'learner'"):
        check(folder)
    (folder / "server.key_secret").chmod(0o644)
    with pytest.raises(KeysError, match=r"chmod 600 .*server\.key_secret"):
        check(folder)


def test_keys_open_other_interfaces() -> None:
    away = ["network.host=10.0.0.1"]
    with pytest.raises(ConfigError, match=r"network\.host: '10\.0\.0\.1' .*replay\.keys.*network\.insecure=true"):
        load("quickstart", away)
    assert load("quickstart", [*away, "network.keys=keys"]).network.keys == "keys"
    assert load("quickstart", [*away, "network.insecure=true"]).network.insecure
