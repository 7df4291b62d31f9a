"""`python -m configs.docs [--check]`: docs/configuration.md from the schema, in a clone."""

import argparse
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.aliases import FRAMEWORKS, ROWS
from configs.loading import FLAGS, PRESETS, QUICKSTART, leaf_keys
from configs.schema import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Written by configs/docs.py from the schema; do not edit. -->

One YAML file holds one run. `--config` takes a file or the name of a preset; `--set section.key=value` overrides one
key and may be repeated; values are YAML. Unknown keys are refused, with a suggestion. The resolved configuration is
written to `runs/<name>/config.yaml` and can be given to `--config` again.

Presets: {presets}.

Flags that are short for one key:

{flags}
There are {count} keys.
"""
FOREIGN = """## Names of other frameworks

They are answered with the key here, in a file, in `--set` and as an option. Of long names, this is the end.
"""
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}


def page() -> str:
    flags = table(("flag", "key"), [(f"`{flag}`", f"`{key}`") for flag, key in FLAGS.items()])
    presets = ", ".join(f"`{path.stem}`" for path in sorted(PRESETS.glob("*.yaml")))
    presets = presets.replace(f"`{QUICKSTART}`", f"`{QUICKSTART}` (the default)")
    parts = [HEAD.format(presets=presets, flags=flags, count=len(leaf_keys()))]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        parts += [f"## {name}\n\n{' '.join(section.__doc__.split())}\n"]
        parts += [table(("key", "type", "default", "meaning"), rows_of(name, section))]
    foreign = [(f"`{key}`", *("–" if name == "-" else f"`{name}`" for name in names)) for key, *names in ROWS]
    return "\n".join([*parts, FOREIGN, table(("key", *FRAMEWORKS), foreign)])


def rows_of(prefix: str, section: type[BaseModel]) -> Iterator[Sequence[str]]:
    """A row for each key below a section, those of sections within it included."""
    for name, field in section.model_fields.items():
        key, kind = f"{prefix}.{name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from rows_of(key, kind)
        else:
            yield f"`{key}`", type_text(field), default_text(field), " ".join((field.description or "").split())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    top, *rest = [f"| {' | '.join(line)} |\n" for line in lines]
    return f"{top}|{'---|' * len(head)}\n{''.join(rest)}"


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with the bounds of its value."""
    bounds = [f"{SIGNS[name]} {getattr(b, name)}" for b in field.metadata for name in SIGNS if hasattr(b, name)]
    return ", ".join([in_words(field.annotation), *bounds])


def in_words(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(in_words, arguments))
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
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m configs.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    wanted = page()
    if not parser.parse_args(argv).check:
        PAGE.write_text(wanted, encoding="utf-8")
        sys.stdout.write(f"{PAGE}\n")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != wanted:
        sys.stderr.write(f"{PAGE.name} is out of date: run python -m configs.docs\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
