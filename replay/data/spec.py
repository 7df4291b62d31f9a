"""What a value of data.train or data.eval names: files, a saved dataset, a generator of rows, or a user's class."""

from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import yaml

from replay.data.rows import DataError

GENERATED, TASKSET, HUB = "reasoning_gym", "verifiers", "datasets"
CUSTOM, FILES = "class", "files"
SUFFIX = "suffix"
"""Option of files and of a hub's datasets: text that follows every prompt."""
FORMS = "a JSONL or parquet file, a folder or pattern of them, a saved dataset, or a generator"


class Spec(NamedTuple):
    """Example: `reasoning_gym:chain_sum?min_terms=2&seed=1` is Spec("reasoning_gym", "chain_sum", {...}, text)."""

    kind: str
    """`files`, `class`, `datasets` (a name of a hub), `reasoning_gym` or `verifiers`."""
    name: str
    options: dict[str, Any]
    """What stands after `?`, values read as YAML."""
    text: str
    """As it was given; names it in errors."""
    suffix: str = ""
    """What is put behind every prompt, such as how to write the answer."""


def parse(text: str) -> Spec:
    """Take a value apart. Raises DataError: options that are no `name=value`."""
    head, options = text, dict[str, Any]()
    before, mark, query = text.rpartition("?")
    if mark and "=" in query:  # else the sign is of a pattern of files
        try:
            # not parse_qsl, which reads '+' as a blank
            pairs = [tuple(map(unquote, pair.split("=", 1))) for pair in query.split("&")]
            options = {name: yaml.safe_load(value) for name, value in pairs}
        except (ValueError, yaml.YAMLError) as error:
            raise DataError(f"{text}: after '?' stands {query!r}; write name=value, joined by '&'") from error
        if len(options) < len(pairs):
            raise DataError(f"{text}: an option stands there twice; remove one")
        head = before
    scheme, colon, rest = head.partition(":")
    if colon and scheme in (GENERATED, TASKSET):
        return Spec(scheme, rest, options, text)
    if ".py:" in head:
        return Spec(CUSTOM, head, options, text)
    suffix = options.pop(SUFFIX, "")
    if not isinstance(suffix, str):
        raise DataError(f"{text}: {SUFFIX} is {suffix!r}; give text")
    return (
        Spec(HUB, rest, options, text, suffix) if colon and scheme == HUB else Spec(FILES, head, options, text, suffix)
    )


def files_of(spec: Spec, endings: tuple[str, ...]) -> list[Path]:
    """The files that a path, a folder or a pattern names, in the order of their names. Raises DataError: none."""
    path = Path(spec.name).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(endings))
        where = f"is a folder without a file that ends in {', '.join(endings)}"
    elif any(sign in spec.name for sign in "*?[") and not path.exists():
        pattern = Path(*path.parts[1:]) if path.is_absolute() else path
        found = sorted(file for file in Path(path.anchor).glob(str(pattern)) if file.is_file())
        where = "no file is named like that"
    else:
        found, where = [path] if path.is_file() else [], "no such file"
    if not found:
        raise DataError(f"{spec.text}: {where} (data.train and data.eval take {FORMS}: docs/howto/data.md)")
    return found
