"""A reward that means nothing and is another one for every answer, so that every token is trained on."""

import zlib
from typing import Any


def spread(sample: dict[str, Any]) -> float:
    """In [0, 1), from the answer's text alone."""
    return zlib.crc32(sample["completion"].encode()) / 2**32
