"""A model's vision tower: its identity, a hash of its tensors' bytes in the folder, and its size. No torch."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from slipstream.families.pictures import decoder_of
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


def tower_bytes(model: Mapping[str, Any], element_bytes: int, tokens: int) -> int:
    """Of the vision tower in a config.json, whole on each rank, and its forward over a picture of so many tokens.

    Nothing is kept for a backward: a layer's widest results are there at once.
    """
    tower = model.get("vision_config")
    if not isinstance(tower, Mapping):
        return 0
    width = int(tower.get("embed_dim") or tower.get("hidden_size") or 1280)
    inner = int(tower.get("intermediate_size") or width * tower.get("mlp_ratio", 4))
    merge, patch = int(tower.get("spatial_merge_size", 2)), int(tower.get("patch_size", 14))
    values = 3 * int(tower.get("temporal_patch_size", 2)) * patch**2
    merged = width * merge**2
    layers = int(tower.get("depth", 32)) * width * (4 * width + 3 * inner)
    weights = layers + width * values + merged * (merged + int(decoder_of(model)["hidden_size"]))
    return element_bytes * (weights + tokens * merge**2 * (8 * width + 3 * inner)) + 4 * tokens * merge**2 * values
