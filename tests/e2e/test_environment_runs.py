"""Whole runs with environments: a tool is learnt in two turns; a game is played; what is trained is replayed alike."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from learner.record.summary import summarize
from tests.support.runs import ROOT, Input, Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TOOLS = (
    "environment.function={tools: {tools: [calculator]}}",
    "data.max_prompt_tokens=8",
    "environment.turn_timeout_s=30",
)
MOVES = [f"[{number}]" for number in range(1, 10)]
STEPS = 20


def test_a_tiny_model_learns_to_ask_a_calculator(tmp_path: Path, zygote: Any) -> None:
    made = [sys.executable, "-m", "examples.calculator", "--out", str(tmp_path / "calculator")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    runs = Runs(tmp_path, Input(tmp_path / "calculator"), zygote)
    sizes = ("rollout.groups_per_step=32", "rollout.group_size=8", "rollout.max_new_tokens=32")
    run = runs(*TOOLS, *sizes, "learner.lr=5e-4", "evaluation.every_steps=20", "evaluation.num_prompts=256", steps=40)
    try:
        assert run.wait(300) == 0, run.text()[-3000:]
        found, steps = summarize(run.folder, None), run.steps()
        print(found, [(row["episode/turns"], row["critic/score/mean"]) for row in steps[::8]])
        assert found["greedy_after"] >= found["greedy_before"] + 0.3 and found["digests_equal"], found
        assert steps[-1]["episode/turns"] > steps[0]["episode/turns"], "it asks more often"
        assert found["groups_trained_twice"] == 0
    finally:
        runs.close()


EXAMPLE = f"{Path(__file__).parents[2]}/examples/environments/textarena_games.py:rollout"


def arena(folder: Path) -> Input:
    """A random model that writes characters and moves, and prompts with seeds of games."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    symbols = ["<pad>", "<eos>", "<unk>", *MOVES, "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({text: at for at, text in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(move, normalized=False, special=False) for move in MOVES])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 2048, "vocab_size": 128}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True, eos_token_id=1, dtype="float32"))
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=True)
    model.float().save_pretrained(folder / "model")
    for name, count, first in (("train.jsonl", 500, 0), ("eval.jsonl", 16, 1000)):
        rows = [{"prompt": "Play.", "answer": "", "seed": first + number} for number in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Input(folder)


def test_a_game_of_textarena_is_trained_on(tmp_path: Path, zygote: Any) -> None:
    pytest.importorskip("textarena", reason="the extra textarena is not installed")
    options = "{game: GuessTheNumber-v0, style: text, max_turn_tokens: 6, settings: {max_number: 9, max_turns: 3}}"
    runs = Runs(tmp_path, arena(tmp_path / "arena"), zygote)
    sizes = ("data.max_prompt_tokens=1024", "rollout.max_new_tokens=512", "rollout.groups_per_step=4")
    played = (
        f"environment.function={{{EXAMPLE}: {options}}}",
        "environment.max_turns=6",
        "environment.turn_timeout_s=30",
    )
    run = runs(*played, *sizes, "rollout.group_size=4", "learner.lr=1e-3", "evaluation.every_steps=20", steps=STEPS)
    try:
        assert run.wait(300) == 0, run.text()[-3000:]
        steps = run.steps()
        told = (
            "critic/score/mean",
            "episode/turns",
            "episode/moves",
            "episode/invalid_move",
            "episode/environment_tokens",
        )
        print([{name: round(row[name], 2) for name in told} for row in steps[::4]])
        assert len(steps) == STEPS and all(row["episode/environment_tokens"] > 20 for row in steps)
        assert all(row["training/rollout_probs_diff_max"] < 0.02 for row in steps), "contexts are those of the engine"
        assert summarize(run.folder, None)["groups_trained_twice"] == 0
    finally:
        runs.close()


def test_a_killed_server_and_a_replayed_journal(tmp_path: Path, zygote: Any) -> None:
    """Episodes that were running begin again; what was trained gives the same digests from the journal alone."""
    made = [sys.executable, "-m", "examples.calculator", "--out", str(tmp_path / "calculator")]
    subprocess.run(made, cwd=ROOT, check=True, timeout=200)
    runs = Runs(tmp_path, Input(tmp_path / "calculator"), zygote)
    run = runs(*TOOLS, "rollout.max_new_tokens=32", "replay.journal_keep=all", steps=6)
    try:
        run.wait_for_step(2)
        run.kill("rollout_server.main")
        assert run.wait(200) == 0, run.text()[-3000:]
        assert run.groups() == list(dict.fromkeys(run.groups())), "a group was trained twice"
        played = runs.start(["learner.main", "--replay", str(run.folder)], run.folder)
        assert played.wait() == 0, played.text()[-3000:]
        (found,) = [json.loads(line) for line in played.text().splitlines() if line.startswith("{")]
        assert found["equal"] == found["steps"] == 6, found
    finally:
        runs.close()
