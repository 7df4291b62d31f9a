"""Tools of the tool loop: calculator, Python, functions of the user, and those of MCP servers."""

import ast
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.environments.tool_calls import Tool
from rollout_server.tasks.sandbox import SandboxError
from rollout_server.tasks.sandbox.box import ResourceLimits, run
from rollout_server.tasks.sandbox.probe import isolation, require
from slipstream.runtime.loading import function_of

MAX_POWER = 4096
"""Bits of a power's result."""
MAX_EXPRESSION = 1000
PYTHON_S = 10.0
"""For a program of the Python tool."""
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Parameters that a call in JSON can give."""
BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS = {name: getattr(math, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "floor", "ceil", "gcd")}


def load_tools(names: Iterable[str], *, allow_unisolated: bool = False) -> dict[str, Tool]:
    """Tools by the name that the policy calls. Raises EnvironmentFailed: one cannot be loaded, or two have one name."""
    found: dict[str, Tool] = {}
    entries: dict[str, str] = {}
    for entry in names:
        for tool in _loaded(entry, allow_unisolated=allow_unisolated):
            if (name := tool.schema["function"]["name"]) in found:
                raise EnvironmentFailed(
                    f"environment.function.tools.tools: {entries[name]!r} and {entry!r} both have a tool {name!r}, and"
                    " a policy calls tools by name; rename one or leave it out"
                )
            found[name], entries[name] = tool, entry
    return found


def _loaded(entry: str, *, allow_unisolated: bool) -> list[Tool]:
    """The tools of one entry of environment.function.tools.tools."""
    if entry.startswith("mcp:"):
        from rollout_server.tasks.environments.mcp_tools import tools_of

        return tools_of(entry.removeprefix("mcp:"))
    if entry == "python":
        try:
            require(allow_unisolated=allow_unisolated, key="environment.function.tools.allow_unisolated: true")
        except SandboxError as error:
            raise EnvironmentFailed(f"environment.function.tools.tools: 'python': {error}") from error
    if entry in BUILT_IN:
        return [tool_of(BUILT_IN[entry])]
    if ":" not in entry:
        raise EnvironmentFailed(
            f"environment.function.tools.tools: {entry!r} is no tool; take {', '.join(BUILT_IN)},"
            " path/to/file.py:name or mcp:command"
        )
    return [tool_of(function_of("environment.function.tools.tools", entry, EnvironmentFailed)[1])]


def tool_of(function: Callable[..., Any]) -> Tool:
    """A tool of a function: its name, docstring and annotated parameters; without `async` it runs in a thread.

    Raises EnvironmentFailed: a parameter cannot be described.
    """
    name = function.__name__
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise EnvironmentFailed(
            f"environment.function.tools.tools: {name!r}: its annotations cannot be read: {error}"
        ) from error
    properties, required = {}, []
    for key, one in inspect.signature(function).parameters.items():
        schema = None if one.kind not in NAMED else _described(hints.get(key, str))
        if schema is None:
            kinds = ", ".join(kind.__name__ for kind in TYPES)
            raise EnvironmentFailed(
                f"environment.function.tools.tools: {name!r}: the parameter `{one}` cannot be described to a"
                f" policy; take {kinds}, a Literal, a list of one of these, or one of them | None"
            )
        properties[key] = schema
        if one.default is one.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = (inspect.getdoc(function) or "").strip()
    named = {"name": name, "description": description, "parameters": parameters}
    in_thread = not inspect.iscoroutinefunction(function)
    return Tool({"type": "function", "function": named}, function, in_thread)


def _described(hint: Any) -> dict[str, Any] | None:
    """A type as JSON schema, None apart; None for one that has no such form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [one for one in arguments if one is not type(None)]
        return _described(kinds[0]) if len(kinds) == 1 else None
    if origin is typing.Literal:
        values = [value for value in arguments if value is not None]
        kinds = list({type(value) for value in values})
        return {"type": TYPES[kinds[0]], "enum": values} if len(kinds) == 1 and kinds[0] in TYPES else None
    if origin is list and arguments:
        items = _described(arguments[0])
        return None if items is None else {"type": "array", "items": items}
    kind = TYPES.get(origin or hint)
    return None if kind is None else {"type": kind}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (3 + 4) * 2 ** 5 / sqrt(16)."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"an expression of {len(expression)} characters, at most {MAX_EXPRESSION}")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> Any:
    """Value of an expression of numbers; nothing else is evaluated. Raises ValueError."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > MAX_POWER:
        raise ValueError(f"{base} ** {exponent} is too large")
    return base**exponent


def python(code: str) -> str:
    """Run a Python program in a sandbox; what it prints is the answer."""
    limits = ResourceLimits(seconds=PYTHON_S)
    ended = run({"main.py": code}, ["main.py"], b"", limits, isolated=isolation().is_whole)
    said = (ended.out + ended.err).decode("utf-8", "replace").strip()
    if ended.how != "ended":
        return f"{said}\n(the program {ended.how.replace('_', ' ')})".strip()
    return said or f"(no output, exit code {ended.code})"


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
"""By the name in environment.function.tools.tools."""
