"""The preset gsm8k-qwen2.5-1.5b-4gpu, end to end with a tiny random Qwen2 and hand-made rows of GSM8K's form."""

import json

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OWN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STEPS = 3
SMALL = {
    "reward.function": "numeric",
    "rollout.engine": "torch",
    "rollout.dtype": "float32",
    "rollout.groups_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 12,
    "learner.compute_dtype": "float32",
    "learner.max_tokens_per_microbatch": 2048,
    "weight_bus.backend": "gloo",
    "weight_bus.bucket_bytes": 1048576,
    "placement.device": "cpu",
    "evaluation.every_steps": 3,
    "evaluation.num_prompts": 8,
    "tracking.save_rollouts_every": 1,
    "limits.flat_reward_steps": 0,
    "checkpoint.every_steps": 0,
}


def save_model(folder):
    """A tiny Qwen2, and a byte-level tokenizer with Qwen2.5's special tokens, which it returns."""
    import tiny_models
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = OWN_TEMPLATE
    fast.save_pretrained(folder)
    ids = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id, "bos_token_id": None}
    tiny_models.save_model(folder, "qwen2", vocab_size=len(fast), max_position_embeddings=1024, **ids)
    return fast


def save_rows(path, first, count):
    rows = []
    for n in range(first, first + count):
        question = f"Ana has {n} apples and buys {n + 2} more. How many apples does she have?"
        answer = f"She has {n} + {n + 2} = <<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2} apples.\n#### {2 * n + 2}"
        rows.append({"question": question, "answer": answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_the_preset_runs_on_a_cpu_and_renders_the_chat_template(launch, tmp_path):
    tokenizer = save_model(tmp_path / "model")
    rows = save_rows(tmp_path / "train.jsonl", first=1, count=40)
    save_rows(tmp_path / "test.jsonl", first=50, count=8)
    run = launch(
        *(f"{key}={value}" for key, value in SMALL.items()),
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.jsonl",
        f"data.eval={tmp_path}/test.jsonl",
        steps=STEPS,
        split="1:2",
        arguments=("--config", "gsm8k-qwen2.5-1.5b-4gpu"),
    )
    assert run.wait() == 0, run.text()[-3000:]
    steps = run.steps()
    assert [row["training/global_step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(max(map(int, row["training/lag_histogram"])) <= 1 for row in steps)
    assert steps[-1]["weight_sync/digests_equal"] is True
    assert {row["version"] for row in run.rows() if any(key.startswith("val-core/") for key in row)} == {0, 3}

    questions = {row["question"] for row in rows}
    head = (
        "<|im_start|>system\nReason step by step, then write the final number after ####.<|im_end|>\n<|im_start|>user\n"
    )
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    rollouts = [
        json.loads(line)
        for file in sorted((run.folder / "rollouts").glob("step_*/rank_*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert rollouts, "every step's trajectories are saved"
    for rollout in rollouts:
        prompt = tokenizer.decode(rollout["prompt_ids"], skip_special_tokens=False)
        assert prompt.startswith(head) and prompt.endswith(tail), prompt
        assert prompt[len(head) : -len(tail)] in questions, prompt
        special = tokenizer.convert_tokens_to_ids("<|im_start|>")
        assert rollout["prompt_ids"].count(special) == 3, "special tokens are single tokens, not their letters"
        assert rollout["reward"] in (0.0, 1.0)
