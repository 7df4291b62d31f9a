"""Stand-in for torchvision where it is missing, or is a CUDA build that cannot be imported beside a CPU torch.

SGLang and transformers import image operations of it at import, whatever the model. A text model calls none of them:
so every name of the modules below is a function, and calling one raises RuntimeError.
"""

import enum
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0"

SUBMODULES = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class InterpolationMode(enum.Enum):
    """The ways to interpolate; tables of them are made at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} has no attribute {name}")

        def missing(*args: object, **kwargs: object) -> Any:
            raise RuntimeError(
                f"{self.__name__}.{name} was called, and torchvision is a stand-in here that only lets SGLang be "
                "imported on a CPU"
            )

        return missing


def _add_submodules() -> None:
    for path in SUBMODULES:
        module = _Submodule(f"{__name__}.{path}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        owner, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[owner], name, module)


_add_submodules()
