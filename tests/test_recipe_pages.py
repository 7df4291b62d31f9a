"""The recipes can be followed: every command of a page runs, in the page's order, on stand-ins for what is downloaded.

Stand-ins are model folders with the config.json of the real model, a tokenizer of words and no weights to speak of, and
a few rows of each official data set. Runs end at `--dry-run`: files, rows, rewards, placement and the memory of a
learner GPU are checked by then, as if this machine had eight GPUs of 80 GB.
"""

import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from configs.loading import load
from examples.random_qwen3 import write_tokenizer
from learner import rules
from rollout_server.tasks.sandbox.probe import isolation
from slipstream.check import checks
from tests.test_docs import FENCE, ROOT, name_of, started

PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
MODELS = {
    "Qwen2.5-0.5B-Instruct": (896, 24, 4864, 14, 2),
    "Qwen2.5-Coder-0.5B-Instruct": (896, 24, 4864, 14, 2),
    "Qwen2.5-1.5B-Instruct": (1536, 28, 8960, 12, 2),
    "Qwen2.5-3B": (2048, 36, 11008, 16, 2),
    "Qwen2.5-Coder-3B-Instruct": (2048, 36, 11008, 16, 2),
    "Qwen2-7B-Instruct": (3584, 28, 18944, 28, 4),
    "Qwen2.5-7B": (3584, 28, 18944, 28, 4),
    "Qwen2.5-7B-Instruct": (3584, 28, 18944, 28, 4),
    "Qwen3-0.6B": (1024, 28, 3072, 16, 8),
    "SmolLM2-135M-Instruct": (576, 30, 1536, 9, 3),
}
"""Sizes by the config.json of each model."""
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
GSM8K = {"question": "How many?", "answer": "48+24 = 72\n#### 72"}
MATH = {"problem": "What is $1+1$?", "level": "Level 3", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
MBPP = {"text": "Write a function f.", "code": "", "test_setup_code": "", "test_list": ["assert f(1) == 1"]}
HOSTS = "".join(f"node{number} 10.0.0.{number + 1}\n" for number in range(4))
MADE_ELSEWHERE = {
    "scripts/install.sh",
    "scripts/quickstart.sh",
    "scripts.get_smollm2",
    "scripts.make_rows",
    "examples.calculator",
}
"""Run by tests/scripts and tests/e2e; here, what they make is there."""


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each command, from the module or script on."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            if words:
                yield started(words)


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has downloaded or made before."""
    root = tmp_path_factory.mktemp("recipes")
    for name, sizes in MODELS.items():
        folder = root / "models" / name
        folder.mkdir(parents=True)
        tied = {"tie_word_embeddings": "7B" not in name, "vocab_size": 49152 if "Smol" in name else 151936}
        model = dict(zip(SIZES, sizes, strict=True)) | tied | {"max_position_embeddings": 32768}
        family = {"model_type": "llama"} if "Smol" in name else {"model_type": "qwen2"}
        (folder / "config.json").write_text(json.dumps(model | family))
        save_file({"model.norm.weight": torch.ones(1)}, folder / "model.safetensors")
        write_tokenizer(folder, 512)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    for name, row in {"gsm8k": GSM8K, "math/algebra": MATH, "mbpp/full": MBPP}.items():
        folder = root / "data" / name
        folder.mkdir(parents=True)
        for split in ("train", "test"):
            if row is GSM8K:
                (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
            else:
                parquet.write_table(pyarrow.Table.from_pylist([row]), folder / f"{split}-00000-of-00001.parquet")
    for family, row in {
        "chain_sum": ("1 + 1 =", "2"),
        "spell_backward": ("Spell this word backward: no", "on"),
    }.items():
        (root / "data" / family).mkdir()
        for split in ("train", "eval"):
            text = json.dumps(dict(zip(("question", "answer"), row, strict=True)))
            (root / "data" / family / f"{split}.jsonl").write_text(text + "\n")
    (root / "hosts").write_text(HOSTS)
    return root


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that begin with the name of a file."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "bash" and (found := re.match(r"# ([\w-]+\.(?:yaml|sh|toml|py))\n", text)) is not None:
            (folder / found[1]).write_text(text, encoding="utf-8")


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `python -m MODULE ...` in this process."""
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    return int(ended.value.code or 0)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_can_be_followed(
    page: Path, downloads: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify", reason="needs the package math-verify (extra math)")
    if page.stem in ("gsm8k", "code") and not isolation().is_whole:
        pytest.skip(f"this machine: {isolation()}")
    monkeypatch.chdir(downloads)
    shutil.rmtree("keys", ignore_errors=True)
    write_files(page, downloads)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("slipstream.launch.machine.count_gpus", lambda: 8)
    monkeypatch.setattr("slipstream.launch.machine.torch_has_cuda", lambda: True)
    monkeypatch.setattr("learner.policy.memory.gpu_bytes", lambda: 80 * 10**9)
    # The machine of a recipe has a larger disk than this one, and packages of GPUs.
    monkeypatch.setattr("slipstream.check.checks.CHECKS", checks.OF_THE_RUN)
    runs, problems = 0, []
    for words in commands(page):
        if words[0] in MADE_ELSEWHERE or words[:1] == ["rollout_server.tasks.sandbox"]:
            continue
        if words[0] == "learner.main" and "calculator" in words:  # a run on a CPU: tests/e2e/test_environment_runs.py
            continue
        if words[0] in ("learner.main", "slipstream.launch"):
            words, runs = [*words, "--dry-run"], runs + 1
        if (code := run(words, monkeypatch)) != 0:
            problems.append((shlex.join(words), code, capfd.readouterr().err[-600:]))
    assert problems == []
    assert runs >= 3, f"{name_of(page)}: commands for 1 GPU, 8 GPUs and 2 nodes"


def test_what_recipes_say_to_watch_is_in_the_metrics() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    known = [re.compile(re.sub(r"<[^>]*>", "[^/]+(/[^/]+)?", re.escape(name))) for name in documented]
    for page in PAGES:
        named = re.findall(r"^\| (`[^|]*`) \|", page.read_text(encoding="utf-8").partition("## What to watch")[2], re.M)
        names = [name for cell in named for name in re.findall(r"`([^`]+)`", cell)]
        assert len(names) >= 4
        assert [name for name in names if not any(one.fullmatch(name) for one in known)] == []


def test_dapo_is_what_its_presets_set() -> None:
    for preset in ("dapo-qwen2.5-3b-8gpu", "dapo-qwen2.5-7b-2nodes"):
        algorithm, room = load(preset).algorithm, load(preset).rollout.max_new_tokens
        clip = rules.chosen(load(preset)).loss.options
        assert (clip["clip_low"], clip["clip_high"]) == (0.2, 0.28)
        assert (algorithm.aggregation, algorithm.kl) == ("token", "none")
        assert str(algorithm.dynamic_sampling) == "flat" and algorithm.overlong_buffer == room // 4
        assert algorithm.overlong_penalty == 0.5 and not algorithm.overlong_filter
