r"""`python -m scripts.prepare_math SOURCE --out data/math`: MATH (Hendrycks et al. 2021) from its official files.

SOURCE is the unpacked archive, `MATH/{train,test}/<subject>/<number>.json`, or a folder of JSONL or parquet files with
the columns problem and solution (level, type). The ground truth is what stands in the last \boxed{} of the solution,
the difficulty is the number of the level, for `data.curriculum: difficulty`.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay.prompts import DataError
from replay.prompts.formats import first_rows
from scripts.prepare_gsm8k import command, source_of

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(solution: str) -> str | None:
    r"""What stands in the last \boxed{...}, braces within included, or after `\boxed `; None without one."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] or None
    depth = 0
    for position, sign in enumerate(rest):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[1:position].strip() or None
    return None


def problems_of(folder: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, problem) of a split, in the order of names. Raises DataError."""
    files = sorted(folder.glob(f"{split}/*/*.json"), key=lambda file: (file.parent.name, len(file.stem), file.stem))
    for file in files:
        try:
            yield str(file.relative_to(folder)), json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file}: not readable as JSON: {error}; unpack the archive again") from error
    if not files:
        yield from ((f"{p.source}: row {p.row}", dict(raw)) for p, raw in first_rows(source_of(folder, split)))


def rows_of(folder: Path, split: str, instruction: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's columns, with a difficulty. Raises DataError: a problem cannot be used."""
    for index, (place, problem) in enumerate(problems_of(folder, split)):
        question, solution = problem.get("problem"), problem.get("solution")
        if not isinstance(question, str) or not isinstance(solution, str):
            raise DataError(f"{place}: has the keys {sorted(problem)}, expected problem and solution")
        truth = last_boxed(solution)
        if truth is None:
            raise DataError(f"{place}: the solution has no \\boxed{{}} with something in it: {solution[-120:]!r}")
        level = re.search(r"\d+", str(problem.get("level", "")))
        yield {
            "data_source": "math",
            "prompt": [{"role": "user", "content": f"{question} {instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "difficulty": int(level[0]) if level else 0,
            "extra_info": {"split": split, "index": index, "subject": problem.get("type", ""), "place": place},
        }


def main(argv: Sequence[str] | None = None) -> int:
    return command("math", __doc__, rows_of, INSTRUCTION, argv)


if __name__ == "__main__":
    sys.exit(main())
