"""Commands of a bash script with its variables filled in. Nothing is run.

Read are assignments, arrays, `${NAME}`, `${NAME:-default}`, `$((1024 * 4))` and continued lines. Conditions are not
judged: what stands in any branch counts, the last one wins. `$(...)` and variables of the caller stay as they are, but
for HOME.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from rollout_server.tasks.environments.tools import calculator
from slipstream.translate.settings import Untranslatable

ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly|declare(?: -\w+)*)\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$(\w+|@)")
ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}|\$\w+_ARGS")
"""Options that stand in another file, which the script reads."""
ARITHMETIC = re.compile(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)")
QUOTED_ARRAY = re.compile(r"\"(\$\{\w+\[@\]\})\"")
UNKNOWN = re.compile(r"\$(?:\{[^}]*\}|\w+|\()")


def commands(text: str, source: str) -> Iterator[list[str]]:
    """Words of each command, in order. Raises Untranslatable: quotes or parentheses stay open."""
    variables = {"HOME": str(Path.home()), "@": ""}
    for statement in _statements(text, source):
        found = ASSIGNMENT.fullmatch(statement)
        if found is None:
            yield _words(_filled(statement, variables), source)
            continue
        name, appends, value = found.groups()
        before = f"{variables.get(name, '')} " if appends else ""
        if value.startswith("("):
            words = _words(_filled(value.strip()[1:-1], variables), source)
            variables[name] = before + shlex.join(words)
        else:
            filled = _filled(value, variables)
            words = _words(filled, source)
            if len(words) > 1 and "$(" not in value and "`" not in value:  # `PYTHONUNBUFFERED=1 python3 -m ...`
                yield words[1:]
                continue
            variables[name] = before + (words[0] if len(words) == 1 else filled.strip("\"'"))


def _statements(text: str, source: str) -> Iterator[str]:
    """Logical lines: continued ones joined, arrays whole, comments and empty lines left out."""
    waiting = ""
    for line in re.sub(r"[ \t]*\\\n[ \t]*", " ", text).splitlines():
        waiting = _without_comment(f"{waiting} {line}")
        if not waiting:
            continue
        opened = ASSIGNMENT.fullmatch(waiting)
        is_open_array = opened is not None and opened[3].startswith("(") and not opened[3].rstrip().endswith(")")
        if is_open_array or _has_open_quote(waiting):
            continue
        yield waiting
        waiting = ""
    if waiting:
        raise Untranslatable(f"{source}: {waiting[:60]!r}... has no end; close its quote or parenthesis")


def _has_open_quote(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def _without_comment(text: str) -> str:
    """The text up to a `#` that begins a word outside of quotes."""
    quote, before = "", " "
    for at, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and (quote == "'" or before != "\\") else quote
        elif sign in "'\"" and before != "\\":
            quote = sign
        elif sign == "#" and before.isspace():
            return text[:at].strip()
        before = "" if before == "\\" else sign  # what follows two backslashes is not escaped
    return text.strip()


def _filled(text: str, variables: dict[str, str]) -> str:
    """The text with what is known of its variables, and sums worked out; a quoted array is its words."""
    text = QUOTED_ARRAY.sub(r"\1", text)

    def of(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables:
            return variables[name]
        return found[0] if found[2] is None else found[2]

    for _ in range(8):  # a default may name a variable
        new = VARIABLE.sub(of, text)
        if new == text:
            break
        text = new
    return ARITHMETIC.sub(lambda found: _worked_out(found, variables), text)


def _worked_out(found: re.Match[str], variables: dict[str, str]) -> str:
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
    try:
        return calculator(text.replace("/", "//"))
    except (ArithmeticError, SyntaxError, ValueError):
        return found[0]


def _words(text: str, source: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Untranslatable(f"{source}: {text[:60]!r}: {error}; close it") from error
