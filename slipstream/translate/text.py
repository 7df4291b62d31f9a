"""A translation in words, line by line, and as the YAML file of a run."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from configs.loading import inline
from configs.schema import Config
from slipstream.translate.settings import Line
from slipstream.translate.translation import Translation

WIDTH = 58
SIGNS = {"key": "->", "not needed": "..", "no counterpart": "--", "open": "??", "unknown": "??"}
LEGEND = "-> key here   .. not needed   -- no counterpart   ?? not translated"


def printed(translation: Translation) -> str:
    """What the command prints."""
    foreign = translation.foreign
    parts = [f"{foreign.framework}: {', '.join(foreign.sources)}    {LEGEND}", ""]
    parts += [_row(line) for line in translation.lines]
    if translation.defaults:
        parts += ["", f"Not in the file, and {foreign.framework}'s default is not the one here:"]
        parts += [_row(line) for line in translation.defaults]
    if foreign.remarks:
        parts += ["", *(f"note: {remark}" for remark in foreign.remarks)]
    return "\n".join([*parts, "", summary(translation)])


def summary(translation: Translation) -> str:
    """How many settings became what; unknown ones by name."""
    count = Counter(line.kind for line in translation.lines)
    text = (
        f"{len(translation.lines)} settings: {count['key']} have a key here, {count['not needed']} need none,"
        f" {count['no counterpart']} have no counterpart, {count['open'] + count['unknown']} are not translated"
    )
    names = [line.shown for line in translation.lines if line.kind in ("open", "unknown")]
    return f"{text}: {'; '.join(names)}" if names else text


def _row(line: Line) -> str:
    there = line.shown if len(line.shown) <= WIDTH else f"{line.shown}\n{'':{WIDTH}}"
    pairs = ", ".join(f"{key}: {inline(value)}" for key, value in line.pairs.items())
    if line.kind == "unknown":
        pairs = "a name of no table: look for its counterpart in docs/configuration.md"
    elif line.kind == "open":
        pairs = f"{line.note}; give --set {line.decides}=..." if line.decides else f"open: {line.note}"
    note = line.note if line.kind != "open" else ""
    text = f"{there:<{WIDTH}} {SIGNS[line.kind]} {pairs or note}".rstrip()
    return f"{text}\n{'':{WIDTH}}    ({note})" if pairs and note else text


def yaml_file(translation: Translation) -> str:
    """The configuration, each key with the setting that it comes from, and below what has no key."""
    foreign = translation.foreign
    lines = [f"# Translated from {', '.join(foreign.sources)} ({foreign.framework}) by `slipstream translate`."]
    for section in [name for name in Config.model_fields if name in translation.tree]:
        lines += [f"{section}:", *_block(translation.tree[section], f"{section}.", translation.sources)]
    # what the schema does not know is refused with its reason when the file is loaded
    for section in [name for name in translation.tree if name not in Config.model_fields]:
        lines += [f"{section}: {inline(translation.tree[section])}"]
    left = [line for line in translation.lines if line.kind in ("no counterpart", "open", "unknown")]
    if left:
        lines += ["", "# Not here:"]
        lines += [f"#   {line.shown}" + (f"    {line.note}" if line.note else "") for line in left]
    return "\n".join(lines) + "\n"


def _block(tree: Mapping[str, Any], prefix: str, sources: Mapping[str, str], depth: int = 1) -> Iterator[str]:
    for key, value in tree.items():
        name, indent = f"{prefix}{key}", "  " * depth
        has_keys_below = any(source.startswith(f"{name}.") for source in sources)
        if isinstance(value, dict) and has_keys_below:
            yield f"{indent}{key}:"
            yield from _block(value, f"{name}.", sources, depth + 1)
        else:
            source = sources.get(name, "")
            yield f"{indent}{key}: {inline(value)}" + (f"  # {source}" if source else "")
