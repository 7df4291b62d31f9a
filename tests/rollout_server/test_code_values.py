"""Values of programs: encoded in the sandbox, compared outside as an assert in Python would compare them."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from configs.rewards import Code
from rollout_server.tasks.rewards.built_in import code
from rollout_server.tasks.rewards.built_in.code_inside import encoded
from rollout_server.tasks.rewards.built_in.code_values import Value, decoded
from rollout_server.tasks.sandbox.box import run
from rollout_server.tasks.sandbox.probe import isolation
from tests.rollout_server.reward_runs import sample

OPTIONS = Code(timeout_s=20.0, total_s=40.0).model_dump(exclude={"weight"})
MBPP_88 = (
    "import collections\ndef freq_count(list1):\n  freq_count= collections.Counter(list1)\n  return freq_count",
    [
        "assert freq_count([10,10,10,10,20,20,20,20,40,40,50,50,30])==({10: 4, 20: 4, 40: 2, 50: 2, 30: 1})",
        "assert freq_count([1,2,3,4,3,2,4,1,3,1,4])==({1:3, 2:2,3:3,4:3}) ",
    ],
)
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


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    if not isolation().is_whole:
        pytest.skip(f"this machine: {isolation()}")


def judged(program: str, truth: Any, **options: Any) -> dict[str, float]:
    return code.reward(sample(f"Here:\n```python\n{program}\n```\n", truth), **(OPTIONS | options))


def returning(values: list[str]) -> str:
    return f"{IMPORTS}def f(n):\n    return [" + ", ".join(f"lambda: {value}" for value in values) + "][n]()"


def test_the_reference_solution_of_mbpp_88_passes() -> None:
    assert judged(*MBPP_88)["score"] == 1.0


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


def test_identity_is_not_equality() -> None:
    assert judged("def f(): return 1", ["assert f() is True"])["score"] == 0.0
    assert judged("def f(): return True", ["assert f() is True"])["score"] == 1.0


def test_values_without_an_encoding_are_counted() -> None:
    for value in ("object()", "iter([1])", "[lambda: 1]", "(x := []).append(x) or x"):
        found = judged(f"def f(): return {value}", ["assert f() == 1"])
        assert (found["score"], found["not_encoded"]) == (0.0, 1.0), value


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
