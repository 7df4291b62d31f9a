"""Folders of keys: what is written, what a node is given, and every folder that is refused before a socket uses it."""

import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from replay import keys as make_keys
from replay.channel import KeysError, load_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert command(tmp_path / "keys", "--clients", "node1, node2") == 0
    return tmp_path / "keys"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def command(folder: Path, *words: str) -> int:
    return make_keys.main(["--out", str(folder), *words])


def test_a_folder_has_one_server_and_the_named_clients(folder: Path) -> None:
    clients = {f"clients/{name}{end}" for name in ("learner", "node1", "node2") for end in (".key", ".key_secret")}
    assert files(folder) == {"server.key", "server.key_secret", *clients}
    keys = load_keys(folder)
    assert (keys.name, sorted(keys.clients.values())) == ("learner", ["learner", "node1", "node2"])
    assert zmq.curve_public(keys.serving_secret()) == keys.server_public
    assert len({keys.server_public, *keys.clients}) == 4, "no key is given twice"
    assert keys.server_secret is not None
    for secret in (keys.server_secret, keys.client_secret):
        assert secret.decode() not in repr(keys)


def test_only_this_user_may_read(folder: Path) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_nothing_is_overwritten_unless_it_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_keys(folder)
    assert command(folder) == 2
    assert f"{folder} exists" in capsys.readouterr().err and load_keys(folder) == before
    assert command(folder, "--force") == 0
    assert load_keys(folder).server_public != before.server_public
    assert [path.name for path in folder.parent.iterdir()] == ["keys"]


@pytest.mark.parametrize("names", ["a/b", "..", "node1,node1", "learner", "server", "-x", "a b"])
def test_names_are_file_names_and_come_once(names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path / "keys", f"--clients={names}") == 2
    assert "--clients" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_node_gets_its_own_key_and_never_the_server_secret(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "node1-keys"
    assert command(folder, "--export-node", "node1", "--to", str(out)) == 0
    public = {f"clients/{name}.key" for name in ("learner", "node1", "node2")}
    assert files(out) == {"server.key", *public, "clients/node1.key_secret"}
    all_keys, own = load_keys(folder), load_keys(out)
    assert own.name == "node1" and all_keys.clients[own.client_public] == "node1"
    assert own.server_public == all_keys.server_public and own.server_secret is None and own.clients == {}
    with pytest.raises(KeysError, match=r"node1-keys/server\.key_secret is missing"):
        own.serving_secret()
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()} == {0o600}


def test_two_files_are_enough_for_a_node(folder: Path, tmp_path: Path) -> None:
    """What a Kubernetes Secret or a start script has to bring: the server's public key and the node's own secret."""
    (tmp_path / "node" / "clients").mkdir(parents=True)
    for name in ("server.key", "clients/node2.key_secret"):
        shutil.copy(folder / name, tmp_path / "node" / name)
    assert load_keys(tmp_path / "node").name == "node2"


def mixed(folder: Path) -> None:
    make_keys.make(folder.parent / "second", ["node1"], force=False)
    shutil.copy(folder.parent / "second" / "server.key", folder / "server.key")


def halves(folder: Path) -> None:
    """A secret file with the public key of another."""
    path = folder / "clients" / "learner.key_secret"
    other = (folder / "clients" / "node1.key_secret").read_text().split("secret-key")[1]
    path.write_text(path.read_text().split("secret-key")[0] + "secret-key" + other)


def write(folder: Path, text: str) -> None:
    (folder / "server.key").write_text(text)


SECRET, OWN = "server.key_secret", "clients/learner.key_secret"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"no folder .*replay\.keys --out keys"),
    "no server key": (lambda f: (f / "server.key").unlink(), r"server\.key is missing"),
    "readable secret": (lambda f: (f / SECRET).chmod(0o640), r"server\.key_secret may be read .* chmod 600 "),
    "readable own": (lambda f: (f / OWN).chmod(0o604), r"learner\.key_secret may be read"),
    "writable public": (lambda f: (f / "clients/node2.key").chmod(0o622), r"node2\.key may be changed .*mode 0622"),
    "pairs mixed": (mixed, r"server\.key and .*server\.key_secret are not of one pair"),
    "halves": (halves, r"the two keys in .*learner\.key_secret are not of one pair"),
    "two clients": (lambda f: (f / OWN).unlink(), r"found node1\.key_secret, node2\.key_secret"),
    "no client": (lambda f: shutil.rmtree(f / "clients"), r"must hold one .*found none"),
    "cut": (lambda f: write(f, (f / "server.key").read_text()[:-8] + '"\n'), r"server\.key does not hold a key of 40"),
    "not Z85": (lambda f: write(f, 'public-key = "' + "~" * 40 + '"\n'), r"server\.key does not hold a key of 40"),
    "too large": (lambda f: write(f, 'public-key = "' + "#" * 40 + '"\n'), r"server\.key does not hold a key of 40"),
    "empty": (lambda f: write(f, ""), r'server\.key has no line public-key = "\.\.\."'),
    "not secret": (
        lambda f: shutil.copy(f / "server.key", f / OWN),
        r'learner\.key_secret has no line secret-key = "\.',
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_folders_that_cannot_be_used_are_refused_by_file(folder: Path, case: str) -> None:
    spoil, says = BROKEN[case]
    spoil(folder)
    with pytest.raises(KeysError, match=says) as caught:
        load_keys(folder)
    assert str(caught.value).startswith("network.keys: ") and caught.value.symptom == "closed"


def test_a_server_that_would_admit_nobody_is_refused(folder: Path) -> None:
    for path in (folder / "clients").glob("*.key"):
        path.unlink()
    with pytest.raises(KeysError, match=r"clients lists no \*\.key"):
        load_keys(folder).serving_secret()


def test_a_client_is_added_and_removed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_keys(folder)
    assert command(folder, "--add", "node3") == 0
    assert "--export-node node3 --to node3-keys" in capsys.readouterr().out
    after = load_keys(folder)
    assert set(after.clients.values()) == {"learner", "node1", "node2", "node3"}
    assert before.clients.items() <= after.clients.items() and after.server_secret == before.server_secret
    assert stat.S_IMODE((folder / "clients" / "node3.key_secret").stat().st_mode) == 0o600
    assert command(folder, "--export-node", "node3", "--to", str(tmp_path / "node3")) == 0
    assert command(folder, "--remove", "node3") == 0
    assert load_keys(folder) == before and not [path for path in files(folder) if "node3" in path]
    assert all(not path.name.startswith(".") for path in folder.rglob("*")), "no half-made folder is left"


A_NODE = "keys are changed in the folder of the learner's node"
CHANGES: dict[str, tuple[list[str], Callable[[Path], object], str]] = {
    "twice": (["--add", "node1"], lambda f: None, "has that key; --remove node1 first"),
    "not a key": (
        ["--force"],
        lambda f: (f / "thesis.txt").write_text("mine"),
        "thesis.txt was not made by this script",
    ),
    "unknown node": (["--export-node", "node9", "--to", "x"], lambda f: None, "there are learner, node1, node2"),
    "no name": (["--add", "../x"], lambda f: None, "a name consists of letters"),
    "unknown": (["--remove", "node9"], lambda f: None, "holds no such key; there are learner, node1, node2"),
    "the learner": (["--remove", "learner"], lambda f: None, "the learner's node itself connects with it"),
    "a node's folder": (["--add", "node3"], lambda f: (f / "server.key_secret").unlink(), A_NODE),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_that_make_no_sense_change_nothing(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, prepare, says = CHANGES[case]
    monkeypatch.chdir(folder.parent)
    prepare(folder)
    before = {path: (folder / path).read_bytes() for path in files(folder)}
    assert command(folder, *words) == 2
    assert says in capsys.readouterr().err
    assert {path: (folder / path).read_bytes() for path in files(folder)} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_node_serves_with_its_own_key_and_admits_the_others(folder: Path, tmp_path: Path) -> None:
    assert command(folder, "--export-node", "node1", "--to", str(tmp_path / "node1")) == 0
    whole, node = load_keys(folder), load_keys(tmp_path / "node1")
    assert whole.on_this_node() == whole
    own = node.on_this_node()
    assert (own.server_public, own.serving_secret()) == (node.client_public, node.client_secret)
    assert own.clients == whole.clients, "what serves there admits whoever replay admits"
