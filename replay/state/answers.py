"""Answers that failed: which of a group are trained, how many there were, and whether they are too many. Pure."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from replay import routing, scores
from replay.batches.build import samples_of
from replay.messages import EvaluationResult, Group

ERRORS = ("reward_error", "environment_error")
"""Codes of what fails one answer or episode, and leaves its group and its evaluation whole."""
PROMPT_ERRORS = ("prompt_too_long", "prompt_not_rendered")
"""Codes of a prompt that cannot be asked: dropped where it is leased, an evaluation goes on without it."""
WINDOW = 512
"""Answers over which the share of failed ones is taken."""


def kept(group: Group) -> Group:
    """The group as it is trained: as if the answers that are left out had never been asked for."""
    if not group.left_out.any():
        return group
    stays = group.left_out == 0
    samples = np.repeat(stays, samples_of(group))
    tokens, own = np.repeat(samples, group.lengths), group.prompt_lengths
    changed: dict[str, Any] = {
        name: [value for value, is_kept in zip(getattr(group, name), stays.tolist(), strict=True) if is_kept]
        for name in ("finish_reasons", "errors")
    }
    changed |= {name: getattr(group, name)[tokens] for name in ("token_ids", "loss_mask", "logprobs", "versions")}
    if own.size:
        changed |= {"prompt_ids": group.prompt_ids[np.repeat(samples, own)], "prompt_lengths": own[samples]}
    if group.samples.size:
        changed["samples"] = group.samples[stays]
    changed |= routing.kept(group, samples) | scores.kept(group, stays, tokens)
    rewards, lengths = group.rewards[stays], group.lengths[samples]
    return replace(group, rewards=rewards, lengths=lengths, left_out=group.left_out[:0], **changed)


def counts_of(group: Group) -> dict[str, Any]:
    """What is written down of a group's answers: [answers, tokens] that are kept and left out, and errors by code."""
    whole = [group.rewards.size, int(group.lengths.sum(dtype=np.int64))]
    trained = kept(group)
    stays = [trained.rewards.size, int(trained.lengths.sum(dtype=np.int64))]
    errors = Counter(code for code in group.errors if code)
    return {"kept": stays, "left_out": [whole[0] - stays[0], whole[1] - stays[1]], "errors": dict(errors)}


def count(counters: Counter[str], counted: Mapping[str, Any]) -> None:
    """Add `counts_of` a group to a run's counters."""
    for name in ("kept", "left_out"):
        if name in counted:
            answers, tokens = counted[name]
            counters[f"answers_{name}"] += answers
            counters[f"tokens_{name}"] += tokens
    for code, number in counted.get("errors", {}).items():
        counters[f"answers_failed/{code}"] += number


def measured(counters: Mapping[str, int]) -> dict[str, float]:
    """Of the run so far: failed answers by code, those left out, and mean lengths of these and of the others."""
    found = {f"answers/failed/{code}": float(counters.get(f"answers_failed/{code}", 0)) for code in ERRORS}
    num_kept, left_out = counters.get("answers_kept", 0), counters.get("answers_left_out", 0)
    found["answers/left_out"] = float(left_out)
    if num_kept:
        found["answers/kept_length"] = counters["tokens_kept"] / num_kept
    if left_out:
        found["answers/left_out_length"] = counters["tokens_left_out"] / left_out
    return found


class ErrorRate:
    """Share of answers that failed for one reason among the last WINDOW of them, in groups."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._groups: deque[tuple[int, int]] = deque()
        """Answers of each group, and how many of them failed."""
        self.answers = self.failed = 0

    def add(self, answers: int, failed: int) -> None:
        """Count a group; the oldest ones leave the window."""
        self._groups.append((answers, failed))
        self.answers, self.failed = self.answers + answers, self.failed + failed
        while self.answers - self._groups[0][0] >= WINDOW:
            old, old_failed = self._groups.popleft()
            self.answers, self.failed = self.answers - old, self.failed - old_failed

    @property
    def share(self) -> float:
        """Of the answers in the window; 0 before the first."""
        return self.failed / max(1, self.answers)

    @property
    def is_too_high(self) -> bool:
        """Whether the limit is passed. A window that is not full says nothing yet, unless no error is allowed."""
        return self.share > self.limit and (self.answers >= WINDOW or self.limit == 0)


def problem_with_errors(message: Group | EvaluationResult, answers: int) -> str | None:
    """What is wrong with the errors of a message about so many answers, or None."""
    if message.errors and len(message.errors) != answers:
        return f"{len(message.errors)} errors for {answers} answers"
    if message.left_out.size not in (0, answers) or message.left_out.max(initial=0) > 1:
        return f"left_out has {message.left_out.size} entries, or others than 0 and 1, for {answers} answers"
    known = ERRORS if isinstance(message, Group) else ERRORS + PROMPT_ERRORS
    if strange := set(message.errors) - {"", *known}:
        return f"an unknown error {min(strange)[:40]!r}"
    if any(is_out and not code for code, is_out in zip(message.errors, message.left_out.tolist(), strict=False)):
        return "an answer is left out that has not failed"
    return "an answer is left out, and no error is named" if message.left_out.any() and not message.errors else None
