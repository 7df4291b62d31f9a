"""Tasks: prompts become the ids that the policy is trained on, answers the text that the reward judges."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from configs.loading import load
from replay.data import load_rows
from rollout_server.generate import Generator, LeaseFailed
from rollout_server.tasks.rewards.built_in.texts import exact
from rollout_server.tasks.task import PromptTooLong, Task, TaskError
from slipstream.runtime.fingerprint import model_fingerprint

SPECIAL = ["<pad>", "<eos>", "<unk>", "<bos>", "<|im_start|>", "<|im_end|>"]
SYMBOLS = [*SPECIAL, *"0123456789=?+ abcdefghijklmnopqrstuvwxyz\n"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, *, chat_template: str | None = None, with_bos: bool = False, eos: bool = True) -> Path:
    """A model folder without weights: one token per character, as in the quickstart."""
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(.|\n)"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 3)])
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "bos", *(["eos"] if eos else []))}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL[4:], **special)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "vocab_size": len(SYMBOLS)}))
    return folder


def task_of(folder: Path, **changes: Any) -> Task:
    keys = {"model.path": folder, "data.max_prompt_tokens": 64} | changes
    return Task(load("quickstart", [f"{key}={value}" for key, value in keys.items()]))


def row(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt, "ground_truth": "12", "data_source": "d", "extra_info": {"i": 1}, "columns": {"level": 2}}


def ids(text: str) -> list[int]:
    return [SYMBOLS.index(character) for character in text]


def test_text_is_tokenised_as_it_is_and_bos_is_added_once_where_the_tokenizer_does_so(tmp_path: Path) -> None:
    task = task_of(save_tokenizer(tmp_path))
    assert task.encode(row("21= ")) == ids("21= ")
    task = task_of(save_tokenizer(tmp_path, with_bos=True))
    assert task.encode(row("21=")) == [3, *ids("21=")]
    assert task.encode(row("<bos>21=")) == [3, *ids("21=")]


def test_messages_go_through_the_template_with_a_generation_prompt(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, chat_template=CHAT, with_bos=True)
    start, end, newline = 4, 5, ids("\n")
    expected = [start, *ids("user\n21?"), end, *newline, start, *ids("assistant\n")]
    messages = [{"role": "user", "content": "21?"}]
    assert task_of(folder).encode(row(messages)) == expected
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}=")
    assert task_of(folder, **{"model.chat_template": template}).encode(row(messages)) == ids("21?=")


def test_a_prompt_is_rendered_as_a_conversation_is(tmp_path: Path) -> None:
    """Arguments of calls as values, and the row's tools offered, in single turns too."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    task = task_of(save_tokenizer(tmp_path, chat_template=template))
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert task.encode({**row(messages), "columns": {"tools": tools}}) == ids("add 17")
    assert task.render(messages, tools) == "add 17"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, r"model\.chat_template"),
        ("{{ raise_exception('roles must alternate') }}", r"roles user, user: roles must alternate"),
    ],
)
def test_messages_that_no_template_takes_say_why(tmp_path: Path, template: str | None, says: str) -> None:
    task = task_of(save_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(TaskError, match=says):
        task.encode(row([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]))


TEXT_ONLY = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"


def test_a_row_with_pictures_and_a_template_of_text_fails_alone(tmp_path: Path) -> None:
    task = task_of(save_tokenizer(tmp_path, chat_template=TEXT_ONLY))
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "21="}]}]
    said = r"model\.chat_template: fails on messages of the roles user: .*TypeError"
    with pytest.raises(TaskError, match=said):
        task.encode(row(shown))
    generator = Generator(None, None, task, None)  # type: ignore[arg-type]
    with pytest.raises(LeaseFailed, match=said) as failed:
        generator.encode(row(shown))
    assert failed.value.reason == "prompt_not_rendered"
    assert task.encode(row([{"role": "user", "content": "21="}])) == ids("user 21=")


def test_long_and_empty_prompts_are_refused(tmp_path: Path) -> None:
    task = task_of(save_tokenizer(tmp_path), **{"data.max_prompt_tokens": 4})
    assert len(task.encode(row("1234"))) == 4
    with pytest.raises(PromptTooLong, match=r"5 tokens, data\.max_prompt_tokens is 4"):
        task.encode(row("12345"))
    with pytest.raises(TaskError, match="no tokens"):
        task.encode(row(""))


@pytest.mark.parametrize(
    ("generation", "eos", "expected"),
    [(None, True, (1,)), (5, True, (1, 5)), ([5, 0], True, (0, 1, 5)), (5, False, (5,)), ([1], True, (1,))],
)
def test_stop_tokens_are_those_of_the_folder_and_the_tokenizer(
    tmp_path: Path, generation: Any, eos: bool, expected: tuple[int, ...]
) -> None:
    folder = save_tokenizer(tmp_path, eos=eos)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    task = task_of(folder)
    assert task.stop_token_ids == expected
    assert model_fingerprint(str(folder))["eos_token_ids"] == ",".join(map(str, expected))


def test_folders_without_a_stop_token_or_a_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, eos=False)
    with pytest.raises(TaskError, match="eos_token_id"):
        task_of(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Nothing"}}')
    with pytest.raises(TaskError, match=r"the tokenizer cannot be loaded"):
        task_of(folder)


def test_decode_leaves_special_tokens_out_and_spaces_in(tmp_path: Path) -> None:
    task = task_of(save_tokenizer(tmp_path))
    answer = np.array([*ids("1 2 ?"), 1, 0], dtype=np.int32)
    assert task.decode(answer) == task.decode(answer.tolist()) == "1 2 ?"
    assert task.decode([]) == ""


def test_a_row_of_a_dataset_becomes_a_sample_that_a_reward_takes(tmp_path: Path) -> None:
    data = tmp_path / "sort.jsonl"
    data.write_text('{"prompt": "21=", "answer": "12"}\n')
    (loaded,) = load_rows(data)
    task = task_of(save_tokenizer(tmp_path))
    sample = task.sample(loaded, [*ids("12"), 1], "stop")
    assert sample == {
        "prompt": "21=",
        "completion": "12",
        "ground_truth": "12",
        "data_source": "sort",
        "extra_info": {},
        "columns": {"answer": "12"},
        "num_tokens": 3,
        "finish_reason": "stop",
    }
    assert exact(sample) == 1.0


def test_code_in_the_model_folder_is_never_run(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path)
    trap = tmp_path / "ran"
    (folder / "trap.py").write_text(f"open({str(trap)!r}, 'w').close()\nclass Trap: pass\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(TaskError):
        task_of(folder)
    assert not trap.exists()
