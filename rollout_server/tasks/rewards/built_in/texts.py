"""The rewards `exact`, `environment`, `format`, `length` and `regex`: what an answer says, letter by letter."""

import functools
from collections.abc import Sequence
from typing import Any

from rollout_server.tasks.rewards import Sample

TIMEOUT_S = 1.0
"""A regular expression may take exponential time on an answer that was made for it: then it has not matched."""
GROUP = "answer"


def truth_of(sample: Sample, asking: str) -> str:
    """The ground truth as text, numbers as Python writes them. Raises ValueError: it is neither, or is empty."""
    truth = sample["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)) or not str(truth).strip():
        raise ValueError(f"ground_truth is {truth!r}; {asking} needs text or a number in every row")
    return str(truth)


def exact(sample: Sample) -> float:
    """1.0 for the text of the ground truth with finish reason `stop`, else 0.0.

    Raises ValueError: the row has no ground truth that is text or a number.
    """
    truth = truth_of(sample, "the reward 'exact'")
    return float(sample["finish_reason"] == "stop" and sample["completion"] == truth)


def environment(sample: Sample) -> float:
    """Raises ValueError: asked only where environment.function gave no reward, so that its episode has failed."""
    raise ValueError(
        "environment.function gave no reward, and reward.function is 'environment'; return one, or name a function"
    )


def form(sample: Sample, tags: Sequence[str], opened: bool = False) -> float:
    """1.0 for `<a>...</a> <b>...</b>` with each tag once, in order, none empty, and only white space around them."""
    text = f"<{tags[0]}>{sample['completion']}" if opened else sample["completion"]
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(text.count(mark) != 1 for mark in marks):
        return 0.0
    position, inside = 0, False
    for mark in marks:
        start = text.find(mark, position)
        if start < 0 or inside != bool(text[position:start].strip()):
            return 0.0
        position, inside = start + len(mark), not inside
    return float(not text[position:].strip())


def length(sample: Sample, max_tokens: int, min_tokens: int = 0, buffer: int = 0) -> float:
    """0.0 between the two, else down to -1.0; the stop token counts.

    Past max_tokens the cost is that of DAPO (2503.14476, equation 13), with the buffer above the limit and not below.
    """
    num = sample["num_tokens"]
    if num < min_tokens:
        return num / min_tokens - 1.0
    return -min(1.0, max(0, num - max_tokens) / buffer) if buffer else -float(num > max_tokens)


def pattern(sample: Sample, pattern: str, whole: bool = False) -> dict[str, float]:
    """`score` 1.0 for a match; with a group `answer`, where the last match's group is the ground truth, without space
    around it. `gave_up` is 1.0 where the expression took more than a second.

    Raises ValueError: the expression has a group `answer`, and the row has no ground truth that is text or a number.
    """
    expression = _compiled(pattern)
    wanted = truth_of(sample, "a regex with a group 'answer'").strip() if GROUP in expression.groupindex else None
    text, last = sample["completion"], None
    try:
        if whole:
            last = expression.fullmatch(text, timeout=TIMEOUT_S)
        elif wanted is None:
            last = expression.search(text, timeout=TIMEOUT_S)
        else:
            for last in expression.finditer(text, timeout=TIMEOUT_S):  # noqa: B007 - the last one is wanted
                pass
    except TimeoutError:
        return {"score": 0.0, "gave_up": 1.0}
    fits = last is not None and (wanted is None or (last[GROUP] or "").strip() == wanted)
    return {"score": float(fits), "gave_up": 0.0}


@functools.cache
def _compiled(pattern: str) -> Any:
    import regex  # here, because no other reward needs it

    return regex.compile(pattern)
