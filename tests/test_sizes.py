"""Nothing grows past what one person reads in one sitting. There is no list of exceptions."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner", "scripts")
MAIN_LOOPS = {"learner/train.py", "rollout_server/serve.py", "replay/serve.py"}
MAX_FILE_LINES = 400
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MAIN_LOOP_LINES = 80
MAX_FILES_PER_FOLDER = 20
MAX_OWN_LINES = 15

FILES = sorted(path for folder in (*PACKAGES, "tests") for path in (ROOT / folder).rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES if path.relative_to(ROOT).parts[0] != "tests"})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, its decorators and docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def test_files_are_short() -> None:
    lines = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    limits = {name: MAX_TEST_LINES if name.startswith("tests/") else MAX_FILE_LINES for name in lines}
    assert {name: count for name, count in lines.items() if count > limits[name]} == {}, "split by what the parts yield"


def test_functions_are_short() -> None:
    offences = []
    for path in FILES:
        limit = MAX_MAIN_LOOP_LINES if name_of(path) in MAIN_LOOPS else MAX_FUNCTION_LINES
        found = functions(ast.parse(path.read_text(encoding="utf-8")))
        offences += [
            f"{name_of(path)}: {name} has {lines} lines, {limit} allowed" for name, lines in found if lines > limit
        ]
    assert offences == []


def test_folders_are_small() -> None:
    modules = {
        name_of(folder): [path for path in folder.glob("*.py") if path.name != "__init__.py"] for folder in FOLDERS
    }
    assert {name: len(paths) for name, paths in modules.items() if len(paths) > MAX_FILES_PER_FOLDER} == {}


def test_variants_of_ones_own_are_short() -> None:
    """Docstring and imports included: what a kind of variant makes its user repeat would show here."""
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples" / "own").glob("*.py")}
    assert len(lines) == 8 and {name: count for name, count in lines.items() if count > MAX_OWN_LINES} == {}
