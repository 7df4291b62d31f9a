"""Files that a scheduler starts a run from, and files that only their owner may read."""

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What a run is started from under a scheduler."""

    texts: dict[Path, str]
    command: str
    """What the user starts it with."""
    secrets: dict[Path, str] = field(default_factory=dict)

    def write(self) -> None:
        """Write all of them."""
        for path, text in self.texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path, text in self.secrets.items():
            write_private(path, text)


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, which appears whole. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
