"""SGLang that does not start, by the cause in its log; and on a machine without a GPU, with stand-ins for packages."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from examples.random_qwen3 import write_tokenizer
from rollout_server import main as rollout_main
from rollout_server.engines.base import EngineError, EngineStartFailed
from rollout_server.engines.sglang.children_log import ChildrenLog, start_failure
from rollout_server.engines.sglang.cpu import STOOD_IN_FOR, give_cores, prepare_cpu, stand_in_folder
from rollout_server.engines.sglang.process import SGLangProcess
from slipstream.runtime.lifeline import START_REFUSED

DIED = (
    "Rank 0 scheduler died during initialization (exit code: {}). If exit code is -9 (SIGKILL), a common cause is the"
    " OS OOM killer. Run `dmesg -T | grep -i oom` to check."
)
TRACEBACK = """Traceback (most recent call last):
  File "scheduler.py", line 1, in run
ImportError: the attention kernel is missing

[2026-01-01 00:00:00] Received sigquit
"""


async def test_a_death_at_the_deadline_of_a_call_is_no_silence() -> None:
    process = SGLangProcess.__new__(SGLangProcess)
    process.deadline_s, process._failure = 0.02, ""
    process._children = [Mock(pid=7, exitcode=-9, is_alive=Mock(side_effect=[True, False]))]
    with pytest.raises(EngineError, match=r"SGLang is dead: .*pid 7. ended with -9 \[closed\]"):
        await process._within(asyncio.sleep(60), "pause")


def test_the_last_error_is_that_of_this_start(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as file:
        file.write(b"ValueError: of an earlier start\n")
        file.flush()
        log = ChildrenLog(file.fileno())
        assert log.last_error() == ""
        file.write(TRACEBACK.encode())
        file.flush()
        assert log.last_error() == "ImportError: the attention kernel is missing"


def test_a_child_that_fails_in_a_run_is_quoted(tmp_path: Path) -> None:
    process = SGLangProcess.__new__(SGLangProcess)
    process._failure, process._children = "", [Mock(is_alive=Mock(return_value=True))]
    with (tmp_path / "log").open("ab") as file:
        process._log = ChildrenLog(file.fileno())
        process.check_alive()
        file.write(b"[2026-01-01 00:00:00] Scheduler hit an exception: " + TRACEBACK.encode())
        file.flush()
        process._on_sigquit()
        file.write(b"ValueError: of something later\n")
        file.flush()
    quoted = r"is dead: ImportError: the attention kernel is missing \(a child .* SIGQUIT"
    with pytest.raises(EngineError, match=quoted):
        process.check_alive()
    process._children = [Mock(pid=7, exitcode=1, is_alive=Mock(return_value=False))]
    with pytest.raises(EngineError, match=quoted):
        process.check_alive()
    process._children[0].exitcode = -9  # by the kernel, say: what it has logged before is not why
    with pytest.raises(EngineError, match=r"is dead: .*pid 7. ended with -9 \[closed"):
        process.check_alive()


def test_the_oom_killer_is_named_for_a_child_that_was_killed_only() -> None:
    error = "ImportError: the attention kernel is missing"
    refused, failed = (str(start_failure("0.5", DIED.format(1), last)) for last in (error, ""))
    assert refused.startswith(f"SGLang 0.5 did not start: {error} (Rank 0 scheduler died")
    assert "OOM" not in refused + failed and "OOM" in str(start_failure("0.5", DIED.format(-9), ""))


@pytest.mark.parametrize(
    ("last_error", "is_refusal"),
    [
        ("[2026-11-29 00:00:00 TP0] ValueError: Model architectures ['X'] are not supported for now.", True),
        ("NotImplementedError: it has no such backend", True),
        ("AssertionError: page size", True),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", False),
        ("[2026-11-29 00:00:00 TP1] ValueError: The memory capacity is unbalanced. Some GPUs may be occupied", False),
        ("ValueError: dist_init_port at 31007 is not available in 30 seconds. In use", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
        ("OSError: [Errno 98] Address already in use", False),
        ("", False),
    ],
)
def test_a_start_that_refuses_what_it_is_given_says_so(
    last_error: str, is_refusal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = start_failure("0.5", DIED.format(1), last_error)
    assert type(start_failure("0.5", DIED.format(-9), last_error)) is EngineStartFailed
    monkeypatch.setattr(rollout_main.ending, "leave", lambda code, *_: code)
    assert rollout_main.stopped("rollout-0", error) == (START_REFUSED if is_refusal else 2)


# ---- on a machine without a GPU ---------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"

needs_cpu_torch = pytest.mark.skipif(
    bool(torch.version.cuda or torch.version.hip), reason=f"torch {torch.__version__} is no CPU build"
)


def python(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with `path` on its PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), "OMP_NUM_THREADS": "1"}
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    where: dict[str, Any] = {"env": environment, "cwd": ROOT / "tests", "timeout": 350}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **where)


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


CALLS = {
    "triton": (f"{KERNEL}\nadd[(1,)](0, 1)", "RuntimeError: kernel __main__.add was called, and triton is a stand-in"),
    "sgl_kernel": ("from sgl_kernel import moe; moe(1)", "NotImplementedError: sgl_kernel.moe was called: a CUDA"),
    "torchvision": (
        "from torchvision.transforms.v2 import functional as f; f.resize(1)",
        "RuntimeError: torchvision.transforms.v2.functional.resize was called, and torchvision is a stand-in",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calling_a_stand_in_says_that_it_is_one(name: str) -> None:
    source, said = CALLS[name]
    assert said in python(source, stand_in_folder(name)).stderr


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
import torch.utils._triton
if "triton" in first:
    import torch._inductor.runtime.triton_compat
print(json.dumps({
    "first": first, "again": again, "unchanged": after == sys.path, "files": files,
    "added": [entry for entry in after if entry not in before],
    "compiles": "triton" in first and torch.utils._triton.has_triton(),
    "switch": os.environ.get("SGLANG_USE_CPU_ENGINE"), "pythonpath": os.environ["PYTHONPATH"],
}))
"""


def report(*path: Path) -> dict[str, Any]:
    done = python(REPORT, *path)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@needs_cpu_torch
def test_missing_packages_have_stand_ins_and_calling_it_again_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()  # a folder of that name is no package
    said = report(package(tmp_path, "sglang"))
    assert said["first"] == said["again"] == list(STOOD_IN_FOR)
    assert said["unchanged"] and said["switch"] == "1"
    assert not said["compiles"], "torch.compile takes the stand-in for a compiler"
    assert sorted(said["added"]) == sorted(str(stand_in_folder(name)) for name in STOOD_IN_FOR)
    # reward processes get the environment and not sys.path: they must not meet a stand-in
    assert "sglang_cpu" not in str(said["pythonpath"])


@needs_cpu_torch
def test_a_package_that_cannot_be_imported_is_hidden_and_the_others_are_not(tmp_path: Path) -> None:
    package(tmp_path, "sglang")
    package(tmp_path, "triton")
    package(tmp_path, "torchvision", f"import torchvision.ops\n{BROKEN}")
    (tmp_path / "torchvision" / "ops.py").touch()
    said = report(tmp_path)
    assert said["first"] == ["sgl_kernel", "torchvision"]
    assert said["files"]["triton"] == str(tmp_path / "triton" / "__init__.py")
    assert said["files"]["torchvision"] == str(stand_in_folder("torchvision") / "torchvision" / "__init__.py")


FIRST = """
import sys
import rollout_server.teacher, scripts.bench.bus, scripts.bench.server
from rollout_server import main as rollout_main
from rollout_server.engines.base import EngineError
from rollout_server.main import Parts, main
def build(config):
    raise EngineError(f"imported before: {sorted({'sglang', 'transformers'}.intersection(sys.modules))}")
words = ["run.dir=FOLDER", "model.path=FOLDER", "data.train=unused", "reward.function=exact", "rollout.engine=sglang"]
main(["--replay", "tcp://127.0.0.1:1", *(part for word in words for part in ("--set", word))], Parts(engine=build))
"""


def test_a_rollout_server_begins_with_its_engine(tmp_path: Path) -> None:
    """Before transformers, which its tokenizer imports: on a CPU, SGLang would refuse to start after it."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    write_tokenizer(tmp_path, 16)
    assert "imported before: []" in python(FIRST.replace("FOLDER", str(tmp_path))).stderr


@pytest.mark.parametrize(("ranks", "said"), [(2, "0,1|4,5,7"), (6, "0,1,4,5,7|0|1|4|5|7")])
def test_ranks_of_an_engine_divide_the_cores(ranks: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5, 7})
    monkeypatch.setattr("os.environ", given := {})
    give_cores(ranks, 3)
    assert given == {"OMP_NUM_THREADS": "3", "SGLANG_CPU_OMP_THREADS_BIND": said}


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
def test_what_looks_around_at_import_must_come_after(early: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr("rollout_server.engines.sglang.cpu._works", lambda package: False)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setitem(sys.modules, early, ModuleType(early))
    with pytest.raises(EngineError, match=f"{early} was imported before prepare_cpu"):
        prepare_cpu()


@needs_cpu_torch
def test_sglang_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"SGLang is not installed; .*install\.sh --venv \.venv sglang-cpu"):
        prepare_cpu()
