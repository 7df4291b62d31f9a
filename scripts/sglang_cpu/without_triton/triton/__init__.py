"""Stand-in for triton where it is not installed: SGLang is imported without a compiler.

About 290 modules of SGLang import triton and decorate their kernels at import. With `torch_native` attention on a CPU
none of them is ever launched, and triton would be another gigabyte. So here

- kernels can be defined (`jit`, `autotune`, `heuristics`, `Config`, `constexpr`); launching one raises RuntimeError;
- any other name of the modules below is a class of that name, good for annotations, isinstance and subclasses; calling
  it raises RuntimeError;
- `runtime.driver.active` raises RuntimeError, as in triton itself on a machine without a GPU;
- `backends.backends` is empty, which tells torch.compile that triton serves no device;
- any other submodule is missing: ModuleNotFoundError, as where an optional part of triton is not there.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"

SUBMODULES = (
    "backends",
    "backends.compiler",
    "compiler",
    "compiler.compiler",
    "language",
    "language.extra",
    "runtime",
    "runtime.autotuner",
    "runtime.jit",
)


def refuse(name: str) -> RuntimeError:
    return RuntimeError(f"{name} was called, and triton is a stand-in here that only lets SGLang be imported on a CPU")


class Placeholder(type):
    """Type of classes that stand for names of triton, and of their attributes; calls raise."""

    def __getattr__(cls, name: str) -> "Placeholder":
        return placeholder(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise refuse(f"{cls.__module__}.{cls.__qualname__}")


def placeholder(owner: str, name: str) -> Placeholder:
    """The class that stands for `owner.name`. Raises AttributeError for names that Python itself looks up."""
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no attribute {name}")
    return Placeholder(name, (), {"__module__": owner})


class JITFunction:
    """A kernel: can be defined, copied and asked for its grid; launching it raises RuntimeError."""

    def __init__(self, fn: Callable[..., Any], **options: object) -> None:
        self.fn = fn
        self.__name__, self.__module__, self.__doc__ = fn.__name__, fn.__module__, fn.__doc__

    def __getitem__(self, grid: object) -> "JITFunction":
        return self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise refuse(f"kernel {self.__module__}.{self.__name__}")

    run = warmup = __call__


def jit(fn: Callable[..., Any] | None = None, **options: object) -> Any:
    return JITFunction if fn is None else JITFunction(fn)


def autotune(*args: object, **kwargs: object) -> Callable[[Any], Any]:
    """A decorator that changes nothing; `heuristics` is the same."""
    return lambda kernel: kernel


heuristics = autotune


class Config:
    """One configuration of `autotune`."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **rest: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


class constexpr:
    """A constant of a kernel; also an annotation."""

    def __init__(self, value: object) -> None:
        self.value = value


class Driver:
    @property
    def active(self) -> Any:
        raise RuntimeError("0 active drivers: triton is a stand-in here, there is no GPU")


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def __getattr__(name: str) -> Any:
    return globals().setdefault(name, placeholder(__name__, name))


class _Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return self.__dict__.setdefault(name, placeholder(self.__name__, name))


for _path in SUBMODULES:
    _module = _Submodule(f"{__name__}.{_path}")
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    _owner, _, _name = _module.__name__.rpartition(".")
    setattr(sys.modules[_owner], _name, _module)

sys.modules[f"{__name__}.backends"].backends = {}  # type: ignore[attr-defined]
sys.modules[f"{__name__}.compiler.compiler"].triton_key = lambda: __version__  # type: ignore[attr-defined]
sys.modules[f"{__name__}.language"].constexpr = constexpr  # type: ignore[attr-defined]
sys.modules[f"{__name__}.runtime"].driver = Driver()  # type: ignore[attr-defined]
sys.modules[f"{__name__}.runtime.jit"].JITFunction = JITFunction  # type: ignore[attr-defined]
