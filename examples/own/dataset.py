"""A dataset: rows made on demand. Copy it, and name it by `data.train: "dataset.py:Digits?first=1000"`."""

import random


class Digits:
    """Six digits to sort. Row n is the same for the same n; what follows `?` are arguments."""

    def __init__(self, first: int = 0, rows: int = 1000) -> None:
        self.first, self.rows = first, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, str]:
        digits = random.Random(self.first + number).choices("0123456789", k=6)
        return {"prompt": f"{''.join(digits)}=", "answer": "".join(sorted(digits))}
