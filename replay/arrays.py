"""Arrays of messages: their types, and what stands for one that is left out."""

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]
no_ints = cast(Callable[[], Int32], partial(np.empty, 0, np.int32))
no_floats = cast(Callable[[], Float32], partial(np.empty, 0, np.float32))
no_bytes = cast(Callable[[], UInt8], partial(np.empty, 0, np.uint8))
