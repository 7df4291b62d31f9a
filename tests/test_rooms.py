"""Rooms: folders and files directly in a package. Each has a budget of lines, and no two lead to each other."""

import ast
import graphlib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner")
BUDGET = {
    "configs": 3_215,
    "slipstream/runtime": 2_398,
    "slipstream/families": 1_189,
    "slipstream/launch": 4_451,
    "slipstream/check": 2_394,
    "slipstream/view": 2_441,
    "slipstream/translate": 1_702,
    "slipstream/plan": 1_352,
    "slipstream/command": 158,
    "replay": 11_200,
    "weight_bus": 6_298,
    "rollout_server/engines": 4_745,
    "rollout_server/tasks": 7_659,
    "rollout_server": 15_428,
    "learner": 12_145,
}
"""Lines of Python, as they are: what comes in takes something out. A smaller room lowers its number here."""
PRODUCT = 64_722
SCRIPTS = 6_572
TESTS = 54_806
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, also inside functions and for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    named = {name if name in MODULES else name.rpartition(".")[0] for name in found}
    return named & set(MODULES)


def lines_of(folder: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))


def test_rooms_form_no_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        graph[room_of(module)] |= {room_of(other) for other in imported(path)} - {room_of(module)}
    assert len(graph) > 60
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the circle


@pytest.mark.parametrize("room", BUDGET)
def test_a_room_keeps_its_budget(room: str) -> None:
    assert lines_of(room) <= BUDGET[room], f"{room}/ outgrew its budget: take something out of it, or say why not"


def test_the_house_keeps_its_budget() -> None:
    assert sum(map(lines_of, PACKAGES)) <= PRODUCT
    assert lines_of("scripts") <= SCRIPTS
    assert lines_of("tests") <= TESTS
