"""What teachers say of a group's tokens, on its way from servers to rows. Pure, no torch.

Each answer token has a logprob of the teacher and, with algorithm.distillation's `k`, the teacher's own k likeliest ids
with theirs; all are 0 where a token is not in the loss. They stand by token, so they go wherever their tokens go.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.teachers import Scoring, Teacher
from replay.messages import Batch, Group

SLACK = 1e-3
"""How far a logprob, or the sum of the top ones' probabilities, may be above what it can be."""
SCORES = ("teacher_logprobs", "teacher_ids", "teacher_top")
TEACHER_ERROR = "teacher_error"
"""Reason of a group that is dropped because its teacher does not answer."""


def problem_with_scores(
    message: Group | Batch,
    answers: int,
    scoring: Scoring | None,
    vocab_size: int | None,
    newest_version: int | None = None,
) -> str | None:
    """What is wrong with the scores of so many answers, each with a name in `teachers`; else None."""
    if scoring is None:
        found = [name for name in ("teachers", *SCORES) if len(getattr(message, name))]
        return f"has {found[0]}, and rollout servers ask no teacher here" if found else None
    if len(message.teachers) != answers:
        return f"{len(message.teachers)} teachers for {answers} answers"
    left_out = message.left_out.tolist() if isinstance(message, Group) and message.left_out.size else [0] * answers
    if any(not told and not is_out for told, is_out in zip(message.teachers, left_out, strict=True)):
        return "an answer that is trained has no teacher"
    for told in set(message.teachers) - {""}:
        if (problem := _version_problem(told, scoring, newest_version)) is not None:
            return f"scored by {told[:80]!r}: {problem}"
    total = message.loss_mask.size
    for name, size in zip(SCORES, (total, total * scoring.k, total * scoring.k), strict=True):
        if len(getattr(message, name)) != size:
            return f"{name} has {len(getattr(message, name))} entries, {size} are expected for {total} tokens"
    return _value_problem(message, scoring.k, vocab_size)


def _version_problem(told: str, scoring: Scoring, newest_version: int | None) -> str | None:
    """Why no teacher of the run can have said so, with the versions that there are."""
    name, _, version = told.rpartition("@")
    if name not in scoring.teachers or not re.fullmatch(r"\d{1,18}", version):
        return f"the teachers are {', '.join(scoring.names)}, and a version follows: NAME@VERSION"
    if newest_version is not None and int(version) > newest_version:
        return f"the policy's newest version is {newest_version}"
    return unlike(scoring.teachers[name], name, int(version))


def unlike(teacher: Teacher, name: str, version: int) -> str | None:
    """Why a teacher cannot have this version; None where it can."""
    if teacher.kind in ("path", "url") and version:
        return "it stays as it is, at version 0"
    if teacher.is_refreshed and version % teacher.every:
        return f"its versions are multiples of {teacher.every} (teachers.{name}.every)"
    return None


def _value_problem(message: Group | Batch, k: int, vocab_size: int | None) -> str | None:
    logprobs, ids, top = (getattr(message, name) for name in SCORES)
    owners = _owners(message) if isinstance(message, Group) else range(message.lengths.size)
    is_scored = np.array([bool(message.teachers[owner]) for owner in owners], np.bool_)
    outside = (message.loss_mask == 0) | ~np.repeat(is_scored, message.lengths)
    for name, values in (("teacher_logprobs", logprobs), ("teacher_top", top)):
        if not values.size:
            continue
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"{name} holds one that is not finite"
        if high > SLACK:
            return f"{name} holds one above 0 ({high:.3g})"
        # replay may have taken tokens of a batch out of the loss since: over-age ones, answers that were cut
        if isinstance(message, Group) and values.reshape(len(outside), -1)[outside].any():
            return f"{name} is not 0 for a token that is not scored"
    if not ids.size:
        return None
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        return f"teacher_ids are {ids.min()} to {ids.max()}, of a vocabulary of {vocab_size}"
    whole = np.exp(top.reshape(-1, k)[~outside].astype(np.float64)).sum(1).max(initial=0)
    return f"a token's top {k} have probability {whole:.4g} together" if whole > 1 + SLACK else None


def kept(group: Group, stays: NDArray[np.bool_], tokens: NDArray[np.bool_]) -> dict[str, Any]:
    """Fields of a group that keeps these of its answers, and so these of its tokens, alone."""
    if not group.teachers:
        return {}
    names = [name for name, is_kept in zip(group.teachers, stays.tolist(), strict=True) if is_kept]
    return {"teachers": names} | {name: _by_token(group, name)[tokens].ravel() for name in SCORES}


def _by_token(group: Group, name: str) -> NDArray[Any]:
    return getattr(group, name).reshape(group.loss_mask.size, -1)  # type: ignore[no-any-return]


def of_samples(samples: Sequence[tuple[Group, int, slice]]) -> dict[str, Any]:
    """Fields of Batch, of samples by their groups, numbers and tokens there."""
    if not any(group.teachers for group, _, _ in samples):
        return {}
    owners = {id(group): _owners(group) for group, _, _ in samples}
    found: dict[str, Any] = {"teachers": [group.teachers[owners[id(group)][number]] for group, number, _ in samples]}
    for name in SCORES:
        found[name] = np.concatenate([_by_token(group, name)[tokens].ravel() for group, _, tokens in samples])
    return found


def _owners(group: Group) -> list[int]:
    """The trajectory of each sample."""
    if not group.samples.size:
        return list(range(group.rewards.size))
    return [number for number, count in enumerate(group.samples.tolist()) for _ in range(count)]


def stats(step: int, groups: Sequence[Group], teachers: Mapping[str, Teacher]) -> dict[str, float]:
    """Of a batch: share of each teacher in its trajectories, and steps that a refreshed one is behind."""
    told = Counter(one for group in groups for one in group.teachers)
    found = dict[str, float]()
    for name, teacher in teachers.items():
        own = {int(one.rpartition("@")[2]): count for one, count in told.items() if one.rpartition("@")[0] == name}
        found[f"distill/share/{name}"] = sum(own.values()) / max(1, told.total())
        if own and (teacher.is_refreshed or teacher.kind == "policy"):
            behind = sum((step - 1 - version) * count for version, count in own.items())
            found[f"distill/version_lag/{name}"] = behind / sum(own.values())
    return found
