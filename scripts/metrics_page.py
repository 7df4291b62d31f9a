"""`python -m scripts.metrics_page [--check]`: docs/reference/metrics.md from the catalogue, in a clone."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.pages import keep, table
from slipstream.runtime.vitals.catalogue import Metric, catalogue
from slipstream.runtime.vitals.endpoint import exported_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"
HEAD = """# Reference of metrics

<!-- Written by scripts/metrics_page.py from slipstream/runtime/vitals/catalogue.yaml; do not edit. -->

All {count} names in `metrics.jsonl`, which trackers get as well ([metrics](../metrics.md)). `<...>` stands for a
variable part. Of the names for Prometheus, variable parts are labels; those of maps have the label `key`.
"""
COLUMNS = ("name", "unit", "from", "meaning", "for Prometheus")


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(count=len(catalogue()))]
    for section, metrics in itertools.groupby(catalogue(), lambda metric: metric.section):
        parts.append(f"## {section}\n\n{table(COLUMNS, map(row, metrics))}")
    return "\n".join(parts)


def row(metric: Metric) -> tuple[str, ...]:
    """Its cells."""
    condition = metric.when if metric.when not in metric.meaning else ""
    meaning = f"{metric.meaning} (*{condition}*)" if condition else metric.meaning
    name, _, _ = exported_name(metric.name)
    return f"`{metric.name}`", metric.unit, metric.source, meaning, f"`{name}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or compare it."""
    return keep({PAGE: page()}, "python -m scripts.metrics_page", __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
