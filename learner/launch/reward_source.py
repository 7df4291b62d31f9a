"""Whether the reward function that the configuration names is there, without running any of its code.

Rewards are loaded in the rollout servers' reward processes. A typing error would show there after the models are
loaded; reading the source here shows it at once.
"""

import ast
import importlib.util
import os
from pathlib import Path

from configs.loading import did_you_mean

BUILT_IN = ("exact", "numeric", "model")
FORMS = "take 'exact', 'numeric', 'model', 'module:function' or 'path/to/file.py:function'"
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURES = (
    "take `async def reward(sample)`, `compute_score(data_source, solution_str, ground_truth, extra_info=None)` or"
    " `f(prompts, completions, **columns)`"
)


def problem_with_reward(spec: str) -> str | None:
    """What is wrong with `reward.function`, or None. Of a module, no package is imported to find its source."""
    if spec in BUILT_IN:
        return None
    location, colon, name = spec.rpartition(":")
    if not colon or not location or not name.isidentifier():
        return f"names no function; {did_you_mean(spec, BUILT_IN) or FORMS}"
    if location.endswith(".py"):
        return _problem_with_file(Path(location).expanduser(), name)
    root = location.partition(".")[0]
    if not root.isidentifier():
        return f"{location!r} is no module name; {FORMS}"
    if importlib.util.find_spec(root) is None:
        return f"no module {root!r} (not installed, and not below {os.getcwd()}); install it, or give a .py file"
    file = _module_file(location)
    return None if file is None else problem_with_signature(ast.parse(file.read_bytes(), str(file)), name)


def _module_file(module: str) -> Path | None:
    """The Python source of an installed module, where its place follows from its name."""
    root, _, rest = module.partition(".")
    spec = importlib.util.find_spec(root)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    below = [Path(folder, *rest.split(".")) for folder in spec.submodule_search_locations or ()]
    files = [file for path in below for file in (path.with_suffix(".py"), path / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _problem_with_file(path: Path, name: str) -> str | None:
    if not path.is_file():
        return f"no file {str(path)!r} (looked from {os.getcwd()}); correct the path"
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return f"{path} does not parse: {error}; correct the file"
    names = {each for node in ast.walk(tree) for each in _names_of(node)}
    if names & {name, "*", "__getattr__"}:  # a star import, or a call, may bring it
        return problem_with_signature(tree, name)
    functions = sorted(n for n in names if not n.startswith("_"))
    hint = did_you_mean(name, functions) or f"it has {', '.join(functions[:8]) or 'no functions'}"
    return f"{path} has no function {name!r}; {hint}"


def problem_with_signature(tree: ast.Module, name: str) -> str | None:
    """What is wrong with the parameters of a plain function, or None; the rules are those of rewards/loading.py.

    A decorator may change the parameters and a name may be bound again: the source says nothing about these.
    """
    bound = [node for node in ast.walk(tree) if name in _names_of(node)]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if bound[0] not in tree.body or bound[0].decorator_list:
        return None
    arguments = bound[0].args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [a.arg for a in positional[: len(positional) - len(arguments.defaults)]]
    required += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    names = [a.arg for a in (*positional, *arguments.kwonlyargs)]
    if "completions" in names:
        fits = "completion_ids" not in required
    elif "solution_str" in names:
        fits = set(required) <= set(VERL_NAMES)
    else:
        fits = bool(positional) and required == [positional[0].arg]
    return None if fits else f"has the parameters ({', '.join(names)}); {SIGNATURES}"


def _names_of(node: ast.AST) -> set[str]:
    """The names that this node binds, without those below it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
