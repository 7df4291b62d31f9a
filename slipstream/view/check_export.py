"""`slipstream check-export RUN_DIR`: does the exported folder answer as the last evaluation reported?

Loads the newest checkpoint's hf/ model with transformers alone, renders every prompt of
evaluations/version_N_greedy.jsonl as the run does, continues it greedily, and compares the texts. Where
they part at two tokens that are about equally likely it is a tie, which the engine's arithmetic decides. The last line
is JSON; the exit code is 1 when more than one prompt in 512 differs.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from configs import Config, ConfigError, load
from configs.errors import InputMissing
from learner.checkpoints.folders import CheckpointError, incomplete, numbered, step_of
from learner.record.evaluation import file_of
from replay.state.answers import PROMPT_ERRORS
from rollout_server.tasks.task import Task
from slipstream.runtime.fingerprint import resolve_chat_template
from slipstream.runtime.program import program

BATCH = 128
TIE = {"float32": 0.02, "bfloat16": 0.3}
"""Nats between two tokens that an engine of this dtype may take for equal."""


def check(run_dir: Path) -> dict[str, Any]:
    """Compare; the result names every prompt whose answer differs, and counts those that could not be asked.

    Raises:
        ConfigError: the folder is no run, or has no evaluation of single greedy answers of its newest checkpoint.
        CheckpointError: it has no checkpoint.
    """
    config = load(run_dir / "config.yaml")
    newest = newest_checkpoint(run_dir)
    step, folder = step_of(newest), newest / "hf"
    if not any(one.greedy for one in config.evaluation_sets):
        keys = "data.eval, evaluation.every_steps, evaluation.greedy"
        raise InputMissing(f"{run_dir}: it evaluates nothing greedily ({keys}); name another run")
    if config.environment.function is not None:
        raise InputMissing(f"{run_dir}: it evaluates episodes (environment.function), which are no single answers")
    reported, limits, left_out = list[dict[str, Any]](), list[int](), Counter[str]()
    for one in (one for one in config.evaluation_sets if one.greedy):
        file = file_of(run_dir, step, one.name, greedy=True)
        if not file.is_file():
            raise InputMissing(f"{file} is missing: the newest checkpoint was not evaluated; wait, or name another run")
        lines = [json.loads(line) for line in file.read_bytes().splitlines()]  # of text also at U+2028
        left_out.update(line["error"] for line in lines if line.get("error") in PROMPT_ERRORS)
        asked = [line for line in lines if line.get("error") not in PROMPT_ERRORS]
        reported += asked
        limits += [one.max_new_tokens] * len(asked)
    if not reported:
        raise InputMissing(f"{run_dir}: the evaluation asked none of its prompts: {dict(left_out)}; name another run")
    exported = Exported(folder, config)
    prompts = [exported.encode(report["prompt"], report.get("tools")) for report in reported]
    ties, different = 0, []
    for report, prompt, answer in zip(reported, prompts, exported.continued(prompts, limits), strict=True):
        text = exported.text(answer)
        if text == report["text"]:
            continue
        gap = exported.gap(prompt, answer, report["text"])
        if gap < TIE[config.rollout.dtype]:
            ties += 1
        else:
            found = {"exported": text, "evaluation": report["text"], "nats": round(gap, 3)}
            different.append({"index": report["index"], "prompt": report["prompt"], **found})
    compared = {"prompts": len(reported), "left_out": dict(left_out), "ties": ties, "different": different}
    return {"step": step, **compared}


class Exported:
    """The folder, as a user loads it."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        template = resolve_chat_template(config.model.path, config.model.chat_template)
        model = config.model.model_copy(update={"path": str(folder), "chat_template": template})
        self._task = Task(config.model_copy(update={"model": model}))

    def encode(self, prompt: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Token ids of a text or of messages, as the rollout servers make them."""
        return self._task.encode({"prompt": prompt, "columns": {"tools": tools}})

    def text(self, answer: list[int]) -> str:
        """As the rollout servers decode it, up to the first of rollout.stop."""
        return self._task.text(answer)

    def continued(self, prompts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """Greedy answers of transformers' own generate, prompts of equal length and limit of new tokens together."""
        answers: list[list[int]] = [[] for _ in prompts]
        for length, limit in sorted({(len(ids), limit) for ids, limit in zip(prompts, limits, strict=True)}):
            same = [i for i, ids in enumerate(prompts) if (len(ids), limits[i]) == (length, limit)]
            for chosen in (same[first : first + BATCH] for first in range(0, len(same), BATCH)):
                batch = torch.tensor([prompts[i] for i in chosen])
                mask = torch.ones_like(batch)
                made = self.model.generate(batch, attention_mask=mask, max_new_tokens=limit, do_sample=False)
                for i, row in zip(chosen, made, strict=True):
                    answers[i] = row[length:].tolist()
        return answers

    @torch.no_grad()
    def gap(self, prompt: list[int], answer: list[int], other: str) -> float:
        """Nats by which the answer's token is likelier than the other text's, where the two part; inf where none is."""
        ids = self._task.encode_text(other)
        pairs = zip(answer, ids, strict=False)
        place = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
        if place is None:
            return float("inf")
        logits = self.model(torch.tensor([prompt + answer[:place]])).logits[0, -1]
        return float(logits[answer[place]] - logits[ids[place]])


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest that is complete and was not rolled back. Raises CheckpointError."""
    found = [folder for folder in numbered(run_dir / "checkpoints") if not incomplete(folder)]
    if not found:
        said = "no checkpoint is complete yet; wait for one, or name another run"
        raise CheckpointError(f"{run_dir}/checkpoints: {said}")
    return found[0]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=program("slipstream.view.check_export"), description=__doc__)
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
