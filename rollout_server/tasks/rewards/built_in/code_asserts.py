"""Takes an assert apart: what the answer has to compute, and what is compared with it, where the answer is not.

| assert                        | the answer computes | compared                                             |
|-------------------------------|---------------------|------------------------------------------------------|
| `f(1) == 2`, `f(1)`           | `f(1)`              | here, with a constant                                |
| `abs(f(1) - 2.5) < 1e-6`      | `f(1)`              | `abs(_value_0 - 2.5) < 1e-6`, by an interpreter alone |

What is neither needs the answer at hand, such as a loop over calls.
"""

import ast
import builtins
import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

from rollout_server.tasks.rewards.built_in.code_values import Same

BUILTINS = frozenset(dir(builtins))
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FINDING = frozenset(("globals", "locals", "vars", "eval", "exec", "unittest", "pytest"))
"""What may find functions by other means than their names."""
BINDING = (ast.comprehension, ast.Lambda, ast.NamedExpr)


class Names(NamedTuple):
    """What the names in an assert stand for."""

    imported: frozenset[str] | None
    """By the tests; None where a star hides which."""
    functions: frozenset[str] | None
    """Of the answer; None takes each that neither the tests nor Python have."""

    @classmethod
    def of(cls, imports: Iterable[ast.Import | ast.ImportFrom], functions: frozenset[str] | None) -> "Names":
        """From the imports of the tests."""
        found = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
        return cls(None if "*" in found else frozenset(found), functions)

    def answers(self, used: set[str]) -> set[str]:
        """Those of the answer."""
        return used - BUILTINS - (self.imported or frozenset()) if self.functions is None else used & self.functions

    def knows(self, used: set[str]) -> bool:
        """Whether each of them is there without any other statement of the tests."""
        return self.imported is None or used <= BUILTINS | self.imported | self.answers(used)


class Rest(NamedTuple):
    """Example: Rest(("f(1)",), "abs(_value_0 - 2.5) < 1e-6")."""

    calls: tuple[str, ...]
    """What the answer computes: `_value_0` and so on."""
    condition: str


def comparison(test: ast.expr, names: Names) -> tuple[str, Any] | None:
    """(left side, constant) of `f(1) == 2`, `f(1) is True`, `f(1)` and `not f(1)`; None for anything else."""
    used = _free(test)
    answers = names.answers(used)
    if not names.knows(used):
        return None
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    call = test.operand if isinstance(test, ast.UnaryOp) and negated else test
    if isinstance(call, ast.Call):  # of isclose, all and the like the answer could make what it likes
        is_answers = names.imported is not None and _is_of(call, answers)
        return (f"bool({ast.unparse(call)})", Same(not negated)) if is_answers else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        try:
            wanted = ast.literal_eval(test.comparators[0])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
        # what is to be true or false is easily guessed: `(f(1) > 0) == True` is for an object that is above all
        if isinstance(wanted, bool) and not _is_of(test.left, answers):
            return None
        return ast.unparse(test.left), Same(wanted) if isinstance(test.ops[0], ast.Is) else wanted
    return None


def rest(test: ast.expr, names: Names) -> Rest | None:
    """What is left of a condition without its calls of the answer; None where it does not come apart."""
    used = _free(test)
    answers = names.answers(used)
    if names.imported is None or not names.knows(used) or any(isinstance(node, BINDING) for node in ast.walk(test)):
        return None
    taking = _Taking(answers)
    left = taking.visit(copy.deepcopy(test))
    if not taking.calls or answers & _free(left):
        return None
    return Rest(tuple(taking.calls), ast.unparse(left))


def value_name(number: int) -> str:
    """Of what a call has given, in a condition."""
    return f"_value_{number}"


def unrun(tests: ast.Module, called: str) -> list[str]:
    """Functions and classes that hold all asserts of tests, where neither a statement nor `called` leads to one."""
    defined = {node.name: node for node in tests.body if isinstance(node, DEFINITIONS)}
    waiting: list[ast.AST] = [node for node in tests.body if not isinstance(node, DEFINITIONS)]
    waiting += [node for name, node in defined.items() if name == called or node.decorator_list]
    left = set(defined)
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id in FINDING):
                return []
            if isinstance(node, ast.Name) and node.id in left:
                left.remove(node.id)
                waiting.append(defined[node.id])
    return [name for name in defined if any(isinstance(node, ast.Assert) for node in ast.walk(defined[name]))]


class _Taking(ast.NodeTransformer):
    """Puts names in the places of calls of the answer, with what is read of their values at once."""

    def __init__(self, answers: set[str]) -> None:
        self.calls: list[str] = []
        self._answers = answers

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not _is_of(node, self._answers):
            return super().generic_visit(node)
        self.calls.append(ast.unparse(node))
        return ast.Name(value_name(len(self.calls) - 1), ast.Load())


def _is_of(node: ast.AST, answers: set[str]) -> bool:
    """Whether it is `f(...)`, or `f(...).a`, `f(...)[0]` and so on, of an f of the answer."""
    is_called = False
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        is_called = is_called or isinstance(node, ast.Call)
        node = node.func if isinstance(node, ast.Call) else node.value
    return is_called and isinstance(node, ast.Name) and node.id in answers


def _free(expression: ast.AST) -> set[str]:
    """Names that it reads and does not bind."""
    names = [node for node in ast.walk(expression) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(expression) if isinstance(node, ast.arg)}
    return {node.id for node in names} - bound
