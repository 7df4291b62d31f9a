"""`python -m learner.report.check_export RUN_DIR`: does the exported folder answer as the last evaluation reported?

Loads the newest checkpoint's hf/ folder with transformers alone, answers the prompts of every set that was evaluated
greedily, and compares with evaluations/version_N_greedy.jsonl, prompt by prompt. The last line is JSON; the exit code
is 1 when more than one prompt in 512 differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import ConfigError, load
from configs.command import program
from configs.errors import InputMissing
from learner.checkpoints.folders import CheckpointError, incomplete, numbered, step_of
from learner.report.evaluation import file_of
from replay.prompts import Row, load_rows

BATCH = 128


def check(run_dir: Path) -> dict[str, Any]:
    """Compare; the result names every prompt whose answer differs.

    Raises:
        ConfigError: the folder is no run, or has no evaluation of greedy answers of its newest checkpoint.
        CheckpointError: it has no checkpoint.
    """
    config = load(run_dir / "config.yaml")
    newest = newest_checkpoint(run_dir)
    step, folder = step_of(newest), newest / "hf"
    if not any(one.greedy for one in config.evaluation_sets):
        raise InputMissing(f"{run_dir}: it evaluates nothing greedily (data.eval, evaluation.greedy); name another run")
    reported, rows, limits = [], list[Row](), list[int]()
    for one in (one for one in config.evaluation_sets if one.greedy):
        file = file_of(run_dir, step, one.name, greedy=True)
        if not file.is_file():
            raise InputMissing(f"{file} is missing: the newest checkpoint was not evaluated; wait, or name another run")
        lines = file.read_bytes().splitlines()  # of text also at U+2028
        asked = load_rows(one.path)[: len(lines)]
        reported += [json.loads(line) for line in lines]
        rows += asked
        limits += [one.max_new_tokens] * len(asked)
    texts = greedy_answers(folder, [str(row["prompt"]) for row in rows], limits)
    different = [
        {"index": report["index"], "prompt": row["prompt"], "exported": text, "evaluation": report["text"]}
        for row, text, report in zip(rows, texts, reported, strict=True)
        if text != report["text"]
    ]
    right = [text == row["ground_truth"] for text, row in zip(texts, rows, strict=True)]
    return {
        "step": step,
        "prompts": len(rows),
        "greedy_reported": sum(report["reward"] for report in reported) / len(reported),
        "greedy_exported": sum(right) / len(right),
        "different": different,
    }


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest that is complete and was not rolled back. Raises CheckpointError."""
    found = [folder for folder in numbered(run_dir / "checkpoints") if not incomplete(folder)]
    if not found:
        said = "no checkpoint is complete yet; wait for one, or name another run"
        raise CheckpointError(f"{run_dir}/checkpoints: {said}")
    return found[0]


def greedy_answers(folder: Path, prompts: list[str], limits: list[int]) -> list[str]:
    """Answers of transformers' own generate, prompts of equal length and limit of new tokens together."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    answers = [""] * len(prompts)
    for length, limit in sorted({(len(tokens), limit) for tokens, limit in zip(ids, limits, strict=True)}):
        same = [i for i, tokens in enumerate(ids) if (len(tokens), limits[i]) == (length, limit)]
        for first in range(0, len(same), BATCH):
            chosen = same[first : first + BATCH]
            batch = torch.tensor([ids[i] for i in chosen])
            made = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=limit, do_sample=False)
            for i, row in zip(chosen, made, strict=True):
                answers[i] = str(tokenizer.decode(row[length:], skip_special_tokens=True))
    return answers


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=program("learner.report.check_export"), description=__doc__)
    parser.add_argument("run_dir", type=Path)
    args = parser.parse_args()
    try:
        result = check(args.run_dir)
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"check_export: {error}\n")
        return 2
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    return int(len(result["different"]) > max(1, result["prompts"] // 512))


if __name__ == "__main__":
    sys.exit(main())
