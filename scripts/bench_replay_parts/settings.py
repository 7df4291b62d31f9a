"""What is measured: the load, the cases, and the configuration and files that replay needs for them."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from configs.loading import dump, validate
from configs.schema import Config
from replay import keys as make_keys

Fsync = Literal["every", "interval", "never"]
VOCAB_SIZE = 151_936
TEXT_BYTES_PER_TOKEN = 4
"""Groups carry their decoded answers as well."""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
"""Replay reads what identifies a model; it needs no weights."""
TOKENIZER = {"model": {"type": "WordLevel", "vocab": {"<eos>": 0}}, "added_tokens": []}
LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", dtype=np.uint8)


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

    def write(self, path: Path) -> None:
        """As JSON, for the producers."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Load":
        """What `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement. `hold` fills the buffer and takes nothing, for memory over queued bytes."""

    producers: int = 64
    curve: bool = True
    fsync: Fsync = "interval"
    lag: int = 1
    hold: bool = False

    def __str__(self) -> str:
        curve = "CURVE" if self.curve else "no CURVE"
        return f"{self.producers} producers, {curve}, fsync {self.fsync}" + (", buffer held" if self.hold else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command that all cases share."""

    load: Load
    work: Path
    seconds: float
    warmup_steps: int
    checkpoint_every: int
    limit_s: float
    """No case may take longer than this beyond its own `seconds`."""
    profile: bool = False


def prepare(options: Options) -> None:
    """Write the model folder, the prompts and the keys, anew each time."""
    work = options.work
    for folder in (work / "model", work / "keys"):
        shutil.rmtree(folder, ignore_errors=True)
    (work / "model").mkdir(parents=True)
    (work / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (work / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    rng = np.random.default_rng(options.load.seed)
    with (work / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(options.load.rows):
            prompt = random_text(rng, options.load.prompt * TEXT_BYTES_PER_TOKEN)
            file.write(json.dumps({"prompt": prompt, "answer": prompt[:8]}) + "\n")
    make_keys.make(work / "keys", ["producers"], force=False)


def random_text(rng: np.random.Generator, length: int) -> str:
    """ASCII text of six random bits a character."""
    return LETTERS[rng.integers(0, len(LETTERS), length, dtype=np.uint8)].tobytes().decode("ascii")


def config_of(options: Options, case: Case, name: str) -> Config:
    """The configuration of one case. Raises ConfigError when the options do not fit together."""
    load = options.load
    tree: dict[str, Any] = {
        "run": {"name": name, "dir": str(options.work / "runs"), "seed": load.seed},
        "model": {"path": str(options.work / "model")},
        "data": {"train": str(options.work / "prompts.jsonl"), "max_prompt_tokens": load.prompt},
        "rollout": {
            "group_size": load.group_size,
            "groups_per_step": load.groups_per_step,
            "max_new_tokens": load.cap,
        },
        "replay": {"async_lag": case.lag, "fsync": case.fsync},
        "learner": {
            "total_steps": 1_000_000,
            "max_tokens_per_microbatch": load.prompt + load.cap,
            "batch_deadline_s": options.seconds + options.limit_s,
        },
        "evaluation": {"every_steps": 0},
        "network": {"keys": str(options.work / "keys") if case.curve else None, "silent_after_s": 30.0},
        "placement": {"device": "cpu", "split": "1:1"},
    }
    return validate(tree, f"the settings of {case}")


def write_config(config: Config, path: Path) -> None:
    """The configuration as a YAML file that every process of the case reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(config), encoding="utf-8")
