"""Whether rewards and environments of one's own are there, without running any of their code.

They are loaded in the rollout servers' processes. A typing error would show there after the models are loaded; reading
the source here shows it at once.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from configs.data import Reward
from configs.environment import Environment
from configs.errors import did_you_mean
from configs.rewards import SECTIONS, Code, Endpoint, Judge, Mathematics, RewardPart
from configs.schema import Config
from configs.signatures import SIGNATURES, VERL_NAMES

BUILT_IN = (*SECTIONS,)
FORMS = f"take {', '.join(map(repr, BUILT_IN))}, 'module:function' or 'path/to/file.py:function'"
SANDBOX_S = 60.0


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Of reward, environment, tools and agent what this machine cannot use, after the key that names it."""
    environment = config.environment
    found = {
        "reward.function": problem_with_reward(config.reward),
        f"environment.function: {environment.function!r}": problem_with_environment(environment.function),
        "environment.options.tools": problem_with_tools(environment),
    }
    if environment.function == "agent":
        found["environment.options"] = problem_with_agent(environment.options)
    yield from ((key, problem) for key, problem in found.items() if problem is not None)


def problem_with_reward(reward: Reward) -> str | None:
    """What is wrong with the first part of `reward.function` that this machine cannot use, or None."""
    for part in reward.parts:
        problem = problem_with_function(part.spec, part.options) if part.settings is None else _problem_here(part)
        if problem is not None:
            return f"{part.spec!r}: {problem}"
    return None


def _problem_here(part: RewardPart) -> str | None:
    """What a built-in reward lacks on this machine, or None."""
    settings = part.settings
    if isinstance(settings, Mathematics) and importlib.util.find_spec("math_verify") is None:
        return "math-verify is not installed; install the extra: pip install 'slipstream-rl[math]'"
    if isinstance(settings, Endpoint) and settings.key_variable and not os.environ.get(settings.key_variable):
        return f"no environment variable {settings.key_variable} (key_variable); set it where the run starts"
    if isinstance(settings, Judge) and _is_missing_file(settings.rubric):
        return f"rubric: no file {settings.rubric!r} (looked from {os.getcwd()}); correct the path, or give the text"
    if isinstance(settings, Code) and not settings.allow_unisolated:
        problem = _problem_with_sandbox()
        return None if problem is None else f"{problem}; accept it with {{code: {{allow_unisolated: true}}}}"
    return None


def _is_missing_file(rubric: str) -> bool:
    is_name = "\n" not in rubric.strip() and rubric.strip().endswith((".txt", ".md"))
    return is_name and not Path(rubric.strip()).expanduser().is_file()


def _problem_with_sandbox() -> str | None:
    """Run a program that tries to get out of the sandbox; the rollout servers do so again."""
    command = [sys.executable, "-m", "rollout_server.tasks.sandbox"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SANDBOX_S)
    except subprocess.TimeoutExpired:
        return f"rollout_server.tasks.sandbox did not answer within {SANDBOX_S:g} s whether programs can be isolated"
    if tried.returncode == 0:
        return None
    return f"{(tried.stdout or tried.stderr).strip()[-800:]}"


def problem_with_function(spec: str, options: Mapping[str, Any] | None = None) -> str | None:
    """What is wrong with a function of one's own, or None. Of a module, no package is imported to find its source."""
    judge = partial(problem_with_signature, options=options or {})
    location, colon, name = spec.rpartition(":")
    if not colon or not location or not name.isidentifier():
        return f"names no function; {did_you_mean(spec, BUILT_IN) or FORMS}"
    if location.endswith(".py"):
        return _problem_with_file(Path(location).expanduser(), name, judge)
    root = location.partition(".")[0]
    if not root.isidentifier():
        return f"{location!r} is no module name; {FORMS}"
    if importlib.util.find_spec(root) is None:
        return f"no module {root!r} (not installed, and not below {os.getcwd()}); install it, or give a .py file"
    file = _module_file(location)
    tree = _parsed(file) if file is not None else None
    return judge(tree, name) if isinstance(tree, ast.Module) else tree


def problem_with_environment(spec: str | None) -> str | None:
    """What is wrong with an `environment.function` of the form `path/to/file.py:name`, or None."""
    location, _, name = (spec or "").rpartition(":")
    return _problem_with_file(Path(location).expanduser(), name, _problem_with_rollout) if ".py" in location else None


def problem_with_tools(environment: Environment) -> str | None:
    """What is wrong with the tools of the built-in tool loop, or None: a file of them, or no sandbox for programs."""
    tools = environment.options.get("tools") if environment.function == "tools" else None
    given = tools if isinstance(tools, list) else [tools]
    for spec in filter(lambda one: isinstance(one, str), given):
        location, _, name = spec.rpartition(":")
        problem: str | None = None
        if spec == "python" and environment.options.get("allow_unisolated") is not True:
            if (problem := _problem_with_sandbox()) is not None:
                problem += "; accept it with environment.options.allow_unisolated: true"
        elif location.endswith(".py") and not spec.startswith("mcp:"):
            problem = _problem_with_file(Path(location).expanduser(), name, lambda tree, name: None)
        if problem is not None:
            return f"{spec!r}: {problem}"
    return None


def problem_with_agent(options: Mapping[str, Any]) -> str | None:
    """Which file of `environment.function: agent` is not there or has no such function, or None."""
    location, _, name = str(options.get("function", "")).rpartition(":")
    if location.endswith(".py"):
        return _problem_with_file(Path(location).expanduser(), name, lambda tree, name: None)
    command: list[str] = options.get("command", [])
    program, script, *_ = [*command, "", ""]
    if program.startswith("python") and script.endswith(".py") and not Path(script).is_file():
        return f"no file {script!r} (looked from {os.getcwd()}); correct the path"
    return None


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


def _problem_with_file(path: Path, name: str, judge: Callable[[ast.Module, str], str | None]) -> str | None:
    if not path.is_file():
        return f"no file {str(path)!r} (looked from {os.getcwd()}); correct the path"
    tree = _parsed(path)
    if isinstance(tree, str):
        return tree
    names = {each for node in ast.walk(tree) for each in _names_of(node)}
    if names & {name, "*", "__getattr__"}:  # a star import, or a call, may bring it
        return judge(tree, name)
    functions = sorted(n for n in names if not n.startswith("_"))
    hint = did_you_mean(name, functions) or f"it has {', '.join(functions[:8]) or 'no functions'}"
    return f"{path} has no function {name!r}; {hint}"


def _parsed(path: Path) -> ast.Module | str:
    """The syntax tree of a file, or what is wrong with it."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{path} does not parse: {error}; correct the file"


def problem_with_signature(tree: ast.Module, name: str, options: Collection[str] = ()) -> str | None:
    """What is wrong with the parameters of a plain function, or None; the rules are those of rewards/loading.py.

    A decorator may change the parameters and a name may be bound again: the source says nothing about these.
    """
    if (arguments := _parameters(tree, name)) is None:
        return None
    positional, required, names = ([one for one in some if one not in options] for some in arguments)
    if "completions" in names:
        fits = "completion_ids" not in required
    elif "solution_str" in names:
        fits = set(required) <= set(VERL_NAMES)
    else:
        fits = bool(positional) and required == positional[:1]
    return None if fits else f"has the parameters ({', '.join(names)}); {SIGNATURES}"


def _problem_with_rollout(tree: ast.Module, name: str) -> str | None:
    positional, required, names = _parameters(tree, name) or (["row", "client"], ["row", "client"], [])
    if len(positional) < 2 or required != positional[:2]:
        return f"has the parameters ({', '.join(names)}); take `async def {name}(row, client)`"
    plain = any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)
    return f"is not asynchronous; take `async def {name}(row, client)`" if plain else None


def _parameters(tree: ast.Module, name: str) -> tuple[list[str], list[str], list[str]] | None:
    """Those by place, those without a default, and all of a plain function; None where the source does not say."""
    bound = [node for node in ast.walk(tree) if name in _names_of(node)]
    if len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if bound[0] not in tree.body or bound[0].decorator_list:
        return None
    arguments = bound[0].args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default]
    return positional, required, [*positional, *(a.arg for a in arguments.kwonlyargs)]


def _names_of(node: ast.AST) -> set[str]:
    """The names that this node binds, without those below it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
