"""Stand-in for sgl_kernel, whose packages hold CUDA kernels only.

SGLang imports functions of it by name at import. For dense text models on a CPU without AMX it calls none of them: it
runs torch's own operations instead. So every name here is a function, and calling one raises NotImplementedError.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(f"{__name__} has no attribute {name}")

    def missing(*args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called: a CUDA kernel, and sgl_kernel is a stand-in here that only lets SGLang be "
            "imported on a CPU"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
