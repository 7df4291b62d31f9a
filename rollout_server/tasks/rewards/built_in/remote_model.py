"""Reward `remote_model`: the score of a reward model that another server serves."""

import contextlib
from typing import Any

import jinja2

from rollout_server.tasks.rewards import NotScored, RewardError, Sample
from rollout_server.tasks.rewards.built_in.endpoint import EndpointClient, NoVerdict
from rollout_server.tasks.workers.frames import is_number
from slipstream.runtime.fingerprint import TEMPLATE_ERRORS, template_failure


class Scoring(EndpointClient):
    """Asks for an embedding or a class of prompt and answer as one text."""

    name = "remote_model"

    def __init__(self, api: str, chat_template: str | None, **endpoint: Any) -> None:
        """The options of configs.rewards.RemoteModel. Raises RewardError: the template cannot be used, or no key."""
        self.path, self._api, self._template = f"/{api}", api, chat_template
        super().__init__(**endpoint)
        if chat_template is not None:
            self._template = chat_template if "{" in chat_template else self.text_of("chat_template", chat_template)
            try:
                _rendered(self._template)
            except jinja2.TemplateError as error:
                said = f"reward.function: 'remote_model': chat_template cannot be used: {error}"
                raise RewardError(said) from error

    def request(self, sample: Sample) -> dict[str, Any]:
        """Prompt and answer as one text."""
        prompt, answer = sample["prompt"], sample["completion"]
        if self._template is None:
            if not isinstance(prompt, str):
                raise NotScored("the prompt is a list of chat messages; give the reward model's chat_template")
            return {"model": self.model, "input": prompt + answer}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*messages, {"role": "assistant", "content": answer}]
        try:
            return {"model": self.model, "input": _rendered(self._template, messages)[0]}
        except TEMPLATE_ERRORS as error:
            raise NotScored(template_failure(messages, error, "chat_template")) from error

    def score(self, reply: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """The probability of the last class, or the one number of an embedding."""
        try:
            first = reply["data"][0]
            found = first["probs"] if self._api == "classify" else first["embedding"]
            if self._api == "embeddings" and len(found) != 1:
                raise NoVerdict("unreadable", f"an embedding of {len(found)} numbers, of a reward model it is one")
            score = found[-1]
        except (KeyError, IndexError, TypeError) as error:
            raise NoVerdict("unreadable", f"no score in {str(reply)[:200]}") from error
        with contextlib.suppress(OverflowError):  # an integer that no float holds
            if is_number(score):
                return float(score), {}
        raise NoVerdict("unreadable", f"score {str(score)[:60]!r}")


def _rendered(template: str, *conversations: list[dict[str, str]]) -> list[str]:
    """Each one as text, by the rules of transformers: its filters, functions and tags."""
    # here, because it loads transformers, which plain text does without
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(list(conversations), chat_template=template)
    return list(texts)
