r"""Reward `math`: what stands in the last `\boxed{}` is mathematically the ground truth (package math-verify).

The policy writes what is parsed here. Only LaTeX is parsed: math-verify's other way, through sympy's parse_expr, would
evaluate Python. Numbers that would take all memory to compute are refused before, and the rest is compared in a process
that is killed after a while; both score 0 and count in `gave_up`.
"""

import functools
import logging
import os
import re
import select
import signal
from collections.abc import Callable
from typing import Any

from rollout_server.tasks.rewards import RewardError, Sample
from rollout_server.tasks.rewards.built_in.numeric import BOXED, MARKER, final_number, inside
from rollout_server.tasks.rewards.built_in.texts import truth_of

MAX_CHARS = 600
"""Of an answer's box; what is longer is no final answer."""
SAME, OTHER = 0, 1
"""Exit codes of a comparison."""
HUGE = re.compile(
    # an exponent of 6 digits, a power in an exponent, a factorial of 5 digits, or one of a factorial
    r"(?:\^|\*\*)\s*[{(\s]*[-+]?[\d,]{6,}|(?:\^|\*\*)\s*(?:[{(][^{}()]*|\d+\s*)(?:\^|\*\*)|\d{5,}\s*[})]*\s*!|!\s*[})]*\s*!"
)
SPACING = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\\d?t?ext(?:bf|it|rm)?(?=\{)|\\math(?:rm|bf)(?=\{)|[\s$]+")
WORD = re.compile(r"[A-Za-z]{3,}")
SENTENCE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def reward(sample: Sample, boxed: bool = True, seconds: float = 3.0) -> dict[str, float]:
    """`score` 1.0 for the same value; `has_answer` 1.0 where there is one, `gave_up` 1.0 where it was not compared.

    Raises:
        ValueError: the row has no ground truth that is text or a number.
        RewardError: math-verify is not installed.
    """
    truth = truth_of(sample, "the reward 'math'")
    wanted, found = _final(truth, boxed=False) or truth, _final(sample["completion"], boxed=boxed)
    score = gave_up = False
    if found is None or _plain(found) == _plain(wanted):
        score = found is not None
    elif WORD.fullmatch(_plain(wanted)):  # as a formula it would be a product of letters, in any order
        pass
    elif len(found) > MAX_CHARS or HUGE.search(found):
        gave_up = True
    else:
        _truth(wanted)  # once for all answers of its group
        code = judged_apart(lambda: _equal(wanted, found), seconds)
        score, gave_up = code == SAME, code not in (SAME, OTHER)
    return {"score": float(score), "has_answer": float(found is not None), "gave_up": float(gave_up)}


def _final(text: str, *, boxed: bool) -> str | None:
    """The last box; where none is asked for, else the line after `####`, the last formula or the last number."""
    box = text.rfind(BOXED)
    if box >= 0:
        return inside(text, box + len(BOXED)).strip() or None
    if boxed:
        return None
    marker = text.rfind(MARKER)
    if marker >= 0:
        return text[marker + len(MARKER) :].strip().partition("\n")[0] or None
    formulas = FORMULA.findall(text[-4 * MAX_CHARS :])
    if formulas:
        return next(filter(None, formulas[-1])).strip() or None
    if len(text) <= MAX_CHARS and "\n" not in text.strip() and not SENTENCE.search(text):
        return text.strip(" $") or None
    number = final_number(text)
    return None if number is None else str(number)


def _plain(text: str) -> str:
    """The text without spacing, fonts and the braces of words: `\\text{ (B) }` and `(B)` are one."""
    bare = SPACING.sub("", text).removesuffix(".")
    return bare[1:-1] if bare.startswith("{") and bare.endswith("}") and bare.count("{") == 1 else bare


def judged_apart(is_equal: Callable[[], bool], seconds: float) -> int:
    """SAME, OTHER or the code of a process that failed: it compares, and is killed when its time is over.

    Nothing else stops it for sure: sympy catches exceptions, and large numbers are computed in C.
    """
    child = os.fork()
    if child == 0:
        code = -1
        try:
            code = SAME if is_equal() else OTHER
        finally:
            os._exit(code)
    ending = select.poll()
    ending.register(end := os.pidfd_open(child), select.POLLIN)
    if not ending.poll(1000 * seconds):
        os.kill(child, signal.SIGKILL)
    os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _equal(wanted: str, found: str) -> bool:
    from math_verify import verify

    parsed = _parsed(found)
    return bool(parsed) and bool(verify(_truth(wanted), parsed, allow_set_relation_comp=True, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _truth(text: str) -> list[Any]:
    return _parsed(text)


def _parsed(text: str) -> list[Any]:
    """[expression, text] of a formula, or an empty list."""
    math_verify = library()
    targets = [math_verify.LatexExtractionConfig()]
    found: list[Any] = math_verify.parse("$" + text.replace("$", " ") + "$", targets, parsing_timeout=None)
    return found


@functools.cache
def library(needed_by: str = "'math'") -> Any:
    """math-verify. Raises RewardError: not installed."""
    try:
        import math_verify
    except ImportError as error:
        raise RewardError(
            f"reward.function: {needed_by} needs math-verify, which is not installed; install the extra: pip install"
            " 'slipstream-rl[math]'"
        ) from error
    for name in ("math_verify", "latex2sympy2_extended"):  # they warn of every answer that is no formula
        logging.getLogger(name).setLevel(logging.ERROR)
    return math_verify


def prepare() -> None:
    """Load math-verify, which takes a second. Raises RewardError: not installed."""
    library()
