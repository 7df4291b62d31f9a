"""What a reward model of another server is asked, and its score. No sockets."""

import math
from pathlib import Path
from typing import Any

import jinja2

from configs.rewards import RemoteModel
from rollout_server.tasks.rewards import NotScored, RewardError, Sample
from rollout_server.tasks.rewards.remote.judge import NoVerdict
from slipstream.runtime.fingerprint import TEMPLATE_ERRORS, template_failure

PATHS = {"embeddings": "/embeddings", "classify": "/classify"}


def template_of(settings: RemoteModel) -> str | None:
    """The text of the chat template, if there is one. Raises RewardError: a broken one, or no such file."""
    given = settings.chat_template
    if given is None:
        return None
    try:
        text = given if "{" in given else Path(given).expanduser().read_text(encoding="utf-8")
        rendered(text, [])
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise RewardError(f"reward.function: 'remote_model': chat_template cannot be used: {error}") from error
    return text


def rendered(template: str, conversations: list[list[dict[str, str]]]) -> list[str]:
    """The conversations as text, by the rules of transformers: its filters, functions and tags."""
    # here, because it loads transformers, which plain text does without
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(conversations, chat_template=template)
    return list(texts)


def request_of(sample: Sample, settings: RemoteModel, template: str | None) -> dict[str, Any]:
    """The body of the request.

    Raises:
        NotScored: a prompt of chat messages and no template, or one that fails on them.
    """
    prompt, answer = sample["prompt"], sample["completion"]
    if template is None:
        if not isinstance(prompt, str):
            raise NotScored("the prompt is a list of chat messages; give the reward model's chat_template")
        return {"model": settings.model, "input": prompt + answer}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [*messages, {"role": "assistant", "content": answer}]
    try:
        (text,) = rendered(template, [messages])
    except TEMPLATE_ERRORS as error:
        raise NotScored(template_failure(messages, error, "chat_template")) from error
    return {"model": settings.model, "input": text}


def score_of(reply: dict[str, Any], settings: RemoteModel) -> float:
    """The score in a reply. Raises NoVerdict: no finite number in its place."""
    try:
        first = reply["data"][0]
        found = first["probs"] if settings.api == "classify" else first["embedding"]
        if settings.api == "embeddings" and len(found) != 1:
            raise NoVerdict("unreadable", f"an embedding of {len(found)} numbers, of a reward model it is one")
        score = found[-1]
    except (KeyError, IndexError, TypeError) as error:
        raise NoVerdict("unreadable", f"no score in {str(reply)[:200]}") from error
    try:
        if not isinstance(score, bool) and isinstance(score, (int, float)) and math.isfinite(score):
            return float(score)
    except OverflowError:  # an integer that no float holds
        pass
    raise NoVerdict("unreadable", f"score {str(score)[:60]!r}")
