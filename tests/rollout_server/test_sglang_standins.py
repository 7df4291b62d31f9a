"""SGLang on a machine without a GPU: stand-ins where a package is missing or broken, and nowhere else."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.cpu import STOOD_IN_FOR, prepare_cpu, stand_in_folder

ROOT = Path(__file__).parents[2]
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"

needs_cpu_torch = pytest.mark.skipif(
    bool(torch.version.cuda or torch.version.hip), reason=f"torch {torch.__version__} is no CPU build"
)


def python(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with `path` on its PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), "OMP_NUM_THREADS": "1"}
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def package(folder: Path, name: str, text: str = "WORKS = True") -> Path:
    """An installed package of that name; the folder to put on the path."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder


# ---- what a stand-in does ---------------------------------------------------------------------------------

KERNEL = """
import triton, triton.language as tl
@triton.heuristics({"EVEN": lambda args: True})
@triton.autotune(configs=[triton.Config({"BLOCK": 16}, num_warps=2)], key=["n"])
@triton.jit(do_not_specialize=["n"])
def add(x, n: tl.constexpr, dtype: tl.dtype = tl.float32): ...
"""


@pytest.mark.parametrize(
    ("name", "program", "said"),
    [
        ("triton", f"{KERNEL}\nadd[(1,)](0, 1)", "RuntimeError: kernel __main__.add was called, and triton is a stand"),
        ("triton", f"{KERNEL}\nadd.run(0, 1)", "RuntimeError: kernel __main__.add was called"),
        ("triton", "from triton.testing import do_bench", "ModuleNotFoundError: No module named 'triton.testing'"),
        ("triton", "import triton; triton.testing.do_bench(1)", "RuntimeError: triton.testing.do_bench was called"),
        ("triton", "import triton; triton.runtime.driver.active", "RuntimeError: 0 active drivers"),
        ("triton", "import triton.language as tl; tl.load(0)", "RuntimeError: triton.language.load was called"),
        ("sgl_kernel", "from sgl_kernel import moe; moe(1)", "NotImplementedError: sgl_kernel.moe was called: a CUDA"),
        (
            "torchvision",
            "from torchvision.transforms.v2 import functional as f; f.resize(1)",
            "RuntimeError: torchvision.transforms.v2.functional.resize was called, and torchvision is a stand-in",
        ),
    ],
)
def test_calling_a_stand_in_says_that_it_is_one(name: str, program: str, said: str) -> None:
    done = python(program, stand_in_folder(name))
    assert done.returncode != 0
    assert said in done.stderr


def test_names_of_triton_are_good_for_what_is_done_at_import() -> None:
    program = f"""{KERNEL}
from triton.compiler import CompiledKernel
from triton.language.extra import libdevice
class Mine(CompiledKernel): ...
assert not isinstance(3, CompiledKernel) and issubclass(Mine, CompiledKernel)
assert tl.float32 is tl.float32 and tl.float32 is not tl.bfloat16 and {{tl.float32: 1}}[tl.float32]
assert tl.core.tensor.__name__ == "tensor" and libdevice.exp is not None
assert (triton.cdiv(7, 2), triton.cdiv(8, 2)) == (4, 4)
assert [triton.next_power_of_2(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
assert tl.constexpr(4).value == 4
"""
    done = python(program, stand_in_folder("triton"))
    assert done.returncode == 0, done.stderr


@needs_cpu_torch
def test_torch_compile_does_not_take_the_stand_in_for_a_compiler() -> None:
    program = """
import torch, torch.utils._triton, triton
assert triton.__version__ == "0.0.0" and not torch.utils._triton.has_triton()
assert torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.zeros(2)).tolist() == [1, 1]
import torch._inductor.compile_fx, torch._inductor.runtime.triton_compat
"""
    done = python(program, stand_in_folder("triton"))
    assert done.returncode == 0, done.stderr


# ---- where they stand in ----------------------------------------------------------------------------------

REPORT = """
import importlib, json, os, sys
from rollout_server.engines.sglang.cpu import prepare_cpu
before = list(sys.path)
first = prepare_cpu()
after = list(sys.path)
again = prepare_cpu()
files = {}
for name in ("sgl_kernel", "torchvision", "triton"):
    files[name] = importlib.import_module(name).__file__
print(json.dumps({
    "first": first, "again": again, "unchanged": after == sys.path, "files": files,
    "added": [entry for entry in after if entry not in before],
    "switch": os.environ.get("SGLANG_USE_CPU_ENGINE"), "pythonpath": os.environ["PYTHONPATH"],
}))
"""


def report(*path: Path) -> dict[str, object]:
    done = python(REPORT, *path)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@needs_cpu_torch
def test_missing_packages_have_stand_ins_and_calling_it_again_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()  # a folder of that name is no package
    said = report(package(tmp_path, "sglang"))
    assert said["first"] == said["again"] == list(STOOD_IN_FOR)
    assert said["unchanged"] and said["switch"] == "1"
    assert sorted(said["added"]) == sorted(str(stand_in_folder(name)) for name in STOOD_IN_FOR)  # type: ignore[call-overload]
    # reward processes get the environment and not sys.path: they must not meet a stand-in
    assert "stand_ins" not in str(said["pythonpath"])


@needs_cpu_torch
def test_a_package_that_cannot_be_imported_is_hidden_and_the_others_are_not(tmp_path: Path) -> None:
    package(tmp_path, "sglang")
    package(tmp_path, "triton")
    package(tmp_path, "torchvision", f"import torchvision.ops\n{BROKEN}")
    (tmp_path / "torchvision" / "ops.py").touch()
    said = report(tmp_path)
    assert said["first"] == ["sgl_kernel", "torchvision"]
    assert said["files"]["triton"] == str(tmp_path / "triton" / "__init__.py")  # type: ignore[index]
    assert said["files"]["torchvision"] == str(stand_in_folder("torchvision") / "torchvision" / "__init__.py")  # type: ignore[index]


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_a_torch_that_is_no_cpu_build_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = list(sys.path)
    monkeypatch.setattr(torch.version, kind, "13.0")
    with pytest.raises(EngineError, match=r"CPU build of torch, and torch .* is built for 13\.0"):
        prepare_cpu()
    assert sys.path == path


@needs_cpu_torch
@pytest.mark.parametrize("early", ["sglang", "transformers"])
def test_what_looks_around_at_import_must_come_after(early: str, tmp_path: Path) -> None:
    for name in {"sglang", early}:
        package(tmp_path, name)
    said = python(f"import {early}; from rollout_server.engines.sglang.cpu import prepare_cpu; prepare_cpu()", tmp_path)
    assert f"EngineError: {early} was imported before prepare_cpu()" in said.stderr


@needs_cpu_torch
def test_sglang_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"SGLang is not installed; .*install\.sh --venv \.venv sglang-cpu"):
        prepare_cpu()
