"""Whether prompts of the data files can be used: the first rows are rendered and tokenised before anything starts.

The rollout servers do this again for every prompt. A file of which no prompt fits would be leased and dropped pass
after pass there; here it is refused in a second, without torch.
"""

import itertools
from pathlib import Path

import jinja2
from tokenizers import Tokenizer

from configs.base import ConfigError
from configs.schema import Config
from replay.fingerprint import read_json, resolve_chat_template
from replay.prompts import Row, read_rows

CHECKED_ROWS = 50_000
"""Rows that are read and checked here, about a second; replay reads the whole file."""
SAMPLED_ROWS = 64
"""Rows of these that are rendered and tokenised."""


def check_prompts(config: Config, path: str) -> int:
    """Read the first rows of data.train or data.eval and tokenise a sample of them; returns how many were read.

    Raises:
        DataError: the file is missing or has a broken row.
        ConfigError: none of the sampled rows can be rendered, or none fits into data.max_prompt_tokens.
    """
    rows = read_rows(path)
    sample = list(itertools.islice(rows, SAMPLED_ROWS))
    encode = PromptEncoder(config)
    lengths: list[int] = []
    problems: list[str] = []
    for row in sample:
        try:
            lengths.append(encode.length(row))
        except (jinja2.TemplateError, ConfigError) as error:
            problems.append(str(error))
    if not lengths:
        raise ConfigError(f"{path}: none of the first {len(sample)} rows can be rendered; row 1: {problems[0]}")
    limit = config.data.max_prompt_tokens
    if min(lengths) > limit:
        raise ConfigError(
            f"data.max_prompt_tokens: {limit}, but none of the first {len(sample)} rows of {path} fits: their prompts"
            f" have {min(lengths)} to {max(lengths)} tokens; raise it to {max(lengths)} or more, or shorten the prompts"
        )
    return len(sample) + sum(1 for _ in itertools.islice(rows, CHECKED_ROWS - len(sample)))


class PromptEncoder:
    """Counts the tokens of prompts as rollout_server.tasks does, except for a bos token."""

    def __init__(self, config: Config) -> None:
        folder = Path(config.model.path)
        self._template = resolve_chat_template(config.model.path, config.model.chat_template)
        # Tokenizers of other files are built by transformers, which takes too long to load here.
        self._tokenizer = load_tokenizer(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None
        settings = folder / "tokenizer_config.json"
        found = read_json(settings) if settings.exists() else {}
        tokens = [(key, value) for key, value in found.items() if key.endswith("_token") and value is not None]
        self._special = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens}

    def length(self, row: Row) -> int:
        """Tokens of the prompt; 0 where the tokenizer is not in tokenizer.json. Raises ConfigError, TemplateError."""
        prompt = row["prompt"]
        text = prompt if isinstance(prompt, str) else self._render(prompt)
        return 0 if self._tokenizer is None else len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            raise ConfigError(
                "the prompt is a list of chat messages, and the tokenizer has no chat template; set model.chat_template"
                " (Jinja text or a file), or give prompts as plain text"
            )
        # here, because it loads transformers, which plain text does without
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            [messages], chat_template=self._template, add_generation_prompt=True, **self._special
        )
        return str(rendered[0])


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without truncation and padding. Raises ConfigError."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises bare Exception on a broken file
        raise ConfigError(f"model.path: {file} cannot be loaded: {error}; copy the model folder again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
