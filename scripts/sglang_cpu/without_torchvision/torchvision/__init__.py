"""Stand-in for torchvision where it is missing, or is a build for another torch.

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


for _path in SUBMODULES:
    _module = _Submodule(f"{__name__}.{_path}")
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    _module.__path__ = []
    _module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules[_module.__name__] = _module
    _owner, _, _name = _module.__name__.rpartition(".")
    setattr(sys.modules[_owner], _name, _module)
