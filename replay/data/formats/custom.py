"""A dataset of your own: `path/to/file.py:name?option=value`, a function that returns the rows, or a class of them.

A list will do; what else it makes has `__getitem__`, and `__len__` unless its rows have no end. Rows are mappings in
any of the column conventions. It runs in the processes that read data: the launcher, replay and, for evaluation sets,
the learner.
"""

import inspect
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from configs.errors import kind_of
from replay.data.formats.base import ENDLESS, WHOLE_ROWS, Raw, Table
from replay.data.rows import DataError, RowError, RowLocation
from replay.data.spec import Spec
from slipstream.runtime.loading import function_of
from slipstream.runtime.variants import checked

FORM = "return a list of rows, or an object with `__getitem__(number)` and `__len__()`"


class Custom(Table):
    """Rows of a user's function or class, made anew in each process."""

    def __init__(self, spec: Spec) -> None:
        """Load and construct it. Raises DataError: not found, not importable, or of another form."""
        super().__init__(spec.text)
        location, _, name = spec.name.rpartition(":")
        _, made = function_of(spec.text, spec.name, DataError)
        self._file, self._label = Path(location).expanduser(), name
        self.form = f"{'class' if isinstance(made, type) else 'function'} {name}"
        takes = inspect.signature(made).parameters.values()
        names = [one.name for one in takes if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        is_open = any(one.kind is one.VAR_KEYWORD for one in takes)
        known = {key: value for key, value in spec.options.items() if key in names or not is_open}
        options = spec.options | checked(spec.text, spec.name, made, known, names, DataError)
        self._made = _guarded(spec.text, f"{name}({', '.join(options)})", lambda: made(**options))
        if not hasattr(self._made, "__getitem__"):
            raise DataError(f"{self.source}: {name} gives {kind_of(self._made)} without __getitem__; {FORM}")
        self._size = ENDLESS
        if hasattr(self._made, "__len__"):
            self._size = int(_guarded(self.source, "__len__", lambda: len(self._made)))
        self.is_whole = self._size <= WHOLE_ROWS

    def __len__(self) -> int:
        return self._size

    def raw(self, number: int) -> Raw:
        place = RowLocation(self.source, number + 1, self._label)
        try:
            row = self._made[number]
        except Exception as error:  # code of the user: whatever it raises, this row is named
            raise RowError(f"{self.source}: row {place.row}: {type(error).__name__}: {error}") from error
        if not isinstance(row, Mapping):
            raise RowError(f"{self.source}: row {place.row}: expected a mapping, found {kind_of(row)}")
        return place, row

    def fingerprint(self) -> str:
        """Its own `fingerprint`, text that changes with its rows, where it has one; else that of its code."""
        own = getattr(self._made, "fingerprint", None)
        said = self._file.read_bytes() + self.source.encode()
        if own is not None:
            said = str(own() if callable(own) else own).encode()
        return blake2b(said, digest_size=16).hexdigest()


def _guarded(source: str, what: str, call: Any) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:  # code of the user: whatever it raises, the run does not begin
        raise DataError(f"{source}: {what} fails: {type(error).__name__}: {error}") from error
