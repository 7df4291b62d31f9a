"""Fixtures of the rollout server's tests. Those that are coroutines run under a deadline."""

import asyncio
import functools
import importlib.util
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 150.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A coroutine runs in a loop of its own, or beside the session's SGLang where it asks for that as `served`."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    if "served" in arguments:
        arguments.pop("served")(test, arguments)
    else:
        asyncio.run(asyncio.wait_for(test(**arguments), DEADLINE_S))
    return True


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with version 0, version 0 and version 1; tests only read them."""
    # Here and not above: tests of tasks and rewards must not pay for torch and transformers.
    from tests.rollout_server.torch_oracle import load_model, make_model, save_folder

    folder = save_folder(tmp_path_factory.mktemp("model"))
    return folder, load_model(folder), make_model(seed=1)


@pytest.fixture
def folder(models: tuple[Path, Any, Any]) -> Path:
    return models[0]


@pytest.fixture
def old(models: tuple[Path, Any, Any]) -> Any:
    return models[1]


@pytest.fixture
def new(models: tuple[Path, Any, Any]) -> Any:
    return models[2]


@pytest.fixture
def gate_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a `Gate` of the torch engine's decode thread."""
    from tests.rollout_server.torch_served import Gate

    return functools.partial(Gate, monkeypatch)


@pytest.fixture
def grader(tmp_path: Path) -> str:
    """A copy of grader.py beside this file, which a test may move away."""
    return str(shutil.copy(Path(__file__).with_name("grader.py"), tmp_path))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session's SGLang, which serves a tiny random Qwen3; the test runs in its process, with `Served` for this."""
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip(f"SGLang on a CPU needs a CPU build of torch, this is {torch.__version__}")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: bash scripts/install.sh --venv .venv dev,sglang-cpu")
    from tests.rollout_server.sglang_host import Host

    host = Host(tmp_path_factory.mktemp("qwen3"))
    yield host
    host.close()
