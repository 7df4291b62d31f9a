"""`python -m learner.report.check_export RUN_DIR`: does the exported folder answer as the last evaluation reported?

Loads the newest checkpoint's hf/ folder with transformers alone, answers the evaluation prompts greedily and
compares with evaluations/version_N_greedy.jsonl, prompt by prompt. The last line is JSON; the exit code is 1
when more than one prompt in 512 differs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import load
from replay.prompts import load_rows

BATCH = 128


def check(run_dir: Path) -> dict[str, Any]:
    """Compare; the result names every prompt whose answer differs."""
    config = load(run_dir / "config.yaml")
    step = max(int(path.parent.name.removeprefix("step_")) for path in run_dir.glob("checkpoints/step_*/COMPLETE"))
    folder = run_dir / "checkpoints" / f"step_{step}" / "hf"
    evaluation = run_dir / "evaluations" / f"version_{step}_greedy.jsonl"
    reported = [json.loads(line) for line in evaluation.read_text(encoding="utf-8").splitlines()]
    rows = load_rows(config.data.eval or config.data.train)[: len(reported)]
    texts = greedy_answers(folder, [str(row["prompt"]) for row in rows], config.rollout.max_new_tokens)
    different = [
        {"index": i, "prompt": row["prompt"], "exported": text, "evaluation": report["text"]}
        for i, (row, text, report) in enumerate(zip(rows, texts, reported, strict=True))
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


def greedy_answers(folder: Path, prompts: list[str], max_new_tokens: int) -> list[str]:
    """Answers of transformers' own generate, prompts of equal length together."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    answers = [""] * len(prompts)
    for length in sorted(set(map(len, ids))):
        same = [i for i, tokens in enumerate(ids) if len(tokens) == length]
        for first in range(0, len(same), BATCH):
            chosen = same[first : first + BATCH]
            batch = torch.tensor([ids[i] for i in chosen])
            made = model.generate(
                batch, attention_mask=torch.ones_like(batch), max_new_tokens=max_new_tokens, do_sample=False
            )
            for i, row in zip(chosen, made, strict=True):
                answers[i] = str(tokenizer.decode(row[length:], skip_special_tokens=True))
    return answers


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m learner.report.check_export", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    result = check(parser.parse_args().run_dir)
    sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    return int(len(result["different"]) > max(1, result["prompts"] // 512))


if __name__ == "__main__":
    sys.exit(main())
