"""Every metric by name: unit, source, condition and meaning, from catalogue.yaml."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).with_suffix(".yaml")
VARIABLE = re.compile(r"<([^>]*)>")


@dataclass(frozen=True, slots=True)
class Metric:
    """One name, or a pattern of names such as `rollout/groups/<server>`."""

    section: str
    name: str
    unit: str
    source: str
    when: str
    """Empty where every run has it in every step."""
    meaning: str

    def variables(self, name: str) -> dict[str, str] | None:
        """Variable parts of a name of this pattern, {} where there are none; None where the name is another one."""
        found = _pattern(self.name).fullmatch(name)
        return found.groupdict() if found is not None else None

    @property
    def fixed(self) -> str:
        """The name without variable parts. Example: `rollout/groups`."""
        return re.sub(r"/?<[^>]*>", "", self.name)


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    # a data source, a part of a reward or a program's own name may hold slashes
    parts = [f"(?P<{part}>.+)" if number % 2 else re.escape(part) for number, part in enumerate(VARIABLE.split(name))]
    return re.compile("".join(parts))


@functools.cache
def catalogue() -> tuple[Metric, ...]:
    """All of them, in the order of the page."""
    return tuple(_read())


def _read() -> Iterator[Metric]:
    for section in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        for one in section["metrics"]:
            fields = {"name": one["name"], "unit": one["unit"], "source": one["from"], "meaning": one["meaning"]}
            yield Metric(section=section["section"], when=one.get("when", ""), **fields)


def find(name: str) -> Metric | None:
    """The entry of a name in metrics.jsonl: one that is equal, or else the pattern with the most fixed letters."""
    found = [metric for metric in catalogue() if metric.variables(name) is not None]
    return max(found, key=lambda metric: ("<" not in metric.name, len(metric.fixed)), default=None)
