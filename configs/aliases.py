"""Names of other frameworks, answered with the key here: verl, slime, prime-rl, AReaL and TRL.

Accepting them would make two names for one thing; a suggestion by spelling misleads (`rollout.n` looks like
`rollout.sglang`). So an unknown key is looked up here first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.translate.tables import FRAMEWORKS, ROWS, WITHOUT

VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Parameters of a reward function of verl."""
SIGNATURES = (
    "take `async def reward(sample)`, `compute_score(data_source, solution_str, ground_truth, extra_info=None)` or"
    " `f(prompts, completions, **columns)`"
)
"""What a reward function of another form is answered."""


def plain(name: str) -> str:
    """A name as a file would have it: options without their dashes."""
    return name.lstrip("-").replace("-", "_")


ALIASES = {plain(name): key for key, *names in ROWS for name in names if name != "-"}
BY_FRAMEWORK = {
    framework: {plain(row[number]): row[0] for row in ROWS if row[number] != "-"}
    for number, framework in enumerate(FRAMEWORKS, start=1)
}
"""The same of each framework alone."""


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


def answers(name: str, value: Any) -> Iterator[tuple[str, Any, str | None]]:
    """(dotted name, value, answer) of an unknown key, or of each leaf below it."""
    if isinstance(value, Mapping) and value and answer(name) is None:
        for key, item in value.items():
            yield from answers(f"{name}.{key}", item)
    else:
        yield name, value, answer(name)


def ends(name: str) -> Iterator[str]:
    """A name as a file would have it, whole and then without its first parts."""
    parts = plain(name).split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))
