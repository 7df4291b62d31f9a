"""Encodes prompts, decodes answers, builds samples for the reward.

Token ids are made here once and never again: what the engine continues and the learner trains on are these ids,
so no later re-tokenisation can drift from them.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema import Config
from rollout_server.tasks.pictures import PictureProcessor, Prompt, Seen
from rollout_server.tasks.pictures import TaskError as TaskError
from rollout_server.tasks.rewards import Sample
from rollout_server.tasks.stopping import first_stop
from slipstream.runtime.fingerprint import TEMPLATE_ERRORS, resolve_chat_template, stop_token_ids, template_failure

GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that are nothing but their tokenizer.json."""


class PromptTooLong(TaskError, code="SLIP-TASK-02"):
    """The prompt has more tokens than `data.max_prompt_tokens`."""


class Task:
    """Tokenizer, chat template and end tokens of a run.

    Plain-text prompts are tokenised as they are; no special tokens are added, except the bos token of a tokenizer
    that puts one there by default (Llama does, Qwen does not). Message prompts go through the chat template, with
    the header of the assistant's turn appended; a row's column `tools`, a list of JSON schemas, is given to it.
    """

    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer: the tokenizer's eos token and those of generation_config.json."""

    def __init__(self, config: Config) -> None:
        """Load the tokenizer from local files; code in the model folder is never run.

        Raises:
            TaskError: the tokenizer cannot be loaded, or nothing says which token ends an answer.
            FingerprintError: generation_config.json or the chat template is broken.
        """
        path = config.model.path
        self._chat_template = resolve_chat_template(path, config.model.chat_template)
        self._options = dict(config.model.chat_template_options)
        stops = stop_token_ids(path)
        try:
            self._tokenizer = load_tokenizer(path)
        except Exception as error:  # the tokenizers library raises bare Exception on a broken file
            raise TaskError(f"model.path: {path}: the tokenizer cannot be loaded: {error}") from error
        self._looker = PictureProcessor(path)
        self._max_prompt_tokens = config.data.max_prompt_tokens
        eos, bos = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        self.stop_token_ids = tuple(sorted({*stops, *([] if eos is None else [eos])}))
        if not self.stop_token_ids:
            raise TaskError(
                f"model.path: {path}: neither generation_config.json nor the tokenizer names an eos token, so every"
                " answer would run to rollout.max_new_tokens; add eos_token_id to generation_config.json"
            )
        starts_with_bos = bos is not None and self._tokenizer("").input_ids[:1] == [bos]
        self._prefix = [bos] if starts_with_bos else []
        self.stops = tuple(config.rollout.stop)
        """rollout.stop."""

    def encode(self, row: dict[str, Any]) -> list[int]:
        """Token ids of a row's prompt; raises as `prompt`."""
        return self.prompt(row).token_ids

    def prompt(self, row: dict[str, Any], most: int | None = None) -> Prompt:
        """A row's prompt with its pictures.

        Raises:
            PromptTooLong: more tokens than `most`; None is `data.max_prompt_tokens`.
            TaskError: messages without a chat template, or the template refuses them; a picture cannot be used.
        """
        prompt = row["prompt"]
        if isinstance(prompt, str):
            token_ids = self.begin(prompt)
        else:
            tools = row.get("columns", {}).get("tools")
            token_ids = self.encode_text(self.render(prompt, tools if isinstance(tools, list) else None))
        seen = self.look(row)
        found = Prompt(token_ids) if seen is None else Prompt(seen.expand(token_ids), seen.pictures, seen.sources)
        token_ids = found.token_ids
        if not token_ids:
            raise TaskError(f"the prompt {str(prompt)[:80]!r} has no tokens")
        if len(token_ids) > (most or self._max_prompt_tokens):
            twice = f", and a teacher's prompt may have {most}" if most else ""
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens, data.max_prompt_tokens is {self._max_prompt_tokens}{twice};"
                " raise it or shorten the prompt"
            )
        return found

    def look(self, row: dict[str, Any]) -> Seen | None:
        """A row's pictures, decoded, where it has any. Raises TaskError: one cannot be used."""
        images = row.get("images")
        return self._looker.look(images) if images else None

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text as it stands, without special tokens of the tokenizer's own."""
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    def begin(self, text: str) -> list[int]:
        """Token ids of text that begins a context, with the bos token where the tokenizer puts one."""
        token_ids = self.encode_text(text)
        return token_ids if token_ids[:1] == self._prefix else self._prefix + token_ids

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Messages as text, with the header of the assistant's turn at the end. Raises TaskError, as `encode` does."""
        if self._chat_template is None:
            raise TaskError(
                "messages, and the tokenizer has no chat template; set model.chat_template (Jinja text or a file), or"
                " give text or token ids"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [with_values(message) for message in messages],
                tools=list(tools) if tools else None,
                chat_template=self._chat_template,
                add_generation_prompt=True,
                tokenize=False,
                **self._options,
            )
        except TEMPLATE_ERRORS as error:
            raise TaskError(template_failure(messages, error)) from error
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer without special tokens."""
        # Cleaning up spaces would show the reward another text than the policy wrote.
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, up to the first of rollout.stop."""
        stop = first_stop(self.decode, token_ids, self.stops)
        return self.decode(token_ids) if stop is None else stop.text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token by itself, special tokens included."""
        return [str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in token_ids]

    def sample(self, row: dict[str, Any], token_ids: Sequence[int], finish_reason: str) -> Sample:
        """What a reward function sees of one answer of these tokens."""
        return {
            "prompt": row["prompt"],
            "completion": self.text(token_ids),
            "ground_truth": row["ground_truth"],
            "data_source": row["data_source"],
            "extra_info": row["extra_info"],
            "columns": row["columns"],
            "num_tokens": len(token_ids),
            "finish_reason": finish_reason,
        }


def with_values(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have values as templates expect them; OpenAI has arguments as text of JSON."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = dict(call.get("function") or {})
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # then it stays the text that it is
            function["arguments"] = json.loads(function.get("arguments", ""))
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else dict(message)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model folder; code in the folder is never run. Raises bare Exception for a broken file."""
    config = Path(path) / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class") in GENERIC_TOKENIZERS:
        # Without the choice among all models' tokenizers, importing takes half as long.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
