"""Which key files a node needs (`python -m replay.keys`), and putting them where network.keys points on that node."""

from pathlib import Path, PurePosixPath

from replay.channel import KeysError, load_keys
from replay.channel.keys import CLIENTS, LEARNER, PUBLIC, SECRET, SERVER
from slipstream.launch.files.job_files import write_private

SHARED = "nodes"
"""The client key of every node that has none of its own name."""


def keys_for(folder: str | None, node: str, *, serves: bool) -> dict[str, str]:
    """Contents of the key files of a node, by their path inside `folder` (network.keys here); empty without keys.

    Args:
        folder: as `python -m replay.keys` made it.
        node: its name in the placement; its client key has this name, or is the shared one.
        serves: whether replay and the weight bus's publisher run there: that node alone gets the server's secret. All
            get the public keys of all admitted clients, for teachers may serve anywhere.

    Raises:
        KeysError: the folder or a file is missing, or a file may be read by others.
    """
    if folder is None:
        return {}
    keys, root = load_keys(folder), Path(folder)
    names = [SERVER + PUBLIC]
    if serves:
        keys.serving_secret()
        names += [SERVER + SECRET, f"{CLIENTS}/{LEARNER}{SECRET}"]
    else:
        client = next((name for name in (node, SHARED) if (root / CLIENTS / (name + SECRET)).is_file()), None)
        if client is None:
            raise KeysError(
                f"network.keys: {root / CLIENTS} has neither {node}{SECRET} nor {SHARED}{SECRET}; make the keys with"
                f" --clients {node} among the names, on the machine that runs the start scripts"
            )
        names.append(f"{CLIENTS}/{client}{SECRET}")
    names = sorted({*names, *(f"{CLIENTS}/{path.name}" for path in (root / CLIENTS).glob("*" + PUBLIC))})
    try:
        return {name: (root / name).read_text(encoding="utf-8") for name in names}
    except OSError as error:
        raise KeysError(f"network.keys: {error.filename} cannot be read: {error.strerror}") from error


def write_keys(folder: str | None, keys: dict[str, str]) -> None:
    """Write key files for their owner alone; each appears whole. A file of the same content is left as it is.

    Raises:
        KeysError: a path leads out of the folder, or a file cannot be written.
    """
    if not keys or folder is None:
        return
    for name, text in keys.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise KeysError(f"network.keys: {name!r} has no place in {folder}")
        target = Path(folder) / relative
        try:
            _write(target, text)
        except OSError as error:
            raise KeysError(f"network.keys: {target} cannot be written: {error.strerror}") from error
    _remove_stale(Path(folder), keys)


def _remove_stale(folder: Path, keys: dict[str, str]) -> None:
    """Take away what earlier keys have left: a client that must not be admitted any more, a secret of this node."""
    serves = SERVER + SECRET in keys
    if not serves and (folder / (SERVER + SECRET)).exists():
        return  # the folder that keys are handed out from
    for path in list((folder / CLIENTS).glob("*" if not serves else "*" + PUBLIC)):
        if f"{CLIENTS}/{path.name}" not in keys:
            path.unlink()


def _write(target: Path, text: str) -> None:
    if target.is_file() and target.read_text(encoding="utf-8") == text and not target.stat().st_mode & 0o077:
        return  # a shared file system
    for parent in (target.parent.parent, target.parent):
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(target, text)
