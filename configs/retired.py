"""Keys that are gone, with the value that they always have now: files of older runs hold them and still load."""

from collections.abc import Mapping
from typing import Any

UNKNOWN_MASK = (
    "truncates the sampling distribution, and the learner would not know the mask; take {key}={value}, which it always"
    " is, and shape the distribution by rollout.temperature"
)
BENCHMARK = "is of benchmarks alone; leave it out, and run python -m scripts.bench pipeline --median ... --sigma ..."
RETIRED: dict[str, tuple[Any, str]] = {
    "rollout.top_p": (1.0, UNKNOWN_MASK),
    "rollout.top_k": (-1, UNKNOWN_MASK),
    "rollout.forced_length_median": (0, BENCHMARK),
    "rollout.forced_length_sigma": (0.7, BENCHMARK),
    "algorithm.normalize_by_std": (True, "is algorithm.advantage now: 'grpo' divides by it, 'dr_grpo' does not"),
    "algorithm.max_prox_weight": (2.0, "is algorithm.correction_high now, with algorithm.correction: token_tis"),
    "algorithm.advantage_epsilon": (1e-4, "can no longer be chosen; leave it out, it is always {value}"),
}
"""By key: its value, and what is said about another one."""


def split(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The tree without retired keys; those that were left out; and what is wrong with those of another value."""
    kept: dict[str, Any] = dict(tree)
    gone: dict[str, Any] = {}
    for name, section in tree.items():
        if isinstance(section, Mapping):
            gone |= {f"{name}.{key}": value for key, value in section.items() if f"{name}.{key}" in RETIRED}
            kept[name] = {key: value for key, value in section.items() if f"{name}.{key}" not in RETIRED}
    problems = [
        f"{key}: {given!r} {reason.format(key=key.rpartition('.')[2], value=value)}"
        for key, given in gone.items()
        for value, reason in [RETIRED[key]]
        if given != value
    ]
    return kept, sorted(gone), problems
