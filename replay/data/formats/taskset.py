"""Tasks of a verifiers taskset (extra `verifiers`): `verifiers:ID?split=train&skip=256`, for that environment.

Each row has a prompt and, in the column `task`, the whole task, so that environment.function `verifiers` plays it and
loads nothing twice. The options `skip` and `rows` (10,000) choose tasks; all others are the taskset's own settings.
"""

import itertools
from hashlib import blake2b
from typing import Any

import yaml

from replay.data.formats.base import Raw, Table
from replay.data.rows import DataError, RowLocation
from replay.data.spec import Spec

UNUSABLE = (ImportError, AttributeError, TypeError, ValueError, OSError, yaml.YAMLError)


class Tasks(Table):
    """Tasks of an installed taskset, in memory."""

    form = "a taskset of verifiers"

    def __init__(self, spec: Spec) -> None:
        """Load the taskset. Raises DataError: the package or the taskset is missing, or it has no such task."""
        super().__init__(spec.text)
        options = dict(spec.options)
        first, most = options.pop("skip", 0), options.pop("rows", 10_000)
        try:
            import verifiers.v1 as vf

            config = vf.taskset_config_type(spec.name).model_validate({**options, "id": spec.name})
            chosen = itertools.islice(iter(vf.load_taskset(config)), first, first + most)
            self._rows = [_row_of(task) for task in chosen]
        except UNUSABLE as error:
            mend = " (extra `verifiers`)" if str(getattr(error, "name", "")).startswith("verifiers") else ""
            raise DataError(f"{spec.text}: {type(error).__name__}: {error}{mend}") from error
        if not self._rows:
            raise DataError(f"{spec.text}: the taskset has no task left; lower skip")

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, number: int) -> Raw:
        return RowLocation(self.source, number + 1, "verifiers"), self._rows[number]

    def fingerprint(self) -> str:
        return blake2b(repr(self._rows).encode(), digest_size=16).hexdigest()


def _row_of(task: Any) -> dict[str, Any]:
    """A task as a row. The prompt is what a policy sees first, as messages of text."""
    data = task.data.model_dump(mode="json", exclude_none=True)
    messages = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
    first = data.get("prompt") or data.get("name") or "(the environment begins)"
    if isinstance(first, str):
        first = [{"role": "user", "content": first}]
    messages += [{"role": one["role"], "content": str(one.get("content") or "")} for one in first]
    return {"prompt": messages, "task": data}
