"""What a rank needs to load a model of several files: its own rows, and little else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tiny_models import CONFIGS, SIZES, save_model
from transformers import AutoModelForCausalLM

from weight_bus.digest import combined, slice_digest

HERE = Path(__file__).parent
DEADLINE_S = 100
LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 16384,
}
SLACK_BYTES = 32 * 1024 * 1024


def test_no_rank_holds_the_model_whole(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny")
    config = CONFIGS["qwen3"](**{**SIZES, **LARGE, "tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "large", max_shard_size="40MB")
    files = sorted((tmp_path / "large").glob("*.safetensors"))
    assert len(files) > 2
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent.parent}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "loading_rank.py"), str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    seen = [json.loads(output.splitlines()[-1]) for output in outputs]
    # The pages of a file that are mapped while its rows are copied count as memory of the process, too.
    mapped = max(file.stat().st_size for file in files)
    for rank in seen:
        assert rank["whole"] > 300_000_000 and rank["held"] <= 0.51 * rank["whole"]
        assert rank["growth"] <= rank["held"] + mapped + SLACK_BYTES < 0.9 * rank["whole"], rank
    expected = {name: slice_digest(p.detach().float()) for name, p in model.named_parameters()}
    assert {rank["digest"] for rank in seen} == {combined(expected)}
