"""Safetensors files of a model folder, as far as their headers tell. Imports no torch."""

import json
import struct
from pathlib import Path
from typing import Any

from configs.errors import InputMissing


def header_of(file: Path) -> dict[str, Any]:
    """The header: by tensor its dtype, shape and place (8 bytes of length, then JSON).

    Raises OSError, ValueError, struct.error: it is cut short, or no header.
    """
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        size = file.stat().st_size
        if length > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ValueError(f"{size} bytes, its header says {expected}")
        return header


def check_safetensors(file: Path, key: str) -> None:
    """Raises ConfigError, of the key that names the folder: the file is not as long as its header says."""
    try:
        header_of(file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise InputMissing(f"{key}: {file} is broken ({error}); copy or download the file again") from error
