"""Reward `code`: the program in the answer passes the tests of the ground truth, in a sandbox.

What counts is what the program prints, compared out here: a program that ends early, forges a result or replaces
`assert` gains nothing, because it never sees what is expected.

| ground truth (or JSON text of it)                    | a test                                              |
|------------------------------------------------------|-----------------------------------------------------|
| {"inputs": [], "outputs": []}, [{"input", "output"}] | stdin given, stdout compared (verl, LiveCodeBench)  |
| the same with "fn_name" (TACO, APPS, LiveCodeBench)  | the function called, its value compared             |
| ["assert f(1) == 2", ...] (MBPP)                     | the left side computed, compared with the right one |
| {"test": ..., "entry_point": ...} (HumanEval)        | the same of each assert in `check`                  |

Of asserts such as `abs(f(1) - 2.5) < 1e-6` the answer computes the calls, and a second run, without the answer, the
rest. Tests that do not come apart so (loops, variables, functions of their own) are run in the answer's own
interpreter, which it could fool on purpose.
"""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_server.tasks.rewards import RewardError, Sample
from rollout_server.tasks.rewards.built_in.code_tests import CaseResult, Checks, Test, read_tests
from rollout_server.tasks.sandbox import SandboxError
from rollout_server.tasks.sandbox.box import ResourceLimits, run
from rollout_server.tasks.sandbox.probe import isolation, require

FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
PYTHON = ("python", "py", "python3", "py3")
MAX_PROGRAM_CHARS = 100_000
INSIDE = Path(__file__).with_name("code_inside.py").read_text(encoding="utf-8")
TEST_OUTPUT, OUTPUT = 1024**2, 16 * 1024**2
"""Bytes of one test, and of all of an answer with what JSON adds."""


def prepare(allow_unisolated: bool) -> None:
    """Try what this machine can isolate, and say what it cannot. Raises RewardError: too little to run programs."""
    try:
        require(allow_unisolated=allow_unisolated, key="{code: {allow_unisolated: true}}")
    except SandboxError as error:
        raise RewardError(f"reward.function: 'code': {error}") from error


def reward(
    sample: Sample,
    partial: bool,
    timeout_s: float,
    total_s: float,
    wall_s: float,
    max_tests: int,
    memory_bytes: int,
    processes: int,
    allow_unisolated: bool,
) -> dict[str, float]:
    """`score` 1.0 where all tests pass, with `partial` the share that does.

    `timeout_s` and `total_s` are of the processor: a busy machine is no fault of a program.

    `passed` is the share among those that were run; `timed_out`, `crashed`, `flooded`, `ran_out_of_memory` and
    `not_encoded` (a value that no literal equals) are 1.0 where a test was, `forgeable` where the tests are run in the
    answer's own interpreter.

    Raises:
        ValueError: the ground truth holds no tests.
        RewardError: the sandbox could not be set up.
    """
    tests = read_tests(sample["ground_truth"], max_tests)
    program = program_of(sample["completion"])
    marks = dict.fromkeys(("timed_out", "crashed", "flooded", "ran_out_of_memory", "not_encoded"), 0.0)
    marks |= {"has_program": float(program is not None)}
    marks["forgeable"] = float(any(isinstance(test, Checks) and bool(test.whole) for test in tests))
    if program is None:
        return {"score": 0.0, "passed": 0.0, **marks}
    limits = {"cpu_s": timeout_s, "total_s": total_s, "wall_s": wall_s, "partial": partial}
    box = ResourceLimits(seconds=wall_s, memory_bytes=memory_bytes, processes=processes + 1, output_bytes=OUTPUT)
    passed = total = 0
    for test, result in zip(tests, _results(program, tests, limits, box), strict=True):
        of_test = test.passed(result)
        if isinstance(test, Checks):
            marks["not_encoded"] += any(value.kind == "not_encoded" for value in test.values(result))
            if rest := test.rest(result):
                of_test += rest.passed(_results("", [rest], limits, box)[0])
        if result.how != "ended" or result.code != 0:
            marks["crashed" if result.how == "ended" else result.how] = 1.0
        passed, total = passed + of_test, total + test.count
        if of_test < test.count and not partial:
            break
    share = passed / total
    return {"score": share if partial else float(share == 1.0), "passed": share, **marks}


def program_of(answer: str) -> str | None:
    """The last fenced block of Python, else the last of no named language; None without one."""
    blocks = _blocks(answer)
    named = [text for language, text in blocks if language in PYTHON]
    found = named or [text for language, text in blocks if not language]
    return found[-1] if found and found[-1].strip() and len(found[-1]) <= MAX_PROGRAM_CHARS else None


def _blocks(answer: str) -> list[tuple[str, str]]:
    """(language in lower case, text) of each fenced block that ends, as Markdown has them."""
    blocks: list[tuple[str, str]] = []
    fence, language, lines = "", "", list[str]()
    for line in (each.removesuffix("\r") for each in answer.split("\n")):
        found = FENCE.match(line)
        mark, info = found.groups() if found else ("", "")
        if not fence:
            if mark and not (mark[0] == "`" and "`" in info):  # else code within a line
                fence, language, lines = mark, (info.lower().split() or [""])[0], []
        elif mark.startswith(fence) and info[:1] in ("", " ", "\t"):  # with a name it would begin a block
            blocks.append((language, "".join(f"{each}\n" for each in lines)))
            fence = ""
        else:
            lines.append(line)
    return blocks


def _results(program: str, tests: Sequence[Test], limits: dict[str, Any], box: ResourceLimits) -> list[CaseResult]:
    """How the program went in each test; in those that were not begun as in the last one, or as it was ended."""
    files = {"main.py": INSIDE, "answer.py": program}
    order = {"tests": [test.order() for test in tests], "output_bytes": TEST_OUTPUT, **limits}
    try:
        ended = run(files, ["main.py"], json.dumps(order).encode(), box, isolated=isolation().is_whole)
    except SandboxError as error:
        raise RewardError(f"the sandbox could not be set up: {error}") from error
    found = list(
        itertools.takewhile(bool, map(_result, ended.out.decode("utf-8", "replace").split("\n")[: len(tests)]))
    )
    left = CaseResult("timed_out" if (ended.how, ended.code) == ("ended", 0) else ended.how, 1, "")
    return [one for one in found if one] + [left] * (len(tests) - len(found))


def _result(line: str) -> CaseResult | None:
    """From a line of code_inside.py, which the program may have written; None where it is none."""
    match _json(line):
        case [("ended" | "timed_out" | "flooded") as how, int(code), str(out)]:
            return CaseResult(how, code, out)
    return None


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
