"""Log lines of what may happen without end: nobody fills the disk with our log."""

import logging
from collections import Counter

LOUD = 100
"""So many lines of one kind are all logged, then every so many-th."""


class BoundedLog:
    """Counts lines by kind, and passes some on."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, kind: str, text: str, *values: object, symptom: str = "") -> None:
        """Log one line of a kind, with its number and the class of the symptom."""
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= LOUD or count % LOUD == 0:
            self._log.warning(f"{text} (no. %d)%s", *values, count, f" [{symptom}]" if symptom else "")
