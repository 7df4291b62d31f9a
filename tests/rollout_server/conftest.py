"""Fixtures of the rollout server's tests."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Any, Any]:
    """A folder with version 0, version 0 and version 1."""
    # Here and not above: tests of tasks and rewards must not pay for torch and transformers.
    from torch_oracle import load_model, make_model, save_folder

    save_folder(tmp_path)
    return tmp_path, load_model(tmp_path), make_model(seed=1)


@pytest.fixture
def grader(tmp_path: Path) -> str:
    """A copy of grader.py beside this file, which a test may move away."""
    return str(shutil.copy(Path(__file__).with_name("grader.py"), tmp_path))


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs scenarios beside the session's SGLang, which serves a tiny random Qwen3."""
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip(f"SGLang on a CPU needs a CPU build of torch, this is {torch.__version__}")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: bash scripts/install.sh --venv .venv dev,sglang-cpu")
    from sglang_host import Host

    host = Host(tmp_path_factory.mktemp("qwen3"))
    yield host
    host.close()
