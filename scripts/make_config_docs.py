"""Write docs/configuration.md from the configuration schema: `python -m scripts.make_config_docs [--check]`."""

import argparse
import json
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from configs.aliases import FRAMEWORKS, ROWS
from configs.loading import FLAGS, PRESETS, QUICKSTART, leaf_keys
from configs.schema import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Written by scripts/make_config_docs.py from configs/; do not edit. -->

One YAML file holds one run. `--config` takes a file or the name of a preset; `--set section.key=value` overrides one
key and may be repeated; values are YAML. Unknown keys are refused, with a suggestion. The resolved configuration is
written to `runs/<name>/config.yaml` and can be given to `--config` again.

Presets: {presets}.

Flags that are short for one key:

| flag | key |
|---|---|
{flags}

There are {count} keys.
"""
FOREIGN = """## Names of other frameworks

They are answered with the key here, in a file, in `--set` and as an option. Of long names, this is the end.
"""


def page() -> str:
    flags = "\n".join(f"| `{flag}` | `{key}` |" for flag, key in FLAGS.items())
    presets = ", ".join(f"`{path.stem}`" for path in sorted(PRESETS.glob("*.yaml")))
    presets = presets.replace(f"`{QUICKSTART}`", f"`{QUICKSTART}` (the default)")
    parts = [HEAD.format(presets=presets, flags=flags, count=len(leaf_keys()))]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        rows = [
            (f"`{name}.{key}`", type_text(one), default_text(one), _one_line(one.description or ""))
            for key, one in section.model_fields.items()
        ]
        parts.append(f"## {name}\n\n{_one_line(section.__doc__ or '')}\n")
        parts.append(_table(("key", "type", "default", "meaning"), rows))
    foreign = [(f"`{key}`", *("–" if name == "-" else f"`{name}`" for name in names)) for key, *names in ROWS]
    return "\n".join([*parts, FOREIGN, _table(("key", *FRAMEWORKS), foreign)])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {line} |" for line in lines), ""])


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with the bounds of its value."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in signs.items()
        if hasattr(bound, name)
    ]
    return ", ".join([_type(field.annotation), *bounds])


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_type, arguments))
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is not None:
        return f"{origin.__name__} of {', '.join(map(_type, arguments))}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}
    return names.get(hint) or str(hint.__name__)


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in YAML; `required` where there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.make_config_docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    args = parser.parse_args(argv)
    wanted = page()
    if not args.check:
        PAGE.write_text(wanted, encoding="utf-8")
        print(PAGE)
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
        print(f"{PAGE.name} is out of date: run python -m scripts.make_config_docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
