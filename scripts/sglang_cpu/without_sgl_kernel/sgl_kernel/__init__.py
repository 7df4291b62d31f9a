"""Stand-in for sgl_kernel, whose packages hold CUDA kernels only.

SGLang imports functions of it by name at import. For dense text models on a CPU without AMX it calls none of them: it
runs torch's own operations instead. So every name here is a function, and calling one raises NotImplementedError.
"""

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0"

OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Of torch.ops.sgl_kernel, that the module of Qwen3.5 names at import; that of Qwen2-VL's pictures imports it."""


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


for _name in OPERATORS:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))
