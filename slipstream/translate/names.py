"""Names of other frameworks, from names.yaml: the key here, or why there is none. Used by translate and by refusals.

Accepting them would make two names for one thing; a suggestion by spelling misleads (`rollout.n` looks like
`rollout.sglang`). So a command line that refuses an unknown key looks it up here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.loading import read_yaml

TABLES: dict[str, Any] = read_yaml((Path(__file__).parent / "names.yaml").read_bytes())
FRAMEWORKS: tuple[str, ...] = tuple(TABLES["frameworks"])
ROWS: list[list[str | None]] = TABLES["keys"]
"""The key here, and its name, or the end of it, in each of FRAMEWORKS."""


def plain(name: str) -> str:
    """A name as a file would have it: options without their dashes."""
    return name.lstrip("-").replace("-", "_")


def _by_name(reasons: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names}


NO_COUNTERPART = _by_name(TABLES["no_counterpart"])
NOT_NEEDED = _by_name(TABLES["not_needed"])
WITHOUT = {**NO_COUNTERPART, **NOT_NEEDED}
"""Names without a key here, with the reason."""
BY_FRAMEWORK = {
    framework: {plain(name): str(row[0]) for row in ROWS if (name := row[number])}
    for number, framework in enumerate(FRAMEWORKS, start=1)
}
"""Names with a key here, of each framework alone."""
ALIASES = {name: key for keys in reversed(BY_FRAMEWORK.values()) for name, key in keys.items()}
"""The same of all; of two with one name the first framework's counts."""


def ends(name: str) -> Iterator[str]:
    """A name as a file would have it, whole and then without its first parts."""
    parts = plain(name).split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def target_of(name: str) -> str | None:
    """The key here for a foreign name or option, such as `--n-samples-per-prompt`; by its longest known end."""
    return next((ALIASES[end] for end in ends(name) if end in ALIASES), None)


def answer(name: str) -> str | None:
    """What to say about a foreign name, or None."""
    for end in ends(name):
        if end in ALIASES:
            return f"it is {ALIASES[end]} here"
        if end in WITHOUT:
            return WITHOUT[end]
    return None
