"""`python -m scripts.prepare_mbpp SOURCE --out data/mbpp`: MBPP (Austin et al. 2021) from its official file.

SOURCE is a folder with mbpp.jsonl as Google published it (task_id, text, test_list, test_setup_code), of whose tasks
601 to 974 train and 11 to 510 test, as its authors say; or with the parquet files of the hub. The ground truth is the
list of asserts, which the reward `code` runs in a sandbox; the prompt shows the first one, for the function's name.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay.prompts import DataError
from replay.prompts.formats import first_rows
from scripts.prepare_gsm8k import command, source_of

INSTRUCTION = "Write the function in one fenced block of Python."
TASKS = {"train": range(601, 975), "test": range(11, 511)}
FILE = "mbpp.jsonl"


def tasks_of(folder: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, task) of a split. Raises DataError: no file, or a line that is no JSON object."""
    is_whole = (folder / FILE).is_file()
    for place, raw in first_rows(str(folder / FILE) if is_whole else source_of(folder, split)):
        if not is_whole or raw.get("task_id") in TASKS[split]:
            yield f"{place.source}: row {place.row}", dict(raw)


def rows_of(folder: Path, split: str, instruction: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's columns. Raises DataError: a file is missing, or a row is no MBPP."""
    for index, (place, task) in enumerate(tasks_of(folder, split)):
        text, tests = task.get("text", task.get("prompt")), task.get("test_list")
        tests = list(tests) if isinstance(tests, Sequence) and not isinstance(tests, str) else []
        if not isinstance(text, str) or not tests or not all(isinstance(test, str) for test in tests):
            raise DataError(f"{place}: no MBPP, which has the columns text and test_list, a list of asserts")
        imports = [line for line in str(task.get("test_setup_code") or "").splitlines() if line.strip()]
        question = f"{text.strip()}\nYour code has to pass this test:\n{tests[0]}"
        yield {
            "data_source": "mbpp",
            "prompt": [{"role": "user", "content": f"{question}\n{instruction}".strip()}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": json.dumps([*imports, *tests])},
            "extra_info": {"split": split, "index": index, "task_id": task.get("task_id")},
        }


def main(argv: Sequence[str] | None = None) -> int:
    return command("mbpp", __doc__, rows_of, INSTRUCTION, argv)


if __name__ == "__main__":
    sys.exit(main())
