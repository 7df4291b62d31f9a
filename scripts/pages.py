"""`python -m scripts.pages [--check]`: configuration.md and reference/{errors,metrics,families}.md of docs."""

import argparse
import itertools
import json
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.loading import FLAGS, PRESETS, QUICKSTART, leaf_keys
from configs.rewards import SECTIONS
from configs.schema import Config
from configs.variants import SCHEMA, Choice
from slipstream.command.errors import TABLE
from slipstream.families.refused import REFUSED
from slipstream.families.table import FAMILIES
from slipstream.runtime.vitals.catalogue import Metric, catalogue
from slipstream.runtime.vitals.endpoint import exported_name
from slipstream.translate.names import FRAMEWORKS, ROWS, WITHOUT

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = """# Configuration

<!-- Written by scripts/pages.py from the schema; do not edit. -->

One YAML file holds one run. `--config` takes a file or the name of a preset; `--set section.key=value` overrides one
key and may be repeated; values are YAML. Unknown keys are refused, with a suggestion. The resolved configuration is
written to `runs/<name>/config.yaml` and can be given to `--config` again.

Presets: {presets}.

Flags that are short for one key:

{flags}
There are {count} keys.
"""
REWARDS = """## Options of built-in rewards

Given in `reward.function`, as in {numeric: {weight: 1, tolerance: 0.01}}; all have `weight`, 1.0: what the score counts
in the sum. What each is for: [rewards](howto/rewards.md).
"""
FOREIGN = """## Names of other frameworks

They are answered with the key here, in a file, in `--set` and as an option. Of long names, this is the end.
"""
UNNAMED = """## Names without a key here

They are answered with the reason.

"""
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}
ERRORS_HEAD = """# Errors

<!-- Written by scripts/pages.py from slipstream/command/errors.yaml; do not edit. -->

Each error has a code, which stands in brackets at the end of the first line of its message: in logs, in the last line
of a process and in the events that the launcher shows. `slipstream explain` with a code prints what stands here.
The class in brackets before it, such as `[silent]`, is
[the kind of failure](../troubleshooting.md#a-run-that-stands-still).
"""
METRICS_HEAD = """# Reference of metrics

<!-- Written by scripts/pages.py from slipstream/runtime/vitals/catalogue.yaml; do not edit. -->

All {count} names in `metrics.jsonl`, which trackers get as well ([metrics](../metrics.md)). `<...>` stands for a
variable part. Of the names for Prometheus, variable parts are labels; those of maps have the label `key`.
"""


def page() -> str:
    flags = table(("flag", "key"), [(f"`{flag}`", f"`{key}`") for flag, key in FLAGS.items()])
    presets = ", ".join(f"`{path.stem}`" for path in sorted(PRESETS.glob("*.yaml")))
    presets = presets.replace(f"`{QUICKSTART}`", f"`{QUICKSTART}` (the default)")
    parts = [HEAD.format(presets=presets, flags=flags, count=len(leaf_keys()))]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        rows = (
            []
            if isinstance(section, type)
            else [(f"`{name}`", "map", "`{}`", " ".join(str(field.description).split()))]
        )
        if rows:  # sections by name
            section = typing.get_args(section)[1]
        prefix = f"{name}.NAME." if rows else f"{name}."
        parts += [f"## {name}\n\n{' '.join(section.__doc__.split())}\n"]
        parts += [table(("key", "type", "default", "meaning"), [*rows, *rows_of(section, prefix)])]
    options = [
        row for name, section in SECTIONS.items() for row in rows_of(section, f"{name}.") if "weight`" not in row[0]
    ]
    parts += [REWARDS, table(("option", "type", "default", "meaning"), options)]
    foreign = [(f"`{key}`", *(f"`{name}`" if name else "–" for name in names)) for key, *names in ROWS]
    parts += [FOREIGN, table(("key", *FRAMEWORKS), foreign)]
    without = [
        (why, ", ".join(f"`{name}`" for name, reason in WITHOUT.items() if reason == why))
        for why in dict.fromkeys(WITHOUT.values())
    ]
    return "\n".join([*parts, UNNAMED + table(("here", "names elsewhere"), without)])


def rows_of(section: Any, prefix: str) -> Iterator[Sequence[str]]:
    """A row for each key, those of sections within in their place."""
    for key, one in section.model_fields.items():
        if isinstance(one.annotation, type) and issubclass(one.annotation, BaseModel):
            yield from rows_of(one.annotation, f"{prefix}{key}.")
        else:
            meaning = " ".join((one.description or "").split())
            yield f"`{prefix}{key}`", type_text(one), default_text(one), meaning


FAMILIES_HEAD = """# Model families

<!-- Written by scripts/pages.py from slipstream/families/; do not edit. -->

A family is the `model_type` of a folder's config.json. Each has one record in `slipstream/families/table.py`, which
every part of a run asks: names and shapes of tensors, sizes and FLOPs, windows, scales, caps, adapters, and where each
tensor of the checkpoint lies in transformers' parameters and in SGLang's. Records are held against transformers'
models, which the learner runs, and against the ways in which SGLang divides them.

## Trained
"""
FAMILIES_TAIL = """## A family of your own

An architecture that transformers and SGLang have needs a record, which a file of yours may hold: `model.family` names
it. Every process of a run reads it; on other hosts it may lie under another path, its text must be the same.

```python
# my_family.py: Arcee is a Llama without gates
from slipstream.families.record import Family, attention, projections

FAMILY = Family(
    model_type="arcee",
    attention=attention("attention_bias", "attention_bias"),
    mlp=(
        *projections("mlp.up_proj", rows="inner", columns="hidden", bias="mlp_bias"),
        *projections("mlp.down_proj", rows="hidden", columns="inner", bias="mlp_bias"),
    ),
)
```

A wrong record does not train in silence: a tensor without its counterpart is refused by name, and an engine whose live
tensors have other digests than the learner's is quarantined. What a record cannot say, such as another router or
another table of positions, is code.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    top, *rest = [f"| {' | '.join(line)} |\n" for line in lines]
    return f"{top}|{'---|' * len(head)}\n{''.join(rest)}"


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with the bounds of its value."""
    bounds = [f"{SIGNS[name]} {getattr(b, name)}" for b in field.metadata for name in SIGNS if hasattr(b, name)]
    is_chosen = any(isinstance(each, type(SCHEMA)) for each in field.metadata)
    return ", ".join(["a variant" if is_chosen else in_words(field.annotation), *bounds])


def in_words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(in_words, arguments))
    if origin is typing.Annotated:
        return in_words(arguments[0])
    if origin is tuple:
        return f"list of {len(arguments)} {in_words(arguments[0])}s"
    if origin is not None:
        return f"{origin.__name__} of {', '.join(map(in_words, arguments))}"
    return TYPES.get(hint) or str(hint.__name__)


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in YAML; `required` where there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Choice) or any(isinstance(each, type(SCHEMA)) for each in field.metadata):
        value = "none" if value is None else value.dumped()
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def errors_page() -> str:
    """docs/reference/errors.md."""
    parts = [ERRORS_HEAD]
    for area, codes in TABLE.items():
        parts.append(f"## {area}\n")
        parts += [
            f"### {code}\n\n**{entry['symptom']}**\n\n- *Cause:* {entry['cause']}\n- *Remedy:* {entry['mend']}\n"
            for code, entry in codes.items()
        ]
    return "\n".join(parts)


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    parts = [METRICS_HEAD.format(count=len(catalogue()))]
    for section, metrics in itertools.groupby(catalogue(), lambda metric: metric.section):
        parts.append(
            f"## {section}\n\n{table(('name', 'unit', 'from', 'meaning', 'for Prometheus'), map(metric_row, metrics))}"
        )
    return "\n".join(parts)


def metric_row(metric: Metric) -> tuple[str, ...]:
    condition = metric.when if metric.when not in metric.meaning else ""
    meaning = f"{metric.meaning} (*{condition}*)" if condition else metric.meaning
    name, _, _ = exported_name(metric.name)
    return f"`{metric.name}`", metric.unit, metric.source, meaning, f"`{name}`"


def families_page() -> str:
    """docs/reference/families.md."""
    rows, reasons = [], defaultdict[str, list[str]](list)
    for name, family in FAMILIES.items():
        if family.refused:
            reasons[family.refused].append(name)
            continue
        engines = "torch, sglang" if family.in_torch_engine else "sglang"
        what = "mixture of experts" if family.moe else f"`{family.text}` with pictures" if family.text else "dense"
        rows.append((f"`{name}`", what, engines, family.against_tensor or "yes"))
    for kind, reason in sorted(REFUSED.items()):
        reasons[reason].append(kind)
    refused = ((", ".join(f"`{kind}`" for kind in kinds), reason) for reason, kinds in reasons.items())
    trained = table(("model_type", "kind", "rollout.engine", "learner.mesh.tensor"), rows)
    return f"{FAMILIES_HEAD}\n{trained}\n## Refused\n\n{table(('model_type', 'because'), refused)}\n{FAMILIES_TAIL}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser("python -m scripts.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is out of date")
    check, code = parser.parse_args(argv).check, 0
    for name, make in PAGES.items():
        path, wanted = DOCS / name, make()
        if not check:
            path.write_text(wanted, encoding="utf-8")
            sys.stdout.write(f"{path}\n")
        elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            sys.stderr.write(f"{path.name} is out of date: run python -m scripts.pages\n")
            code = 1
    return code


PAGES = {
    "configuration.md": page,
    "reference/errors.md": errors_page,
    "reference/metrics.md": metrics_page,
    "reference/families.md": families_page,
}

if __name__ == "__main__":
    sys.exit(main())
