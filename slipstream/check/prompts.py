"""Whether prompts of the data files can be used: the first rows are rendered and tokenised before anything starts.

The rollout servers do this again for every prompt. A file of which no prompt fits would be leased and dropped pass
after pass there; here it is refused in a second, without torch.
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.base import ConfigError
from configs.errors import Contradiction, InputMissing
from configs.rewards import Exact, Mathematics, Numeric
from configs.schema import Config
from replay.data import DataError, Reading, Row, read_rows
from replay.data.encoding import RowEncoder, Unusable, tokenizer_of
from replay.data.formats import size_of_files
from replay.data.order import PASS_RATE, column_of
from slipstream.check.finding import Finding, ok, warn
from slipstream.check.pictures import PictureCheck
from slipstream.runtime.fingerprint import TEMPLATE_ERRORS, read_json, resolve_chat_template, template_failure

CHECKED_BYTES = 128 * 1024**2
"""Files up to this size, shards together, are read to their end here."""
CHECKED_ROWS, CHECKED_S = 50_000, 3.0
"""Most rows that are read of larger files and of what is no file, and for how long."""
COMPARE = (Exact, Numeric, Mathematics)
"""Built-in rewards that compare with the row's answer."""
SAMPLED_ROWS = 64
"""Rows of these that are rendered and tokenised."""


def files(config: Config) -> Iterator[Finding]:
    """Of every training and evaluation set. Raises as `check_prompts`, of an evaluation set with its key."""
    learner, curriculum = config.learner, config.data.curriculum
    for train in config.data.train_sets.values():
        if learner.facts.from_data:
            yield from check_answers_of(config, train.path, curriculum, learner.facts.answers)
        else:
            yield from check_prompts(config, train.path, curriculum)
    if (held_out := config.data.held_out) is not None:
        yield from check_answers_of(config, held_out, "none", learner.facts.answers)
    if learner.sft.data is not None:
        yield from check_answers_of(config, learner.sft.data, "none")
    for one in config.evaluation_sets:
        try:
            yield from check_prompts(config, one.path)
        except (ConfigError, DataError) as error:
            if not one.name:
                raise
            raise type(error)(f"{one.key}: {error}") from error


def check_answers_of(config: Config, path: str, curriculum: str, answers: int = 1) -> Iterator[Finding]:
    """Read the rows of a data file that hold their answers, and encode a sample of them as replay will.

    Raises DataError, ConfigError: as `check_prompts`; no sampled row can be trained on.
    """
    said: list[str] = []
    reading = Reading(path, config.data.on_broken_row, answers)
    rows = read_rows(path, said.append, reading)
    sample = list(itertools.islice(rows, SAMPLED_ROWS))
    if curriculum != "none":
        column_of(sample, curriculum, path)
    encoder, lengths, learned, problems = RowEncoder(config, answers), list[int](), 0, list[str]()
    for row in sample:
        try:
            found = encoder.encode(row)
        except Unusable as problem:
            problems.append(str(problem))
            continue
        lengths += [one.prompt_ids.size + one.token_ids.size for one in found]
        learned += sum(int(one.loss_mask.sum()) for one in found)
    if not lengths:
        raise InputMissing(f"{path}: none of the first {len(sample)} rows can be trained on; the first: {problems[0]}")
    said.append(f"{learned} of the {sum(lengths)} tokens of its first {len(sample)} rows are in the loss")
    yield ok("data", "; ".join(said))
    if problems:
        yield warn(
            "data",
            f"{path}: {len(problems)} of the first {len(sample)} rows are left out of training, and counted; the first:"
            f" {problems[0]}",
        )
    yield from _rest(path, rows, reading)


def check_prompts(config: Config, path: str, curriculum: str = "none") -> Iterator[Finding]:
    """Read the rows of a data file, of a huge one the first, and tokenise a sample of them.

    Raises:
        DataError: the file is missing, has a broken row, or one of the sampled rows has no number to sort by.
        ConfigError: none of the sampled rows can be rendered, or none fits into data.max_prompt_tokens; or pictures of
            a step do not fit into memory.
    """
    said: list[str] = []
    reading = Reading(path, config.data.on_broken_row)
    rows = read_rows(path, said.append, reading)
    sample = list(itertools.islice(rows, SAMPLED_ROWS))
    yield ok("data", " ".join(said))
    if curriculum not in ("none", PASS_RATE):
        column_of(sample, curriculum, path)
    encode = PromptEncoder(config)
    lengths: list[int] = []
    problems: list[str] = []
    for row in sample:
        try:
            lengths.append(encode.length(row))
        except ConfigError as error:
            problems.append(str(error))
    if not lengths:
        raise InputMissing(f"{path}: none of the first {len(sample)} rows can be rendered; row 1: {problems[0]}")
    check_template(encode, sample, path)
    check_answers(config, sample, path)
    limit = config.data.max_prompt_tokens
    if min(lengths) > limit:
        raise Contradiction(
            f"data.max_prompt_tokens: {limit}, but none of the first {len(sample)} rows of {path} fits: their prompts"
            f" have {min(lengths)} to {max(lengths)} tokens; raise it to {max(lengths)} or more, or shorten the prompts"
        )
    if too_long := sum(length > limit for length in lengths):
        yield warn(
            "prompt-length",
            f"{path}: {too_long} of the first {len(sample)} prompts have more than data.max_prompt_tokens {limit}"
            f" tokens, up to {max(lengths)}; they are left out of training and of an evaluation's score, and counted",
        )
    if shown := encode.pictures.report(path, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        yield ok("data", shown)
    yield from _rest(path, rows, reading)


def _rest(path: str, rows: Iterator[Row], reading: Reading) -> Iterator[Finding]:
    """Read on, for a bounded time; what was found."""
    size = size_of_files(path)
    until = time.monotonic() + CHECKED_S
    if size is not None and size <= CHECKED_BYTES:
        deque(rows, maxlen=0)
    else:
        deque(itertools.takewhile(lambda _: time.monotonic() < until, itertools.islice(rows, CHECKED_ROWS)), maxlen=0)
    if reading.skipped:
        yield warn("data", reading.skipped)
    if size is not None and not reading.is_whole:
        yield ok("data", f"{path}: {reading.num_rows:,} rows were read here; of the rest, replay checks a sample")


def check_answers(config: Config, sample: Sequence[Row], path: str) -> None:
    """Raises ConfigError: the rows have no answer, and reward.function compares with it."""
    compares = [part.label for part in config.reward.parts if isinstance(part.settings, COMPARE) and part.weight]
    judged = config.environment.name in ("", "tools")  # others mostly give the reward themselves
    if not compares or not judged or any(_is_answer(row["ground_truth"]) for row in sample):
        return
    raise InputMissing(
        f"{path}: the answers of the first {len(sample)} rows are all empty, and reward.function {compares[0]!r}"
        " compares with them, so every answer would get the same reward; fill their column (docs/howto/data.md has the"
        " names that are read), or take a reward that needs no answer"
    )


def _is_answer(truth: object) -> bool:
    return truth is not None and str(truth).strip() != ""


def check_template(encode: "PromptEncoder", sample: Sequence[Row], path: str) -> None:
    """Raises ConfigError: the chat template leaves out every system message, or every user message."""
    for role in ("system", "user"):
        shown = [found for row in sample if (found := encode.shows(row, role)) is not None]
        if shown and not any(shown):
            raise InputMissing(
                f"model.chat_template: it leaves out the {role} message of the {len(shown)} rows of {path} that have"
                " one (of those looked at), so the policy would never read it; set model.chat_template to one that"
                " shows it (Jinja text or a file), or move that text into another message"
            )


class PromptEncoder:
    """Counts the tokens of prompts as rollout_server.tasks does, except for a bos token."""

    def __init__(self, config: Config) -> None:
        folder = Path(config.model.path)
        self.pictures = PictureCheck(config, read_json(folder / "config.json"))
        self._template = resolve_chat_template(config.model.path, config.model.chat_template)
        self._options = config.model.chat_template_options
        # Tokenizers of other files are built by transformers, which takes too long to load here.
        self._tokenizer = tokenizer_of(folder) if (folder / "tokenizer.json").is_file() else None
        settings = folder / "tokenizer_config.json"
        found = read_json(settings) if settings.exists() else {}
        tokens = [(key, value) for key, value in found.items() if key.endswith("_token") and value is not None]
        self._special = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens}

    def length(self, row: Row) -> int:
        """Tokens of the prompt, its pictures' included; 0 where the tokenizer is not in tokenizer.json.

        Raises ConfigError.
        """
        prompt = row["prompt"]
        of_pictures = self.pictures.tokens(row) - len(row.get("images", ()))  # each has one in the text
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        if self._tokenizer is None:
            return 0
        return of_pictures + len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def shows(self, row: Row, role: str) -> bool | None:
        """Whether the rendered prompt has the texts of its messages of this role; None where it has no such text."""
        prompt = row["prompt"]
        messages = [] if isinstance(prompt, str) else prompt
        texts = [each["content"] for each in messages if each.get("role") == role]
        texts = ["".join(text.split()) for text in texts if isinstance(text, str) and text.strip()]
        if not texts:
            return None
        try:
            rendered = "".join(self._render(messages).split())  # templates strip and join lines
        except ConfigError:
            return None
        return all(text in rendered for text in texts)

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if self._template is None:
            raise InputMissing(
                "the prompt is a list of chat messages, and the tokenizer has no chat template; set model.chat_template"
                " (Jinja text or a file), or give prompts as plain text"
            )
        # here, because it loads transformers, which plain text does without
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                [messages],
                chat_template=self._template,
                add_generation_prompt=True,
                **self._special,
                **self._options,
            )
        except TEMPLATE_ERRORS as error:
            raise InputMissing(template_failure(messages, error)) from error
        return str(rendered[0])
