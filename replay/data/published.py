r"""Data sets as their authors publish them: the answer in MATH's solutions, prompt and tests of MBPP's tasks."""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(solution: str) -> str | None:
    r"""What the last \boxed{...} holds, braces within included, or the word after `\boxed `; None without one."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] or None
    depth = 0
    for position, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[1:position].strip() or None
    return None


def asserts_of(task: Mapping[str, Any]) -> list[str]:
    """The asserts of an MBPP task; empty where they are no list of texts."""
    tests = task.get("test_list")
    listed = list(tests) if isinstance(tests, (list, tuple, np.ndarray)) else []
    return listed if all(isinstance(test, str) for test in listed) else []


def with_first_test(question: str, task: Mapping[str, Any]) -> str:
    """An MBPP task as a prompt: the first assert tells the name of the function."""
    return f"{question.strip()}\nYour code has to pass this test:\n{asserts_of(task)[0]}"


def tests_of(task: Mapping[str, Any]) -> str:
    """What the reward `code` runs: a JSON list of imports and asserts."""
    setup = task.get("test_imports", task.get("test_setup_code"))
    lines = setup.splitlines() if isinstance(setup, str) else list(setup if setup is not None else [])
    return json.dumps([*(line for line in lines if line.strip()), *asserts_of(task)])
