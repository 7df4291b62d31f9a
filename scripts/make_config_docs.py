"""Write docs/configuration.md from the configuration schema: `python -m scripts.make_config_docs [--check]`.

Every key, its type, its default and what it does, section by section, in the order of the schema. A test fails
when the page is out of date, so the page cannot say anything that the code does not.
"""

import argparse
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

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


def page() -> str:
    """The whole page as Markdown."""
    flags = "\n".join(f"| `{flag}` | `{key}` |" for flag, key in FLAGS.items())
    presets = ", ".join(f"`{path.stem}`" for path in sorted(PRESETS.glob("*.yaml")))
    presets = presets.replace(f"`{QUICKSTART}`", f"`{QUICKSTART}` (the default)")
    parts = [HEAD.format(presets=presets, flags=flags, count=len(leaf_keys()))]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        parts.append("\n".join(_section(name, section)))
    parts.append("\n".join(_foreign_names()))
    return "\n".join(parts)


def _foreign_names() -> Iterator[str]:
    """A table of the keys that other frameworks have as well, a line for each key."""
    yield "## Names of other frameworks"
    yield ""
    yield "They are answered with the key here, in a file, in `--set` and as an option. Of long names, this is the end."
    yield ""
    yield f"| key | {' | '.join(FRAMEWORKS)} |"
    yield f"|---|{'---|' * len(FRAMEWORKS)}"
    for key, *names in ROWS:
        yield f"| `{key}` | {' | '.join('–' if name == '-' else f'`{name}`' for name in names)} |"
    yield ""


def _section(name: str, section: type[BaseModel]) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield _one_line(section.__doc__ or "")
    yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in section.model_fields.items():
        cells = (f"`{name}.{key}`", type_text(field), default_text(field), _one_line(field.description or ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def type_text(field: FieldInfo) -> str:
    """The type of a key in words, with the bounds of its value."""
    bounds = []
    for constraint in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(constraint, attribute, None)) is not None:
                bounds.append(f"{sign} {bound}")
    return ", ".join([_type(field.annotation), *bounds])


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(option) for option in arguments)
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is not None:
        inner = ", ".join(_type(argument) for argument in arguments)
        return f"{origin.__name__} of {inner}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", types.NoneType: "null"}
    return names.get(hint) or str(hint.__name__)


def default_text(field: FieldInfo) -> str:
    """The default as it would be written in YAML; `required` where there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.make_config_docs", description="Write the key reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    args = parser.parse_args(argv)
    wanted = page()
    if args.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{PAGE.name} is out of date: run python -m scripts.make_config_docs", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(wanted, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
