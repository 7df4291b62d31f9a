"""`python -m scripts.prepare_gsm8k SOURCE --out data/gsm8k`: GSM8K's official files with an instruction in each prompt.

SOURCE is a folder with train.jsonl and test.jsonl, as OpenAI published them, or with the parquet files of the hub
(`main/train-00000-of-00001.parquet`, ...). The official files can be given to data.train as they are; this adds the
sentence that asks for `####`, and verl's columns. Writes train.jsonl and test.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from replay.prompts import DataError, read_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")
MakeRows = Callable[[Path, str, str], Iterator[dict[str, Any]]]
"""From the folder of the official files, a split and an instruction. Raises DataError."""


def source_of(folder: Path, split: str) -> str:
    """The file of a split, or a pattern of its shards. Raises DataError: there is none."""
    for pattern in (f"{split}.jsonl", f"{split}*.parquet", f"main/{split}*.parquet", f"data/{split}*.parquet"):
        if any(folder.glob(pattern)):
            return str(folder / pattern)
    raise DataError(f"{folder}: neither {split}.jsonl nor {split}*.parquet is in it; give the folder of the files")


def rows_of(folder: Path, split: str, instruction: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's columns. Raises DataError: a file is missing, or a row is no GSM8K."""
    source = source_of(folder, split)
    for index, row in enumerate(read_rows(source)):
        if isinstance(row["prompt"], str) or len(row["prompt"]) != 1:
            raise DataError(f"{source}: row {index + 1}: no GSM8K, which has the columns question and answer")
        question, answer = row["prompt"][0]["content"], row["columns"].get("answer")
        if not isinstance(answer, str) or "####" not in answer:
            raise DataError(f"{source}: row {index + 1}: the answer does not end in `#### <number>`: {answer!r}")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        }


def write(rows: Iterator[dict[str, Any]], file: Path) -> int:
    """Write rows as JSONL, in place once they are whole; how many."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made, count = file.with_name(f".{file.name}.making"), 0
    with made.open("w", encoding="utf-8") as out:
        for count, row in enumerate(rows, start=1):  # noqa: B007 - the last count is returned
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    made.rename(file)
    return count


def command(name: str, about: str | None, rows_of: MakeRows, instruction: str, argv: Sequence[str] | None) -> int:
    """A command that writes a file of rows for each split; returns its exit code."""
    parser = argparse.ArgumentParser(f"python -m scripts.prepare_{name}", description=about)
    parser.add_argument("source", type=Path, help="folder of the official files")
    parser.add_argument("--out", type=Path, default=Path("data", name))
    parser.add_argument("--instruction", default=instruction, help="stands after each question (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        for split in SPLITS:
            count = write(rows_of(args.source, split, args.instruction), args.out / f"{split}.jsonl")
            sys.stdout.write(f"{args.out / split}.jsonl: {count} rows\n")
    except (DataError, OSError) as error:
        sys.stderr.write(f"prepare_{name}: {error}\n")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return command("gsm8k", __doc__, rows_of, INSTRUCTION, argv)


if __name__ == "__main__":
    sys.exit(main())
