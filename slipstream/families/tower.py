"""The identity of a model's vision tower: a hash of its tensors' bytes as they lie in the folder. No torch."""

import json
from hashlib import blake2b
from pathlib import Path

from slipstream.families.record import TOWER

LENGTH_BYTES = 8
"""Of the number at the start of a safetensors file, which says how long its header is."""
READ_BYTES = 1 << 24


def tower_digest(folder: Path) -> str:
    """Of names, dtypes, shapes and bytes of all tensors of the tower, in the order of their names.

    Raises OSError, ValueError: a file is not readable.
    """
    places: dict[str, tuple[Path, int, int, str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name.startswith(TOWER):
                begin, end = entry["data_offsets"]
                said = f"{name} {entry['dtype']} {entry['shape']}"
                places[name] = (file, LENGTH_BYTES + length + begin, end - begin, said)
    digest = blake2b(digest_size=16)
    for _, (file, first, left, said) in sorted(places.items()):
        digest.update(said.encode())
        with file.open("rb") as stream:
            stream.seek(first)
            while left > 0 and (data := stream.read(min(left, READ_BYTES))):
                digest.update(data)
                left -= len(data)
    return digest.hexdigest()
