"""What may import what, and what every main loop says about itself. Forbidden calls: tests/security/test_no_code.py."""

import ast
import functools
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

from configs.engines import ENGINES
from rollout_server.engines import BUILDERS

ROOT = Path(__file__).parents[1]
SHARED = ("configs", "slipstream.families", "slipstream.runtime")
FOLDERS = ("slipstream.vision", "slipstream.weight_files")  # what both ends read of a model's folder
MAY_IMPORT = {
    "configs": ("slipstream.families",),
    "slipstream.families": ("configs.errors",),
    "slipstream.weight_files": ("configs.errors",),
    "slipstream.vision": ("configs.errors", "slipstream.families", "slipstream.weight_files"),
    "slipstream.runtime": ("configs", "slipstream.families"),
    "slipstream.runtime.hang": (*SHARED, "replay.channel", "replay.status_client"),  # asks for its Status
    "replay": SHARED,
    "weight_bus": (*SHARED, "replay.channel"),
    **dict.fromkeys(("rollout_server", "learner"), (*SHARED, *FOLDERS, "replay", "weight_bus")),
    "slipstream": (*SHARED, *FOLDERS, "replay", "weight_bus", "rollout_server", "learner"),
}
"""By the longest beginning of a module's name."""
ENTRY = "learner/main.py"
"""The command of a run: the one file of learner/ that calls rooms of the operator."""
PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner")
OURS = {*PACKAGES, "examples", "scripts", "tests"}
TORCH_FREE = ("configs", "slipstream/families", "slipstream/runtime", "replay")
MAIN_LOOPS = ("learner/train.py", "rollout_server/serve.py", "replay/serve.py")
CONTRACT = ("consumes", "produces", "waits for", "unblocked by")
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            # `from replay import channel` imports replay.channel
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in allowed)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def owner_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return max((prefix for prefix in MAY_IMPORT if is_within(name, (prefix,))), key=len)


def test_arrows_point_inward() -> None:
    offences = []
    for path in MODULES:
        owner = "slipstream" if name_of(path) == ENTRY else owner_of(path)
        for line, module in imports(tree_of(path)):
            if module.split(".")[0] in OURS and not is_within(module, (owner, *MAY_IMPORT[owner])):
                offences.append(f"{name_of(path)}:{line}: {owner} must not import {module}")
    assert offences == []


def test_no_import_leads_back_to_its_module() -> None:
    """Imports inside functions and for type checkers count as well: a circle is one thing in two files."""
    dotted_names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    modules = {name.removesuffix(".__init__"): path for name, path in dotted_names.items()}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = {module if module in modules else module.rpartition(".")[0] for _, module in imports(tree_of(path))}
        graph[name] = {module for module in found if module in modules} - {name}
    assert len(graph) > 150 and sum(map(len, graph.values())) > 500
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle


def test_an_engine_is_chosen_by_its_name_and_asked_for_facts() -> None:
    assert BUILDERS.keys() == ENGINES.keys()
    offences = [
        f"{name_of(path)}:{node.lineno} compares the name of an engine; ask configs/engines.py for a fact"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Compare)
        if any(dotted(side).endswith("rollout.engine") for side in (node.left, *node.comparators))
    ]
    assert offences == []


def test_torch_and_sglang_stay_where_they_belong() -> None:
    offences = []
    for path in MODULES:
        tops = {module.split(".")[0] for _, module in imports(tree_of(path))}
        banned = {"torch", "transformers", "safetensors"} if name_of(path).startswith(TORCH_FREE) else set()
        if name_of(path) == "replay/data/encoding.py":
            banned.discard("transformers")  # its chat templates, without torch, in a process that encodes
        if name_of(path) != "rollout_server/engines/sglang/process.py":
            banned |= {"sglang", "sgl_kernel"}
        offences += [f"{name_of(path)} imports {top}" for top in sorted(tops & banned)]
    assert offences == []


@pytest.mark.parametrize(
    "modules",
    [
        "configs, configs.loading, configs.schema",
        "replay.messages, replay.channel, replay.serve, replay.main",
        "slipstream.launch.__main__, slipstream.launch.node",
        "learner.main, slipstream.view.live_view, slipstream.view.plot, learner.record.metrics",
    ],
)
def test_torch_free_processes_import_no_torch(modules: str) -> None:
    """Replay and the launcher start at once and hold no gigabyte, because torch never comes in, not even indirectly."""
    program = f"import {modules}, sys; assert 'torch' not in sys.modules, 'torch came in'"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_names_say_what_is_inside() -> None:
    parts = {name_of(path): {part.removesuffix(".py") for part in path.relative_to(ROOT).parts} for path in MODULES}
    assert [name for name, words in parts.items() if words & SAYS_NOTHING] == []


def test_every_module_says_what_it_is() -> None:
    trees = {name_of(path): tree_of(path) for path in MODULES}
    assert [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_every_package_folder_is_installed() -> None:
    """An editable install finds a folder that pyproject.toml forgets; a wheel does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in MODULES}
    found = project["tool"]["setuptools"]["packages"]["find"]
    assert folders == set(find_packages(str(ROOT), include=found["include"]))


@pytest.mark.parametrize("name", MAIN_LOOPS)
def test_main_loops_open_with_their_contract(name: str) -> None:
    docstring = ast.get_docstring(tree_of(ROOT / name)) or ""
    starts = [line.strip() for line in docstring.splitlines()]
    for words in CONTRACT:
        (line,) = [line for line in starts if line.startswith(words)]
        assert line.removeprefix(words).strip(" :"), f"{words}: says nothing"


def test_packages_log_and_do_not_print() -> None:
    calls = [(path, node) for path in MODULES for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    assert [f"{name_of(path)}:{node.lineno}" for path, node in calls if dotted(node.func) == "print"] == []
