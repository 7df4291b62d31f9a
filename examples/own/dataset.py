"""A dataset: six digits to sort. Copy it, and name it by `data.train: "dataset.py:digits?first=1000"`."""

import random


def digits(first: int = 0, rows: int = 1000) -> list[dict[str, str]]:
    """A list of rows; what follows `?` are arguments. What is too large for a list is a class (docs/howto/data.md)."""
    made = []
    for number in range(first, first + rows):
        shown = random.Random(number).choices("0123456789", k=6)
        made.append({"prompt": f"{''.join(shown)}=", "answer": "".join(sorted(shown))})
    return made
