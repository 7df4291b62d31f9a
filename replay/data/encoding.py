"""From rows with answers to token ids and loss masks, as the policy would read and write them.

Conversations go through the chat template. What of them is in the loss, the template says by {% generation %} where it
has it, and only the assistant's messages are wanted. Else a message is what the template adds for it: the text up to
its end, less the text up to its beginning with the header of the turn.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from configs.errors import InputMissing
from configs.schema import Config
from replay.data.rows import Row, RowError, shorten
from replay.data.taught import Message, Taught, taught_of
from slipstream.runtime.fingerprint import TEMPLATE_ERRORS, read_json, resolve_chat_template, template_failure

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
"""Characters of a text, the last one excluded."""


class Unusable(RowError):
    """A row cannot be trained on; `reason` is what its drop is counted as."""

    def __init__(self, said: str, reason: str = "prompt_not_rendered") -> None:
        super().__init__(said)
        self.reason = reason


class Encoded(NamedTuple):
    """One trajectory, up to its last token in the loss."""

    prompt_ids: NDArray[np.int32]
    """Up to the first token in the loss."""
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


class RowEncoder:
    """Encodes the rows of a run."""

    def __init__(self, config: Config, answers: int = 1) -> None:
        """Of rows with so many answers. Raises ConfigError, FingerprintError: there is no usable tokenizer.json."""
        folder = Path(config.model.path)
        self.answers, self.roles = answers, frozenset(config.data.loss_roles)
        self.limit = config.longest_trajectory
        self._tokenizer = tokenizer_of(folder)
        path = folder / "tokenizer_config.json"
        settings = read_json(path) if path.exists() else {}
        given = {key: value for key, value in settings.items() if key.endswith("_token") and value is not None}
        self._special = {key: value["content"] if isinstance(value, dict) else value for key, value in given.items()}
        bos = self._special.get("bos_token")
        bos_id = self._tokenizer.token_to_id(bos) if isinstance(bos, str) else None
        starts = self._tokenizer.encode("").ids[:1] == [bos_id] or settings.get("add_bos_token") is True
        self._prefix = [bos_id] if bos_id is not None and starts else []
        eos = self._special.get("eos_token")
        self._eos = self._tokenizer.token_to_id(eos) if isinstance(eos, str) else None
        self._template = resolve_chat_template(config.model.path, config.model.chat_template)
        self._options = config.model.chat_template_options
        self._is_marked = self.roles == {"assistant"} and MARKS.search(self._template or "") is not None
        if self._template is not None:  # seconds, before anybody waits for them
            import transformers.utils.chat_template_utils  # noqa: F401

    def encode(self, row: Row) -> list[Encoded]:
        """The trajectories of a row. Raises Unusable."""
        found = [self._encode(one) for one in taught_of(row, self.answers)]
        if len({(before.tobytes(), after.tobytes(), mask.tobytes()) for before, after, mask in found}) < len(found):
            raise Unusable("chosen and rejected are the same tokens, so nothing is learned")
        return found

    def _encode(self, taught: Taught) -> Encoded:
        ids, in_loss = self._text(taught) if isinstance(taught.answer, str) else self._conversation(taught)
        in_loss[:1] = False  # nothing predicts it
        places = np.flatnonzero(in_loss)
        if not places.size:
            raise Unusable(f"no token of {shorten(taught.answer)} is in the loss")
        if len(ids) > self.limit:
            raise Unusable(
                f"it has {len(ids)} tokens, and data.max_prompt_tokens and rollout.max_new_tokens are {self.limit}"
                " together; raise one, or shorten the row",
                "prompt_too_long",
            )
        first, end = int(places[0]), int(places[-1]) + 1
        tokens = np.array(ids[:end], np.int32)
        return Encoded(tokens[:first], tokens[first:], in_loss[first:end].astype(np.uint8))

    def _text(self, taught: Taught) -> tuple[list[int], NDArray[np.bool_]]:
        """Text as it stands, with the end of a text behind it."""
        assert isinstance(taught.before, str) and isinstance(taught.answer, str)
        if self._eos is None:
            raise Unusable("the tokenizer names no eos token, so no answer of plain text would ever end")
        before = self._begin(taught.before)
        whole = self._begin(taught.before + taught.answer)
        if whole[: len(before)] != before:  # the first word of the answer would change the prompt's last token
            whole = before + self._ids(taught.answer)
        whole = [*whole, self._eos]
        return whole, np.arange(len(whole)) >= len(before)

    def _conversation(self, taught: Taught) -> tuple[list[int], NDArray[np.bool_]]:
        assert not isinstance(taught.before, str) and not isinstance(taught.answer, str)
        messages, first = [*taught.before, *taught.answer], len(taught.before)
        text, marked = self._render(messages, taught.tools, marks=self._is_marked)
        begin = len(self._head(messages, first, text, taught.tools)) if first else 0
        if self._is_marked:
            spans = [(start, end) for start, end in marked if start >= begin]
        else:
            chosen = [number for number in range(first, len(messages)) if messages[number]["role"] in self.roles]
            spans = [self._span(messages, number, text, taught.tools) for number in chosen]
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        in_loss = np.zeros(len(offsets), np.bool_)
        for start, end in spans:
            in_loss |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        return encoding.ids, in_loss

    def _span(self, messages: list[Message], number: int, text: str, tools: list[Any] | None) -> Span:
        """Where a message stands in the text; the blanks behind its end are never sampled."""
        until, _ = self._render(messages[: number + 1], tools)
        if not text.startswith(until):
            raise Unusable(
                f"model.chat_template: shows message {number} ({messages[number]['role']}) in another way once others"
                " follow, so what of it is learned is not known; mark it by {% generation %} in a template of your own",
            )
        return len(self._head(messages, number, text, tools)), len(until.rstrip())

    def _head(self, messages: list[Message], number: int, text: str, tools: list[Any] | None) -> str:
        """The text before a message, with the header of its turn where it is the assistant's."""
        if number == 0:
            return ""
        head, _ = self._render(messages[:number], tools, header=messages[number]["role"] == "assistant")
        if not text.startswith(head):
            raise Unusable(
                f"model.chat_template: the text before message {number} ({messages[number]['role']}) is another one"
                " once the message follows; mark what is learned by {% generation %} in a template of your own",
            )
        return head

    def _render(
        self, messages: list[Message], tools: list[Any] | None, *, header: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        if self._template is None:
            raise Unusable("messages, and the tokenizer has no chat template; set model.chat_template")
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, found = render_jinja_template(
                [[{"content": "", **message} for message in messages]],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=header,
                return_assistant_tokens_mask=marks,
                **self._special,
                **self._options,
            )
        except TEMPLATE_ERRORS as error:
            raise Unusable(template_failure(messages, error)) from error
        return str(texts[0]), [(int(start), int(end)) for start, end in found[0]] if marks else []

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _begin(self, text: str) -> list[int]:
        """Token ids of text that begins a context, with the bos token where the tokenizer puts one."""
        ids = self._ids(text)
        return ids if ids[:1] == self._prefix else self._prefix + ids


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder, without truncation and padding. Raises ConfigError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputMissing(
            f"model.path: {file} is missing, and learner.objective encodes data.train by it; save the tokenizer anew"
            " (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception on a broken file
        raise InputMissing(f"model.path: {file} cannot be loaded: {error}; copy the model folder again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
