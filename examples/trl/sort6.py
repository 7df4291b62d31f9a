"""Sort six digits under TRL's asynchronous GRPO trainer, with Slipstream's rollouts and weight bus, on a CPU.

`python -m examples.trl.sort6 --steps 10` makes the quick start's model and prompts where they are missing,
trains with the extra `slipstream-rl[trl]`, and prints one line of JSON at the end:

    {"steps": 10, "versions": 11, "proven": 11, "digests_equal": true, "first_reward": 0.31, "last_reward": 0.71, ...}

`proven` counts engines that held a version with the digest of TRL's weights. Exit code 0 needs one for the last
version, and no digest that differed; a version that is published while no server lives is proven by none.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.loading import ConfigError, load
from examples import sort6
from examples.folder import MakeError

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
"""Of TRL, as torchrun or `accelerate launch` have started them."""
MICROBATCH = 64 // PROCESSES
LEARNING_RATE = 5e-4
SETTINGS = ("run.name=trl-sort6", "placement.split=1:1", "rollout.groups_per_step=32", "evaluation.every_steps=0")
PATHS = {"model.path": "model", "data.train": "train.jsonl", "data.eval": "eval.jsonl"}


def train(steps: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train, and return what the closing line reports. Raises ConfigError."""
    paths = [f"{key}={folder / name}" for key, name in PATHS.items()]
    config = load("quickstart", [*SETTINGS, *paths, *overrides, f"learner.total_steps={steps}"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from examples.trl import connect, trl_arguments
    from examples.trl.on_cpu import use_cpu

    torch.set_num_threads(1)
    use_cpu()
    args = AsyncGRPOConfig(
        str(Path(config.run_dir) / "trl"),
        learning_rate=LEARNING_RATE,
        use_cpu=True,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **trl_arguments(config, per_device_train_batch_size=MICROBATCH, processes=PROCESSES),
    )
    worker, transfer = connect(config, args)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    trainer = AsyncGRPOTrainer(
        config.model.path,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [""]}),  # TRL wants one; the prompts are those of data.train
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    started = time.monotonic()
    trainer.train()
    run = worker.run
    return {
        "steps": trainer.state.global_step,
        "versions": run.version + 1,
        "proven": sum(len(run.proven.get(version, ())) for version in range(run.version + 1)),
        "digests_equal": not run.differing and bool(run.proven.get(run.version)),
        "first_reward": round(run.rewards[0], 4) if run.rewards else None,
        "last_reward": round(run.rewards[-1], 4) if run.rewards else None,
        "seconds": round(time.monotonic() - started, 1),
        "run_dir": run.config.run_dir,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m examples.trl.sort6", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="updates of TRL (default: %(default)s)")
    parser.add_argument(
        "--data", type=Path, default=Path("data/sort6"), help="model and prompts (default: %(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override one key; repeatable")
    args = parser.parse_args(argv)
    try:
        if not (args.data / "model" / "config.json").exists():
            sort6.make(args.data)
        report = train(args.steps, args.data, args.set)
    except (MakeError, ConfigError) as error:
        sys.stderr.write(f"examples.trl.sort6: {error}\n")
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0  # rank 0 has the run
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["digests_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
