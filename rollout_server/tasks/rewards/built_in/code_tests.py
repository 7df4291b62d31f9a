"""Tests of programs, from what datasets hold: what the sandbox is given, and what is compared outside."""

import ast
import json
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_server.tasks.rewards.built_in.code_asserts import Names, Rest, comparison, rest, unrun, value_name
from rollout_server.tasks.rewards.built_in.code_values import NAMES, Same, Value, decoded, same

PAIR = {"input", "output"}
CHECK, CANDIDATE = "check", "candidate"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How the program went in one test."""

    how: str
    """`ended`, `timed_out`, or `flooded` for too much output."""
    code: int
    """Exit code, or the negative number of a signal."""
    out: str


@dataclass(frozen=True, slots=True)
class Streams:
    """One run of the program with this input, which has to print this output."""

    given: str
    expected: str
    count: int = 1

    def order(self) -> dict[str, Any]:
        """What the sandbox gets of it (code_inside.py)."""
        return {"stdin": self.given}

    def passed(self, result: CaseResult) -> int:
        """1 for the expected lines, white space at their ends and after them aside, and exit code 0."""
        ended = (result.how, result.code) == ("ended", 0)
        return int(ended and _lines(result.out) == _lines(self.expected))


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

    def order(self) -> dict[str, Any]:
        """What is to be computed (code_inside.py); never what is expected."""
        order = {key: getattr(self, key) for key in ("expressions", "entry_point", "whole")}
        setup = self.imports + (f"\ncandidate = {self.candidate}" if self.candidate else "")
        return {**order, "setup": setup, "stdin": f"{self.word}\n"}

    def passed(self, result: CaseResult) -> int:
        """How many values are the expected ones."""
        values = self.values(result)
        found = sum(
            one.kind == "value" and (same(one.value, want) or (self.is_wrapped and same(one.value, want[0])))
            for one, want in zip(values, self.expected, strict=False)
        )
        return found + int(bool(self.whole) and values[len(self.expressions) :] == [Value("word", self.word)])

    def rest(self, result: CaseResult) -> "Checks | None":
        """The conditions with the values that the answer has computed, for an empty program; None without any."""
        values, conditions = self.values(result)[len(self.expected) :], []
        for one in self.rests:
            own, values = values[: len(one.calls)], values[len(one.calls) :]
            if len(own) < len(one.calls) or any(value.kind != "value" for value in own):
                continue
            pairs = ", ".join(f"{value_name(number)}={value.value!r}" for number, value in enumerate(own))
            conditions.append(f"(lambda {pairs}: bool({one.condition}))()")
        if not conditions:
            return None
        return Checks(
            expressions=tuple(conditions), expected=(Same(True),) * len(conditions), imports=f"{NAMES}{self.imports}"
        )

    def values(self, result: CaseResult) -> list[Value]:
        """Of the expressions as far as they were computed; none where there are more than were asked for."""
        lines = result.out.split("\n")[:-1] if result.how != "flooded" else []
        if len(lines) > len(self.expressions) + bool(self.whole):
            return []
        values = list(map(decoded, lines))
        return [replace(one, value=_listed(one.value)) for one in values] if self.as_json else values


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
