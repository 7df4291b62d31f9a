"""Log lines of what may happen without end, so that they do not fill the disk."""

import logging
from collections import Counter

LOUD = 100
"""So many lines of one kind are all logged, then every so many-th."""


class BoundedLog:
    """Counts lines by kind, and passes some on."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, kind: str, text: str, *values: object) -> None:
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= LOUD:
            self._log.warning(text, *values)
        elif count % LOUD == 0:
            self._log.warning(f"{text} (no. %d)", *values, count)
