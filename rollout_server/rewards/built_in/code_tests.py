"""Tests of programs, from what datasets hold: what the sandbox is given, and what is compared outside."""

import ast
import json
import math
import secrets
from dataclasses import dataclass, field
from typing import Any

from rollout_server.rewards.built_in.code_asserts import Names, Rest, comparison, rest, unrun, value_name
from rollout_server.sandbox.box import Ended

PRELUDE = """
import json, os, sys
order = json.loads(sys.stdin.readline())
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "answer"}
exec("from typing import Dict, List, Optional, Set, Tuple", names)  # LiveCodeBench's starter code does without
exec(compile(open("answer.py").read(), "answer.py", "exec"), names)
if order["entry_point"].isidentifier() and order["entry_point"] not in names and "Solution" in names:
    names[order["entry_point"]] = getattr(names["Solution"](), order["entry_point"])
if order["setup"]:
    exec(compile(order["setup"], "tests.py", "exec"), names)
for expression in order["expressions"]:
    try:
        value = repr(eval(expression, names))
    except Exception as error:
        value = ""
        sys.stderr.write(f"{type(error).__name__}: {error}\\n")
    results.write(json.dumps(value) + "\\n")
    results.flush()
if order["whole"]:
    names["__name__"] = "__main__"
    exec(compile(order["whole"], "tests.py", "exec"), names)
    results.write(json.dumps(sys.stdin.readline().strip()) + "\\n")
results.close()
"""
"""Runs in the sandbox, before and around the answer."""
PAIR = {"input", "output"}
CHECK, CANDIDATE = "check", "candidate"
RELATIVE = 1e-9
"""Floats of a program and of a dataset that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class Streams:
    """One run of the program with this input, which has to print this output."""

    given: str
    expected: str
    count: int = 1

    def files(self, program: str) -> dict[str, str]:
        """What lies in the program's folder."""
        return {"main.py": program}

    def stdin(self) -> bytes:
        """What it reads."""
        return self.given.encode("utf-8", "surrogatepass")

    def passed(self, ended: Ended) -> int:
        """1 for the expected lines, white space at their ends and after them aside, and exit code 0."""
        printed = ended.out.decode("utf-8", "replace")
        return int(ended.how == "ended" and ended.code == 0 and _lines(printed) == _lines(self.expected))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Expressions that are computed in one run of the program, one after the other."""

    expressions: tuple[str, ...] = ()
    expected: tuple[Any, ...] = ()
    imports: str = ""
    """Of the tests."""
    entry_point: str = ""
    candidate: str = ""
    """What `candidate` stands for in the tests, where they have it."""
    rests: tuple[Rest, ...] = ()
    """Conditions over values of the last expressions, for a run without the answer (`rest`)."""
    whole: str = ""
    """Tests that do not come apart: they are run as they are, and a word that they did not know says so."""
    as_json: bool = False
    """What is expected came as JSON, which knows no tuples."""
    is_wrapped: bool = False
    """What is expected may also be the one entry of its list (TACO, APPS)."""
    word: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def count(self) -> int:
        """How many tests these are."""
        return len(self.expected) + len(self.rests) + bool(self.whole)

    def files(self, program: str) -> dict[str, str]:
        """What lies in the program's folder."""
        return {"main.py": PRELUDE, "answer.py": program}

    def stdin(self) -> bytes:
        """What is to be computed; never what is expected."""
        order = {key: getattr(self, key) for key in ("expressions", "entry_point", "whole")}
        order["setup"] = self.imports + (f"\ncandidate = {self.candidate}" if self.candidate else "")
        return f"{json.dumps(order)}\n{self.word}\n".encode()

    def passed(self, ended: Ended) -> int:
        """How many values are the expected ones."""
        found = sum(
            ok and (same(value, want) or (self.is_wrapped and same(value, want[0])))
            for (ok, value), want in zip(self._values(ended), self.expected, strict=False)
        )
        return found + int(bool(self.whole) and self._lines(ended)[len(self.expressions) :] == [json.dumps(self.word)])

    def rest(self, ended: Ended) -> "Checks | None":
        """The conditions with the values that the answer has computed, for an empty program; None without any."""
        values, conditions, setup = self._values(ended)[len(self.expected) :], [], self.imports
        for one in self.rests:
            own, values = values[: len(one.calls)], values[len(one.calls) :]
            if len(own) < len(one.calls) or not all(ok for ok, _ in own):
                continue
            pairs = ", ".join(f"{value_name(number)}={value!r}" for number, (_, value) in enumerate(own))
            conditions.append(f"(lambda {pairs}: bool({one.condition}))()")
        if not conditions:
            return None
        return Checks(expressions=tuple(conditions), expected=(True,) * len(conditions), imports=setup)

    def _lines(self, ended: Ended) -> list[str]:
        """What was written as results; nothing where there is more of it than was asked for."""
        lines = ended.out.decode("utf-8", "replace").split("\n")[:-1] if ended.how != "flooded" else []
        return lines if len(lines) <= len(self.expressions) + bool(self.whole) else []

    def _values(self, ended: Ended) -> list[tuple[bool, Any]]:
        """(True, value) of the expressions, as far as they were computed."""
        values = [_value(line) for line in self._lines(ended)[: len(self.expressions)]]
        return [(ok, _listed(value)) for ok, value in values] if self.as_json else values


Test = Streams | Checks


def read_tests(truth: Any, most: int) -> list[Test]:
    """The first `most` tests of a ground truth, in one of the forms of rewards/built_in/code.py.

    Raises:
        ValueError: none of them, or no test.
    """
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise ValueError(f"ground_truth is no JSON ({error}); {_forms(truth)}") from error
    if isinstance(truth, str) and "assert" in truth:
        return [_of_asserts(truth, "", most)]
    if isinstance(truth, dict) and "test" in truth:
        return [_of_asserts(str(truth["test"]), str(truth.get("entry_point") or ""), most)]
    if isinstance(truth, list) and truth and all(isinstance(one, str) for one in truth):
        return [_of_asserts("\n".join(truth[:most]), "", most)]
    if isinstance(truth, list) and truth and all(isinstance(one, dict) and one.keys() >= PAIR for one in truth):
        truth = _joined(truth)
    inputs, outputs = (truth.get("inputs"), truth.get("outputs")) if isinstance(truth, dict) else (None, None)
    if not inputs or not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"ground_truth holds no tests; {_forms(truth)}")
    if name := truth.get("fn_name"):
        return [_of_calls(str(name), inputs, list(map(_result, outputs)), most)]
    pairs = list(zip(inputs, outputs, strict=True))[:most]
    return [Streams(_text(given), _text(out)) for given, out in pairs]


def _joined(tests: list[dict[str, Any]]) -> dict[str, Any]:
    """[{"input", "output"}] as one dict. Raises ValueError: a function is to be called, and none is named."""
    joined = {"inputs": [one["input"] for one in tests], "outputs": [one["output"] for one in tests]}
    if any(one.get("testtype") == "functional" for one in tests):
        metadata = tests[0].get("metadata")
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        if not name:
            raise ValueError(
                "ground_truth: a test of testtype 'functional' calls a function, and nothing names it; write the tests"
                " as {inputs, outputs, fn_name} (LiveCodeBench has the name in the row's metadata, as func_name)"
            )
        joined["fn_name"] = name
    return joined


def _of_calls(name: str, inputs: list[Any], expected: list[Any], most: int) -> Checks:
    """Raises ValueError: this is no name of a function."""
    if not name.isidentifier():
        raise ValueError(f"ground_truth: fn_name {name!r} is no name of a function")
    return Checks(
        expressions=tuple(f"{name}({', '.join(map(repr, _arguments(given)))})" for given in inputs[:most]),
        expected=tuple(expected[:most]),
        entry_point=name,
        as_json=True,
        # of all tests or of none, so that a list of one number is not taken for a number in a row of lists
        is_wrapped=all(isinstance(value, list) and len(value) == 1 for value in expected),
    )


def _of_asserts(source: str, entry_point: str, most: int) -> Checks:
    """Raises ValueError: the tests do not parse, assert nothing, or check no function that has a name."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests of ground_truth do not parse: {error}") from error
    bodies = [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECK]
    inner = bodies[0] if bodies else tree.body
    asserts = [node for node in inner if isinstance(node, ast.Assert)]
    if not asserts and not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise ValueError("the tests of ground_truth assert nothing")
    if functions := unrun(tree, CHECK):
        raise ValueError(
            f"ground_truth: nothing calls {', '.join(functions[:3])} of the tests, so no program would fail them; add a"
            f" last line such as {functions[0]}()"
        )
    if bodies and not entry_point:
        entry_point = _checked(tree)
    imports = [node for node in (*tree.body, *inner) if isinstance(node, ast.Import | ast.ImportFrom)]
    if asserts and all(isinstance(node, ast.Assert | ast.Import | ast.ImportFrom) for node in inner):
        names = Names.of(imports, frozenset((CANDIDATE, entry_point)) if entry_point else None)
        parts = [comparison(node.test, names) or rest(node.test, names) for node in asserts[:most]]
        if None not in parts:
            constants = [part for part in parts if isinstance(part, tuple) and not isinstance(part, Rest)]
            rests = tuple(part for part in parts if isinstance(part, Rest))
            return Checks(
                expressions=(*(left for left, _ in constants), *(call for one in rests for call in one.calls)),
                expected=tuple(right for _, right in constants),
                imports="\n".join(map(ast.unparse, imports)),
                entry_point=entry_point,
                candidate=entry_point,
                rests=rests,
            )
    call = f"\n{CHECK}({entry_point})" if bodies and entry_point else ""
    return Checks(whole=source + call, entry_point=entry_point)


def _checked(tests: ast.Module) -> str:
    """What tests without an entry point check: `f` of a line `check(f)`. Raises ValueError: there is none."""
    for node in tests.body:
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[checked], keywords=[])) if name == CHECK:
                return ast.unparse(checked)
    raise ValueError(
        "ground_truth: nothing names the function that `check` of the tests checks; give {test, entry_point}, or a last"
        " line such as check(f)"
    )


def same(value: Any, wanted: Any) -> bool:
    """Equal as Python has it, but for rounding of floats, and a bool is no number."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, float) or isinstance(wanted, float):
        both = isinstance(value, (int, float)) and isinstance(wanted, (int, float))
        try:
            return both and (value == wanted or math.isclose(value, wanted, rel_tol=RELATIVE))
        except OverflowError:
            return False
    if isinstance(value, (list, tuple)):
        alike = type(value) is type(wanted) and len(value) == len(wanted)
        return alike and all(same(one, other) for one, other in zip(value, wanted, strict=True))
    return type(value) is type(wanted) and bool(value == wanted)


def _value(line: str) -> tuple[bool, Any]:
    """(True, value) of a line that the sandbox wrote: JSON text with a Python literal, never evaluated."""
    try:
        return True, ast.literal_eval(json.loads(line))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _listed(value: Any) -> Any:
    return [_listed(one) for one in value] if isinstance(value, (list, tuple)) else value


def _arguments(given: Any) -> list[Any]:
    """Of a call: a list of them (TACO, APPS), or text with the JSON of one on each line (LiveCodeBench)."""
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.split("\n") if line.strip()]
        except ValueError:
            return [given]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _result(given: Any) -> Any:
    """The value that a call has to have; text is JSON where it reads as such."""
    if isinstance(given, str):
        try:
            return json.loads(given)
        except ValueError:
            return given
    return given


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _forms(truth: Any) -> str:
    return (
        "the reward 'code' takes {inputs, outputs}, {inputs, outputs, fn_name}, [{input, output}], a list of asserts,"
        f" or {{test, entry_point}}, found {str(truth)[:80]!r}"
    )
