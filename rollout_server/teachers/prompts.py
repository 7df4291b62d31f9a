"""Which teacher a row is for, and what its prompt says that the policy's does not. Pure."""

from collections.abc import Mapping
from typing import Any

from configs.teachers import Scoring, Teacher
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.teachers import TeacherError


def columns_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What `rows` and `context` of a teacher may name."""
    given = {name: row[name] for name in ("data_source", "ground_truth") if name in row}
    return {**(row.get("extra_info") or {}), **(row.get("columns") or {}), **given}


def teacher_of(scoring: Scoring, row: Mapping[str, Any]) -> str:
    """Name of the first teacher that takes the row. Raises TeacherError: none does."""
    columns = columns_of(row)
    for name, teacher in scoring.teachers.items():
        if teacher.takes(columns):
            return name
    wanted = sorted({key for teacher in scoring.teachers.values() for key in teacher.rows})
    has = ", ".join(f"{key} {columns.get(key)!r}" for key in wanted)
    raise TeacherError(
        f"teachers: none of {', '.join(scoring.names)} takes the row {str(row['prompt'])[:80]!r} with {has}; give a"
        " last one without `rows`, or leave such rows out of data.train"
    )


def with_context(name: str, teacher: Teacher, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as the teacher's prompt has it: its context in the place of the last user message.

    Raises LeaseFailed: a column is missing, there is no user message, or there are pictures.
    """
    if row.get("images"):
        raise LeaseFailed("prompt_not_rendered", f"teachers.{name}: pictures are not scored; leave such rows out")
    if teacher.context is None:
        return dict(row)
    prompt, columns = row["prompt"], columns_of(row)
    if missing := [column for column in teacher.context_columns if columns.get(column) is None]:
        known = ", ".join(sorted(columns))
        said = f"teachers.{name}.context: the row {str(prompt)[:80]!r} has no {missing[0]!r}; it has {known}"
        raise LeaseFailed("prompt_not_rendered", said)
    if isinstance(prompt, str):
        return {**row, "prompt": teacher.context.format_map({**columns, "prompt": prompt})}
    place = max((n for n, message in enumerate(prompt) if message.get("role") == "user"), default=None)
    if place is None or not isinstance(prompt[place].get("content"), str):
        said = f"teachers.{name}.context: {str(prompt)[:80]!r} has no user message of text to put it into"
        raise LeaseFailed("prompt_not_rendered", said)
    message = {**prompt[place], "content": teacher.context.format_map({**columns, "prompt": prompt[place]["content"]})}
    return {**row, "prompt": [*prompt[:place], message, *prompt[place + 1 :]]}
