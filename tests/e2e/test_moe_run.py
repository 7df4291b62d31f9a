"""A whole run of a mixture of experts on a CPU: trained, proven, its routing replayed, also after replay was killed."""

from importlib.util import find_spec

import pytest
import torch

from learner.record.summary import summarize
from tests.support.runs import Input, Runs, untrained_input

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id", "max_position_embeddings", "intermediate_size")


def mixture_input(folder) -> Input:
    """The quick start's prompts and tokenizer, and a mixture of eight experts of about its size."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    made = untrained_input(folder)
    dense = Qwen3Config.from_pretrained(folder / "model").to_dict()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**{name: dense[name] for name in (*SIZES, *TOKENS)}, **experts)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    return made


def test_a_mixture_is_trained_by_the_experts_that_the_engine_chose(tmp_path, zygote):
    runs = Runs(tmp_path, mixture_input(tmp_path / "data"), zygote)
    try:
        run = runs("replay.async_lag=0", "replay.journal_keep=all", steps=8)
        run.wait_for_step(3)
        run.kill("replay.main")
        assert run.wait() == 0, run.text()[-3000:]
        found, steps = summarize(run.folder, None), run.steps()
        assert found["digests_equal"] and found["groups_trained_twice"] == 0, found
        assert [row["moe/routing_overridden"] for row in steps] == [0.0] * 8
        assert max(row["training/rollout_logprobs_diff_max"] for row in steps) <= 1e-5
        stored = sum(path.stat().st_size for path in (run.folder / "journal" / "routing").iterdir())
        print(stored, "bytes of routing;", found)
        again = runs.start(["learner.main", "--replay", str(run.folder)], tmp_path / "run-replay")
        assert again.wait() == 0 and '"equal": 8' in again.text(), again.text()[-3000:]
    finally:
        runs.close()


@pytest.mark.skipif(find_spec("sglang") is None, reason="needs the extra sglang-cpu")
def test_a_mixture_is_trained_with_sglang_on_a_cpu(tmp_path):
    runs = Runs(tmp_path, mixture_input(tmp_path / "data"), None)
    try:
        run = runs("rollout.engine=sglang", "replay.async_lag=0", "rollout.on_new_weights=drain", steps=4)
        assert run.wait() == 0, run.text()[-3000:]
        found, steps = summarize(run.folder, None), run.steps()
        assert found["digests_equal"] and len(steps) == 4, found
        assert max(row["moe/routing_overridden"] for row in steps) <= 0.001
        assert max(row["training/rollout_logprobs_diff_max"] for row in steps) <= 1e-4
    finally:
        runs.close()
