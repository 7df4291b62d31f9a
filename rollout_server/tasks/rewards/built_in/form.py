"""Reward `format`: the answer has the wanted tags and nothing else. Says nothing of what stands in them."""

from collections.abc import Sequence

from rollout_server.tasks.rewards import Sample


def reward(sample: Sample, tags: Sequence[str], opened: bool = False) -> float:
    """1.0 for `<a>...</a> <b>...</b>` with each tag once, in order, none empty, and only white space around them."""
    text = f"<{tags[0]}>{sample['completion']}" if opened else sample["completion"]
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(text.count(mark) != 1 for mark in marks):
        return 0.0
    position, inside = 0, False
    for mark in marks:
        start = text.find(mark, position)
        if start < 0 or inside != bool(text[position:start].strip()):
            return 0.0
        position, inside = start + len(mark), not inside
    return float(not text[position:].strip())
