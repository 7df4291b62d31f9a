"""Whether the reward function that the configuration names is there, without running any of its code.

Rewards are loaded in the rollout servers' reward processes. A typing error would show there after the models are
loaded; reading the source here shows it at once.
"""

import ast
import difflib
import importlib.util
import os
from pathlib import Path

BUILT_IN = ("exact", "numeric")
FORMS = "take 'exact', 'numeric', 'module:function' or 'path/to/file.py:function'"


def problem_with_reward(spec: str) -> str | None:
    """What is wrong with `reward.function`, or None. A module is looked up by its first part only."""
    if spec in BUILT_IN:
        return None
    location, colon, name = spec.rpartition(":")
    if not colon or not location or not name.isidentifier():
        return f"names no function; {suggest(spec, BUILT_IN) or FORMS}"
    if location.endswith(".py"):
        return problem_with_file(Path(location).expanduser(), name)
    root = location.partition(".")[0]
    if not root.isidentifier():
        return f"{location!r} is no module name; {FORMS}"
    if importlib.util.find_spec(root) is None:
        return f"no module {root!r} (not installed, and not below {os.getcwd()}); install it, or give a .py file"
    return None


def problem_with_file(path: Path, name: str) -> str | None:
    """What is wrong with a function `name` in a Python file, or None."""
    if not path.is_file():
        return f"no file {str(path)!r} (looked from {os.getcwd()}); correct the path"
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return f"{path} does not parse: {error}; correct the file"
    names = defined_names(tree)
    if name in names or "*" in names or "__getattr__" in names:
        return None
    functions = sorted(n for n in names if not n.startswith("_"))
    hint = suggest(name, functions) or f"it has {', '.join(functions[:8]) or 'no functions'}"
    return f"{path} has no function {name!r}; {hint}"


def defined_names(tree: ast.Module) -> set[str]:
    """Every name that a module may define, wherever it stands; `*` for a star import."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def suggest(name: str, names: "tuple[str, ...] | list[str]") -> str:
    """`did you mean 'x'?`, or an empty string."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else ""
