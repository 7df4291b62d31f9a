"""Array types of messages."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]


def empty(dtype: type[np.generic]) -> NDArray[Any]:
    """An array without entries."""
    return np.empty(0, dtype=dtype)
