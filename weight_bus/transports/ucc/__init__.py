"""The UCC transport, experimental (docs/weight-bus.md), and where UCC comes from here: PyTorch itself, or a plugin."""

from contextlib import suppress
from importlib import metadata

import torch
import torch.distributed as dist

from weight_bus.errors import NotAvailable, WeightBusError

INSTEAD = "or take weight_bus.backend: gloo (nccl between GPUs)"


def resolve_ucc() -> str:
    """Where UCC comes from in this process: "native" (PyTorch), or "plugin torch_ucc 1.0", which is imported.

    torch.distributed.is_backend_available("ucc") is not asked: it says no to a plugin that works.

    Raises NotAvailable: there is none; WeightBusError: the plugin cannot be loaded.
    """
    if dist.is_ucc_available():
        return "native"
    try:
        import torch_ucc  # registers itself with torch.distributed
    except (ImportError, OSError) as error:  # OSError: of ctypes
        if isinstance(error, ModuleNotFoundError) and error.name == "torch_ucc":
            raise NotAvailable(
                f"weight_bus.backend 'ucc': this PyTorch ({torch.__version__}) was built without UCC, and there is no"
                " plugin torch_ucc. No pip package provides either: use a PyTorch built with USE_UCC=1 or an image that"
                f' has one (docs/weight-bus.md), {INSTEAD}. Check with: python -c "import torch.distributed as d;'
                ' print(d.is_ucc_available())"'
            ) from error
        raise WeightBusError(
            f"weight_bus.backend 'ucc': torch_ucc is installed but cannot be loaded: {error}. The folders of libucc"
            f" and libucp belong into LD_LIBRARY_PATH before the run is started (docs/weight-bus.md), {INSTEAD}"
        ) from error
    version = getattr(torch_ucc, "__version__", None)
    if version is None:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version("torch_ucc")
    return f"plugin torch_ucc {version or 'of unknown version'}"
