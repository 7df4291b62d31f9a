"""The reward for programs: forms of tests, hostile answers, values as asserts compare them, no isolation."""

import ast
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from configs.rewards import Code
from rollout_server.tasks.rewards import RewardError
from rollout_server.tasks.rewards.built_in import code
from rollout_server.tasks.rewards.built_in.code_asserts import Names, Rest, rest
from rollout_server.tasks.rewards.built_in.code_inside import encoded
from rollout_server.tasks.rewards.built_in.code_tests import Checks, Streams, read_tests
from rollout_server.tasks.rewards.built_in.code_values import Value, decoded
from rollout_server.tasks.sandbox import probe
from rollout_server.tasks.sandbox.box import run
from rollout_server.tasks.sandbox.probe import Isolation
from tests.rollout_server.reward_runs import needs_isolation, sample, score

OPTIONS = Code(timeout_s=20.0, total_s=40.0).model_dump(exclude={"weight"})
STREAMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
HUMAN_EVAL = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
OPAQUE = {
    "test": "def check(candidate):\n    for n in range(3):\n        assert candidate(n, 1) > n\n",
    "entry_point": "add",
}
NEAR = {
    "test": "import math\nMETADATA = {}\ndef check(candidate):\n    assert abs(candidate(1, 2) - 3) < 1e-6\n"
    "    assert math.isclose(candidate(1, 1.5), 2.5, rel_tol=1e-6)\n    assert candidate(1, 1) in (2, 3)\n"
    "    assert candidate(2, 2) == 4\n    assert candidate(1, 2) == candidate(2, 1), 'order'\n",
    "entry_point": "add",
}
"""What counts is a comparison that the answer's interpreter must not make."""
ADD = "def add(a, b):\n    return a + b"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b"

FORGED = """
import __main__, json, os, sys
__main__.results.write(json.dumps(sys.stdin.readline().strip()) + "\\n")
__main__.results.close()
os._exit(0)"""
"""Reads the word that says that tests which do not come apart have passed."""
GUESSED = 'import __main__, os\n__main__.results.write(\'["word", "x"]\\n\')\n__main__.results.close()\nos._exit(0)'


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    needs_isolation()


def judged(program: str, truth: Any, **options: Any) -> dict[str, float]:
    return code.reward(sample(f"Here:\n```python\n{program}\n```\n", truth), **(OPTIONS | options))


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        ("print(sum(map(int, input().split())))", json.dumps(STREAMS)),
        (ADD, CALLS),
        (SOLUTION, CALLS),
        (ADD, ASSERTS),
        (ADD, HUMAN_EVAL),
        (ADD, OPAQUE),
        (ADD, NEAR),
        (
            ADD,
            {
                **HUMAN_EVAL,
                "test": "def check(f):\n    assert twice(f(1, 2)) == 6\n\ndef twice(x):\n    return x * 2\n",
            },
        ),
        (ADD, ["import math", "assert math.isclose(add(1, 2), 3)", "assert isinstance(add(1, 2), int)"]),
        (ADD, HUMAN_EVAL["test"] + "check(add)\n"),
        ("def f(): return True", ["assert f() is True"]),
        (SOLUTION, HUMAN_EVAL),
        (SOLUTION, {**HUMAN_EVAL, "entry_point": "Solution().add"}),
        (SOLUTION, {**OPAQUE, "entry_point": "Solution().add"}),
    ],
)
def test_right_programs_pass(program: str, truth: Any) -> None:
    found = judged(program, truth)
    assert (found["score"], found["passed"], found["timed_out"], found["crashed"]) == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("program", "truth", "mark"),
    [
        ("import os; os._exit(0)", STREAMS, ""),
        ("import sys; sys.exit(0)", OPAQUE, ""),
        ("class E:\n  __eq__ = lambda s, o: 1\n  __repr__ = lambda s: '1'\ndef add(a, b): return E()", ASSERTS, ""),
        ("def add(a, b):\n  while True: pass", HUMAN_EVAL, "timed_out"),
        ("def add(a, b):\n  while True: print('x' * 9999)", HUMAN_EVAL, "flooded"),
        (FORGED, NEAR, ""),
        (
            "import math\nmath.isclose = isinstance = lambda *a, **k: True\ndef add(a, b): return 0",
            ["import math", "assert math.isclose(add(1, 2), 3)", "assert isinstance(add(1, 2), str)"],
            "",
        ),
        ("class E:\n  __gt__ = lambda s, o: True\ndef add(a, b): return E()", ["assert (add(1, 2) > 2) == True"], ""),
        ('import os\nos.write(1, b\'["value", 3]\\n["value", 7]\\n\')\ndef add(a, b): return 0', CALLS, ""),
        ("syntax error(", ASSERTS, "crashed"),
        ("print(3)\nraise SystemExit(3)", {"inputs": ["1 2"], "outputs": ["3"]}, "crashed"),
        (GUESSED, OPAQUE, ""),
        ("def f(n): raise ValueError", ["assert f(1) in (None, 2)"], ""),
        ("def f(): return 1", ["assert f() is True"], ""),
    ],
)
def test_wrong_and_hostile_programs_score_nothing(program: str, truth: Any, mark: str) -> None:
    seconds = 0.4 if mark.startswith("timed_out") else 20.0
    found = judged(program, truth, timeout_s=seconds, total_s=30.0)
    assert found["score"] == 0.0, found
    assert not mark or any(found[one] == 1.0 for one in mark.split(" or ")), found


@pytest.mark.parametrize(
    ("program", "wrong", "truth"),
    [
        (  # LiveCodeBench: an argument on each line, and starter code without imports
            "class Solution:\n    def total(self, nums: List[int]) -> int:\n        return sum(nums)",
            "class Solution:\n    def total(self, nums: List[int]) -> int:\n        return max(nums)",
            {"inputs": ["[1, 2, 3]", "[10]"], "outputs": ["6", "10"], "fn_name": "total"},
        ),
        (
            "class Solution:\n    def at(self, words, k):\n        return words[k:]",
            "class Solution:\n    def at(self, words, k):\n        return words[k]",
            {"inputs": ['["a", "b"]\n1', '["c", "d"]\n0'], "outputs": ['["b"]', '["c", "d"]'], "fn_name": "at"},
        ),
        (
            "class Solution:\n    def turned(self, grid):\n        return list(zip(*grid))",
            "class Solution:\n    def turned(self, *grid):\n        return grid",
            [
                {"input": given, "output": out, "testtype": "functional", "metadata": {"func_name": "turned"}}
                for given, out in [("[[1, 2], [3, 4]]", "[[1, 3], [2, 4]]"), ("[[5, 6]]", "[[5], [6]]")]
            ],
        ),
        (  # TACO and APPS: a list of arguments, and a value in a list of its own
            "def total(nums): return sum(nums)",
            "def total(nums): return max(nums)",
            {"inputs": [[[1, 2, 3]], [[10]]], "outputs": [[6], [10]], "fn_name": "total"},
        ),
        (
            "def ends(text, n): return [text[:n], text[-n:]]",
            "def ends(text, n): return text[:n]",
            {"inputs": [["abc", 1], ["de", 2]], "outputs": [[["a", "c"]], [["de", "de"]]], "fn_name": "ends"},
        ),
        (
            "def small(nums, most): return [n for n in nums if n < most]",
            "def small(nums, most): return nums[0]",
            {"inputs": [[[1, 9], 5], [[2, 3], 5]], "outputs": [[1], [2, 3]], "fn_name": "small"},
        ),
    ],
)
def test_functions_are_called_as_data_sets_have_their_rows(program: str, wrong: str, truth: Any) -> None:
    assert judged(program, json.dumps(truth), partial=True)["score"] == 1.0
    assert judged(wrong, json.dumps(truth))["score"] == 0.0


TEST = "def test_add():\n    assert add(1, 2) == 3\n"


@pytest.mark.parametrize(
    "calls",
    [
        "test_add()",
        "if __name__ == '__main__':\n    test_add()",
        "for name, one in list(globals().items()):\n    if name.startswith('test_'):\n        one()",
        "def all_of_them():\n    test_add()\nall_of_them()",
    ],
)
def test_tests_that_are_called_are_run(calls: str) -> None:
    assert judged(ADD, f"{TEST}{calls}\n")["score"] == 1.0
    assert judged("def add(a, b):\n    return 7", f"{TEST}{calls}\n")["score"] == 0.0


def test_tests_that_an_answer_could_forge_are_counted() -> None:
    assert judged(ADD, OPAQUE)["forgeable"] == 1.0 and judged("", ASSERTS)["forgeable"] == 0.0


def test_partial_counts_the_tests_that_pass() -> None:
    assert judged("print(3)", STREAMS, partial=True)["score"] == 0.5
    assert judged("def add(a, b): return 3", ASSERTS, partial=True)["score"] == 0.5
    assert judged("def add(a, b): return 3", ASSERTS)["passed"] == 0.5


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```\na\n```\n ```py\nb\n``` c", "b\n"),
        ("Install:\n```bash\npip install x\n```\nThe program:\n```python\nb\n```\n", "b\n"),
        ("```python\nb\n```\nOr:\n```json\n{}\n```\n", "b\n"),
        ("```python\nb\n```\nIt prints:\n```\n3\n```\n", "b\n"),
        ("```python\r\nb\r\n```\r\nDone.\r\n", "b\n"),
        ("```Python title=main.py\nb\n```", "b\n"),
        ("Take ```this``` or that:\n```\na\n```\n```\nb\n```\n```text\nc\n```", "b\n"),
        ("````python\nb\n````\n~~~\na\n~~~\n", "b\n"),
        ("~~~python3\nb\n~~~", "b\n"),
        ("```py\na\n```\n```python\nb\n```\n```python\nunfinished", "b\n"),
        ('````python\nb = """\n```\nx\n```\n"""\n````', 'b = """\n```\nx\n```\n"""\n'),
        ("no block", None),
        ("```python\nunfinished", None),
        ("```python\n```", None),
        ("```bash\nls\n```", None),
    ],
)
def test_the_last_finished_block_of_python_counts(answer: str, program: str | None) -> None:
    assert code.program_of(answer) == program


def test_an_answer_without_a_program_scores_nothing() -> None:
    found = code.reward(sample("none", STREAMS), **OPTIONS)
    assert (found["score"], found["has_program"]) == (0.0, 0.0)


def test_what_is_expected_never_enters_the_sandbox() -> None:
    for truth in (CALLS, ASSERTS, HUMAN_EVAL):
        (test,) = read_tests(truth, 20)
        assert isinstance(test, Checks)
        given = json.dumps(test.order())
        assert test.expected and "7" not in given.replace(test.word, "") and "== 3" not in given
    (stream, _) = read_tests(STREAMS, 20)
    assert isinstance(stream, Streams) and stream.order() == {"stdin": "1 2\n"}


@pytest.mark.parametrize(
    ("test", "calls", "condition"),
    [
        ("abs(f(1)[0] - 2) < 1", ("f(1)[0]",), "abs(_value_0 - 2) < 1"),
        ("f(f(1)) in g().rows(2)", ("f(f(1))", "g().rows(2)"), "_value_0 in _value_1"),
        ("all(f(x) == y for x, y in [(1, 2)])", None, None),
        ("f(1) == wanted", None, None),
        ("abs(1) == abs(2)", None, None),
        ("f is not None", None, None),
    ],
)
def test_a_condition_comes_apart_where_no_other_name_is_in_it(test: str, calls: Any, condition: str | None) -> None:
    names = Names.of([], None)
    found = rest(ast.parse(test, mode="eval").body, names)
    assert found == (None if condition is None else Rest(calls, condition))


FUNCTIONAL = {"input": "1", "output": "1", "testtype": "functional"}
NOT_CALLED = r"nothing calls test_add .* add a last line such as test_add\(\)"
NOT_NAMED = r"nothing names the function.*\{test, entry_point\}"


@pytest.mark.parametrize(
    ("said", "truth"),
    [
        *(
            ("ground_truth", truth)
            for truth in (
                None, 3, "no tests", [], {}, {"inputs": ["1"], "outputs": []}, {"inputs": ["1"], "outputs": None},
                {"inputs": "12", "outputs": "34"}, [{"input": "1", "expected": "2"}], ["assert ("], "{broken",
            )
        ),
        ("ground_truth.*functional.*fn_name", [FUNCTIONAL]),
        ("ground_truth.*functional.*fn_name", [FUNCTIONAL | {"metadata": '{"func_name": "f"}'}]),
        # run as they are, these would pass for every program
        *((NOT_CALLED, truth) for truth in (TEST, f"{TEST}M = dict(a=1)\n", {"test": TEST, "entry_point": "add"})),
        *((NOT_NAMED, one["test"]) for one in (HUMAN_EVAL, OPAQUE)),
        (NOT_NAMED, {"test": OPAQUE["test"]}),
        (NOT_NAMED, {"test": HUMAN_EVAL["test"], "entry_point": None}),
    ],
)  # fmt: skip
def test_rows_that_test_nothing_are_errors(said: str, truth: Any) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(truth, 20)


def test_without_isolation_code_is_refused_unless_a_key_allows_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    nothing = Isolation(is_whole=False, possible=("files", "network"), reason="unshare: Operation not permitted")
    for module in (probe, code):
        monkeypatch.setattr(module, "isolation", lambda: nothing)
    with pytest.raises(RewardError, match=r"may read and write files.*; connect.*allow_unisolated: true"):
        code.prepare(allow_unisolated=False)
    code.prepare(allow_unisolated=True)
    assert "WARNING: programs cannot be isolated here (unshare: Operation not permitted)" in capsys.readouterr().err


def test_in_a_reward_process() -> None:
    """With its limits, its supervisor and its private channel around the sandbox."""
    truth = json.dumps(STREAMS)
    program = "```python\nprint(sum(map(int, input().split())))\n```"

    (good, bad) = score({"code": {"weight": 2.0, "timeout_s": 7.0}}, program, "nothing", truth=truth)
    assert (good.score, bad.score, good.error) == (2.0, 0.0, None)


RETURNED = {
    "Counter('aab')": "{'a': 2, 'b': 1}",
    "defaultdict(list, {1: [2]})": "{1: [2]}",
    "OrderedDict([(1, 2)])": "{1: 2}",
    "namedtuple('P', 'x y')(1, 2)": "(1, 2)",
    "frozenset({1, 2})": "{1, 2}",
    "{1: 2}.keys()": "{1}",
    "{1: 2}.items()": "{(1, 2)}",
    "[Counter('a'), (frozenset('b'),)]": "[{'a': 1}, ({'b'},)]",
    "int64()": "3",
    "[int64(), 0.1 + 0.2]": "[3, 0.3]",
    "True": "1",
    "1": "True",
    "{'a': True}": "{'a': 1}",
    "1.0": "1",
    "Fraction(1, 2)": "0.5",
    "bytearray(b'a')": "b'a'",
    "IntEnum('E', 'A').A": "1",
    "10 ** 5000 % 10 ** 4999": "0",
    "'\\ud800'": "'\\ud800'",
}
"""What a program returns, and the literal that an assert finds equal to it."""
UNEQUAL = {
    "[1]": "(1,)",
    "{1: 2}.keys()": "[1]",
    "{1: 2}": "{1: 3}",
    "float('nan')": "0.0",
    "'1'": "1",
    "Counter('ab')": "{'a': 1}",
}
IMPORTS = (
    "from collections import *\nfrom enum import IntEnum\nfrom fractions import Fraction\n"
    "class int64:\n    __module__, shape, item = 'numpy', (), lambda self: 3\n"
)


def returning(values: list[str]) -> str:
    return f"{IMPORTS}def f(n):\n    return [" + ", ".join(f"lambda: {value}" for value in values) + "][n]()"


def test_values_are_equal_where_an_assert_finds_them_equal() -> None:
    asserts = [f"assert f({number}) == {wanted}" for number, wanted in enumerate(RETURNED.values())]
    right = [judged(returning(list(RETURNED)), [one], partial=True)["score"] for one in asserts]
    assert [value for value, score in zip(RETURNED, right, strict=True) if score != 1.0] == []


def test_values_are_unequal_where_an_assert_finds_them_so() -> None:
    asserts = [f"assert f({number}) == {wanted}" for number, wanted in enumerate(UNEQUAL.values())]
    found = judged(returning(list(UNEQUAL)), asserts, partial=True, max_tests=50)
    assert (found["passed"], found["not_encoded"]) == (0.0, 0.0)


def test_numbers_of_numpy_are_numbers() -> None:
    for value in (np.int64(3), np.float32(0.5), np.float64(0.1), np.bool_(True), np.str_("a"), np.complex128(1j)):
        assert decoded(json.dumps(["value", encoded([value])])) == Value("value", [value.item()])
    with pytest.raises(TypeError):
        encoded(np.zeros(2))


def test_values_without_an_encoding_are_counted() -> None:
    for value in ("object()", "iter([1])", "[lambda: 1]", "(x := []).append(x) or x"):
        found = judged(f"def f(): return {value}", ["assert f() == 1"])
        assert (found["score"], found["not_encoded"]) == (0.0, 1.0), value


COLLIDING = [["int", hex(number * (2**61 - 1))] for number in range(1, 3_000)]


@pytest.mark.parametrize(
    "encoding",
    [
        ["Fraction", "1e30000"],  # with nine digits in place of five it takes hours
        ["Fraction", f"1/{'3' * 4_000}"],
        ["Decimal", "7" * 4_000],
        ["Decimal", [0, [1], 5]],
        ["Decimal", "sNaN"],
        ["int", "f" * 4_000],
        ["set", COLLIDING],
        ["dict", [[key, 1] for key in COLLIDING]],
    ],
)
def test_what_would_be_computed_for_long_is_no_value(encoding: Any) -> None:
    assert decoded(json.dumps(["value", encoding])) == Value("raised")


def test_an_answer_cannot_leave_its_group_by_a_value_that_takes_long() -> None:
    forged = '\'["value", ["Fraction", "1e999999999"]]\\n\''
    writes = f"import os\ndef f():\n    os.write(1, {forged}.encode())\n    os._exit(0)"
    for program in (writes, "def f(): return 10**6000", "from decimal import *\ndef f(): return Decimal('sNaN')"):
        assert judged(program, ["assert f() == 1"])["score"] == 0.0, program
        assert judged(program, ["assert f() + 1 < f()"])["score"] == 0.0, "also where a second run is given the value"


def test_a_second_run_sees_values_as_the_program_gave_them() -> None:
    tests = [
        "assert list(f({2: 1, 1: 3}).keys()) == [2, 1]",
        "assert sum(f({1: 2}).values()) == 2 and f({}) != 1",
        "assert len(f({1: 2})) < 2",
    ]
    assert judged("from collections import Counter\ndef f(d): return Counter(d)", tests)["score"] == 1.0


def test_a_second_test_does_not_see_what_the_first_has_left() -> None:
    """Tests share one start of the sandbox, and no files, variables or daemons."""
    program = (
        "import os, time\nseen = os.listdir('.')\nopen('kept', 'w').write('x')\nif os.fork() == 0:\n"
        "    os.setsid()\n    time.sleep(60)\nothers = [n for n in os.listdir('/proc') if n.isdigit()]\n"
        "print(input(), seen, len(others))"
    )
    truth = {"inputs": ["a", "b"], "outputs": ["a [] 3", "b [] 3"]}
    assert judged(program, json.dumps(truth))["score"] == 1.0


def test_a_busy_machine_changes_no_score() -> None:
    """Four processes on one core: the clock on the wall runs four times as fast as a program's own."""
    burn = "while True: pass"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [subprocess.Popen([sys.executable, "-S", "-c", burn]) for _ in range(3)]
    try:
        program = "import time\nwhile time.process_time() < 0.5: pass\nprint(input())"
        found = judged(program, {"inputs": ["1"], "outputs": ["1"]}, timeout_s=1.0)
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    assert (found["score"], found["timed_out"]) == (1.0, 0.0)
    assert judged(burn, {"inputs": ["1"], "outputs": ["1"]}, timeout_s=0.5)["timed_out"] == 1.0
    assert judged("input()\nimport time\ntime.sleep(60)", {"inputs": ["1"], "outputs": ["1"]}, wall_s=0.5)["timed_out"]


def test_all_tests_of_an_answer_share_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []
    monkeypatch.setattr(code, "run", lambda *a, **k: (starts.append(1), run(*a, **k))[1])
    truth = {"inputs": [str(n) for n in range(20)], "outputs": [str(n) for n in range(20)]}
    assert judged("print(input())", truth)["score"] == 1.0 and len(starts) == 1
