r"""Reward `numeric`: the final number of the answer equals the ground truth, as in GSM8K.

The number after the last `####` or in the last `\boxed{}` is taken, whichever stands later; without either, the
last number of the text. Thousands separators, currency signs, percent signs and units are ignored; fractions
(`3/4`, `\frac{3}{4}`) and decimals are compared as exact rationals. Text is only ever matched, never evaluated.
"""

import re
from collections import deque
from fractions import Fraction

from rollout_server.tasks.rewards import Sample

MAX_DIGITS = 100
"""Longer numbers count as none: a policy must not be able to buy grading time with digits."""
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
NUMBER = re.compile(
    # A minus after a word or a bracket is a subtraction or a hyphen, not a sign.
    rf"(?P<sign>(?<![\w)\]}}])[-−+])?(?:\\?[$€£¥]\s?(?P<inner>[-−])?)?(?P<number>{DIGITS})"
    rf"(?P<exponent>[eE][-+]?[0-9]{{1,2}}(?!\w))?(?:\s?/\s?(?P<divisor>{DIGITS}))?"
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{\s*([-−]?[0-9.,]+)\s*\}\{\s*([0-9.,]+)\s*\}")
NO_NUMBER = re.compile(r"\\(?:sqrt|pi|log|ln|sin|cos|tan|times|cdot|pm|infty|in|cup|cap)(?![a-z])|[√π∞^]")
"""In a marked answer: its last number is not its value."""
BOXED = "\\boxed{"
MARKER = "####"


def reward(sample: Sample, tolerance: float = 0.0) -> dict[str, float]:
    """`score` 1.0 when the numbers are equal; `has_number` 1.0 when the answer holds one.

    With a tolerance, equal is |found - truth| <= tolerance * max(1, |truth|), computed exactly.

    Raises:
        ValueError: the ground truth is no number.
    """
    truth = sample["ground_truth"]
    wanted = None
    if isinstance(truth, (str, int, float)) and not isinstance(truth, bool):
        wanted = None if NO_NUMBER.search(_marked(str(truth))) else final_number(str(truth))
    if wanted is None:
        raise ValueError(f"ground_truth {truth!r} is no number; the reward 'numeric' needs one in every row")
    found = final_number(sample["completion"])
    score = found is not None and abs(found - wanted) <= Fraction(tolerance) * max(Fraction(1), abs(wanted))
    return {"score": float(score), "has_number": float(found is not None)}


def final_number(text: str) -> Fraction | None:
    """The number that a text ends on, by the module's rules; None where what it marks as its answer has no value."""
    text = LATEX_FRACTION.sub(r"\1/\2", text)
    marked = _marked(text)
    if marked is not text and NO_NUMBER.search(marked):
        return None
    number = _value(NUMBER.search(marked)) if _is_line(text) else _last(marked)
    return number if number is not None else _last(text)


def _is_line(text: str) -> bool:
    """Whether the line after the last `####` counts."""
    return text.rfind(MARKER) > text.rfind(BOXED)


def _marked(text: str) -> str:
    """The line after the last `####` or the content of the last box; without either the text itself."""
    if _is_line(text):
        return text[text.rfind(MARKER) + len(MARKER) :].lstrip().partition("\n")[0]
    box = text.rfind(BOXED)
    return inside(text, box + len(BOXED)) if box >= 0 else text


def inside(text: str, start: int) -> str:
    """The text from `start` to the brace that closes the one before it."""
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return text[start:]


def _last(text: str) -> Fraction | None:
    last = deque(NUMBER.finditer(text), maxlen=1)
    return _value(last[0] if last else None)


def _value(match: re.Match[str] | None) -> Fraction | None:
    if match is None or len(match["number"]) > MAX_DIGITS or len(match["divisor"] or "") > MAX_DIGITS:
        return None
    value = Fraction(match["number"].replace(",", "") + (match["exponent"] or ""))
    if match["divisor"]:
        divisor = Fraction(match["divisor"].replace(",", ""))
        if divisor == 0:
            return None
        value /= divisor
    negative = (match["sign"] in ("-", "−")) != (match["inner"] is not None)
    return -value if negative else value
