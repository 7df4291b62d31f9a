"""What the replay benchmark measures: its cases, the files that replay needs, and the groups that producers send."""

import argparse
import json
import shutil
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from configs.loading import validate
from configs.schema import Config
from replay import keys as make_keys
from replay import messages as m

Int32 = NDArray[np.int32]
VOCAB_SIZE = 151_936
TEXT_BYTES_PER_TOKEN = 4
"""Groups carry their decoded answers as well."""
LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)
TOOL_SHARE = 0.25
"""Answers in which a fifth of the tokens, in one span, came from an environment."""
MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB_SIZE}
MODEL |= {"hidden_size": 64, "num_hidden_layers": 2}
"""Replay reads what identifies a model; it needs no weights."""
TOKENIZER = {"model": {"type": "WordLevel", "vocab": {"<eos>": 0}}, "added_tokens": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the producers send: lognormal answers in groups."""

    median: int = 2000
    sigma: float = 0.7
    cap: int = 16_384
    prompt: int = 256
    """Tokens of every prompt; they are not counted as tokens of the result."""
    group_size: int = 8
    groups_per_step: int = 64
    pool: int = 256
    """Different groups that are prepared; a producer process goes through them in turn."""
    rows: int = 8192
    """Prompts of the data set."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `hold` fills the buffer and takes nothing, for memory over queued bytes."""

    producers: int = 64
    curve: bool = True
    fsync: Literal["every", "interval", "never"] = "interval"
    lag: int = 1
    hold: bool = False

    def __str__(self) -> str:
        curve = "CURVE" if self.curve else "no CURVE"
        return f"{self.producers} producers, {curve}, fsync {self.fsync}" + (", buffer held" if self.hold else "")


MAIN = Case()
CASES = [MAIN, Case(curve=False), Case(fsync="every"), Case(fsync="never")]
CASES += [Case(producers=count) for count in (1, 10, 300, 1000)]
CASES += [Case(lag=8, hold=True), Case(producers=1000, lag=8, hold=True)]
QUICK_CASES = [MAIN, Case(curve=False), Case(fsync="every"), Case(producers=300), Case(lag=2, hold=True)]
QUICK_LOAD = Load(pool=48, rows=1024)


def write_files(options: argparse.Namespace) -> None:
    """Write the model folder, the prompts and the keys, anew each time."""
    work, load = options.work, options.load
    for folder in (work / "model", work / "keys"):
        shutil.rmtree(folder, ignore_errors=True)
    (work / "model").mkdir(parents=True)
    (work / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (work / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    rng = np.random.default_rng(load.seed)
    with (work / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(load.rows):
            prompt = random_text(rng, load.prompt * TEXT_BYTES_PER_TOKEN)
            file.write(json.dumps({"prompt": prompt, "answer": prompt[:8]}) + "\n")
    make_keys.make(work / "keys", ["producers"], force=False)


def config_of(options: argparse.Namespace, case: Case) -> Config:
    """The configuration of one case. Raises ConfigError when the options do not fit together."""
    load, work = options.load, options.work
    sizes = {"group_size": load.group_size, "groups_per_step": load.groups_per_step, "max_new_tokens": load.cap}
    endless = {"total_steps": 1_000_000, "batch_deadline_s": options.seconds + options.limit_s}
    tree: dict[str, Any] = {
        "run": {"name": "case", "dir": str(work / "runs"), "seed": load.seed},
        "model": {"path": str(work / "model")},
        "data": {"train": str(work / "prompts.jsonl"), "max_prompt_tokens": load.prompt},
        "rollout": sizes,
        "replay": {"async_lag": case.lag, "fsync": case.fsync},
        "learner": endless | {"max_tokens_per_microbatch": load.prompt + load.cap},
        "evaluation": {"every_steps": 0},
        "network": {"keys": str(work / "keys") if case.curve else None, "silent_after_s": 30.0},
        "placement": {"device": "cpu", "split": "1:1"},
    }
    return validate(tree, f"the settings of {case}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A group without what its lease decides: the id, the attempt and the versions."""

    arrays: dict[str, Any]
    """Fields of Group that no lease changes."""
    young: Int32
    """1 for tokens that were sampled after the weights changed during the answer, else 0."""

    def group(self, lease: m.Lease, version: int) -> m.Group:
        """The answer to a lease by a server that holds `version`: its tokens are of that version or the one before."""
        oldest = max(lease.min_version, version - 1)
        return m.Group(
            pass_=lease.pass_,
            index=lease.index,
            attempt=lease.attempt,
            reward_metrics={"reward/seconds": 0.01},
            generate_s=1.0,
            data_source="bench",
            versions=np.int32(oldest) + self.young * np.int32(version - oldest),
            **self.arrays,
        )


def random_text(rng: np.random.Generator, length: int) -> str:
    """ASCII text of six random bits a character."""
    return LETTERS[rng.integers(0, len(LETTERS), length, dtype=np.uint8)].tobytes().decode("ascii")


def prepare(load: Load) -> list[Prepared]:
    """`load.pool` groups; the same load gives the same groups."""
    rng = np.random.default_rng([load.seed, 1])
    return [_one(load, rng) for _ in range(load.pool)]


def _one(load: Load, rng: np.random.Generator) -> Prepared:
    drawn = load.median * np.exp(load.sigma * rng.standard_normal(load.group_size))
    lengths = np.clip(drawn, 1, load.cap).astype(np.int32)
    total = int(lengths.sum())
    mask, young = np.ones(total, dtype=np.uint8), np.ones(total, dtype=np.int32)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        begin = end - length
        young[begin : begin + rng.integers(0, length + 1)] = 0
        if rng.random() < TOOL_SHARE:
            span = begin + int(rng.integers(0, length))
            mask[span : min(end, span + length // 5)] = 0
    arrays = {
        "prompt_ids": rng.integers(0, VOCAB_SIZE, load.prompt, dtype=np.int32),
        "lengths": lengths,
        "token_ids": rng.integers(0, VOCAB_SIZE, total, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": -rng.standard_exponential(total, dtype=np.float32),
        "rewards": rng.random(load.group_size, dtype=np.float32),
        "texts": [random_text(rng, int(n) * TEXT_BYTES_PER_TOKEN) for n in lengths],
        "finish_reasons": ["length" if n == load.cap else "stop" for n in lengths],
    }
    return Prepared(arrays, young)
