"""Reward `regex`: a regular expression is found in the answer, or what it finds is the ground truth."""

import functools

import regex

from rollout_server.tasks.rewards import Sample

TIMEOUT_S = 1.0
"""An expression may take exponential time on an answer that was made for it: then it has not matched."""
GROUP = "answer"


def reward(sample: Sample, pattern: str, whole: bool = False) -> dict[str, float]:
    """`score` 1.0 for a match; with a group `answer`, where the last match's group is the ground truth, without space
    around it. `gave_up` is 1.0 where the expression took more than a second.

    Raises:
        ValueError: the expression has a group `answer`, and the row has no ground truth that is text or a number.
    """
    expression = _compiled(pattern)
    wanted = None
    if GROUP in expression.groupindex:
        truth = sample["ground_truth"]
        if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
            raise ValueError(f"ground_truth is {truth!r}; a regex with a group 'answer' needs text or a number")
        wanted = str(truth).strip()
    try:
        return {"score": _score(expression, sample["completion"], wanted, whole), "gave_up": 0.0}
    except TimeoutError:
        return {"score": 0.0, "gave_up": 1.0}


def _score(expression: "regex.Pattern[str]", text: str, wanted: str | None, whole: bool) -> float:
    """Raises TimeoutError."""
    if whole:
        last = expression.fullmatch(text, timeout=TIMEOUT_S)
    elif wanted is None:
        last = expression.search(text, timeout=TIMEOUT_S)
    else:
        last = None
        for last in expression.finditer(text, timeout=TIMEOUT_S):  # noqa: B007 - the last one is wanted
            pass
    if last is None or wanted is None:
        return float(last is not None)
    return float((last[GROUP] or "").strip() == wanted)


@functools.cache
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)
