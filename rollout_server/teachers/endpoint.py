"""A teacher behind an OpenAI-compatible endpoint, asked for logprobs of a prompt that ends with the answer.

vLLM answers `/completions` with `prompt_logprobs`. SGLang has no such thing there, and is asked by its own `/generate`.
Both give them at temperature 1 whatever a request says, so other temperatures are refused (slipstream/check).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.teachers import Teacher
from rollout_server.engines.base import Scored
from rollout_server.tasks.rewards.built_in.endpoint import EndpointClient, Unanswered
from rollout_server.teachers import NotScored

logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for each request

PROBE = "If 12 + 34 = 46, then naïve\n\tguesses don't help."
"""What both ends must have the same ids for."""
BYTES_A_TOKEN = 400
"""Of a reply, for each of its logprobs at most."""
Row = tuple[float, list[tuple[int, float]]]
"""Logprob of a token, and the likeliest ids in its place with theirs."""


class PromptLogprobs(EndpointClient):
    """Asks for the logprobs of sequences, one a request."""

    path = "/completions"

    def __init__(self, name: str, teacher: Teacher) -> None:
        """Raises RewardError: the variable of the key is not set."""
        assert teacher.url is not None and teacher.model is not None
        self.name = name
        super().__init__(
            url=teacher.url,
            model=teacher.model,
            key_variable=teacher.key_variable,
            concurrency=teacher.concurrency,
            timeout_s=teacher.timeout_s,
            retries=teacher.retries,  # one that fails in passing must not cost the whole group another try
            otherwise=None,
        )
        self._is_checked = False
        self._native = teacher.url.removesuffix("/v1") + "/generate"
        self._slots = asyncio.Semaphore(teacher.concurrency)

    @property
    def key(self) -> str:
        return f"teachers.{self.name}"

    async def scored(
        self, sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, top: int, probe: Sequence[int]
    ) -> Scored:
        """As `Engine.score`, at temperature 1; `probe` are the run's ids of PROBE. Raises NotScored."""
        try:
            if not self._is_checked:
                await self._check_tokenizer(list(probe))
                self._is_checked = True
            asked = zip(sequences, firsts, strict=True)
            rows = await asyncio.gather(*(self._rows(ids.tolist(), first, top) for ids, first in asked))
        except Unanswered as problem:
            raise NotScored(problem.args[0]) from problem  # its code is that of a reward
        flat = [row for of_sequence in rows for row in of_sequence]
        return Scored(
            version=0,
            logprobs=np.array([logprob for logprob, _ in flat], np.float32),
            ids=np.array([token for _, likeliest in flat for token, _ in likeliest], np.int32),
            top=np.array([logprob for _, likeliest in flat for _, logprob in likeliest], np.float32),
        )

    async def _check_tokenizer(self, own: list[int]) -> None:
        """Raises NotScored, Unanswered: the model there has other ids for the same text."""
        asked = {"model": self.model, "prompt": PROBE, "add_special_tokens": False, "max_tokens": 1}
        reply, _ = await self.reply(asked | {"temperature": 1.0, "prompt_logprobs": 0})
        try:
            told = reply["choices"][0].get("prompt_logprobs")
            if told is None:  # one that says nothing of prompts: SGLang
                self._url = self._native
                sampling = {"max_new_tokens": 1, "temperature": 1.0}
                body = {"text": PROBE, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
                reply, _ = await self.reply(body)
                found = [int(one[1]) for one in reply["meta_info"]["input_token_logprobs"]]
            else:
                found = [int(next(iter(one))) for one in told[1:]]
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise self._unreadable(reply, error) from error
        if found[1 - len(own) :] != own[1:]:  # of the first, or of a token that begins every text, nothing is said
            raise NotScored(
                f"{self._url}: its tokenizer has the ids {found[:8]}... for a text that has {own[:8]}... in the run:"
                f" answers would mean other texts to it; {self.key}.model: take one with the tokenizer of model.path"
            )

    async def _rows(self, ids: list[int], first: int, top: int) -> list[Row]:
        """Of the tokens from number `first` on."""
        self.most_bytes = max(self.most_bytes, BYTES_A_TOKEN * len(ids) * (top + 1))
        async with self._slots:
            if self._url != self._native:
                body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
                reply, _ = await self.reply(body)
                return self._of_vllm(reply, ids, first, top)
            sampling = {"max_new_tokens": 1, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            reply, _ = await self.reply(body | {"logprob_start_len": first - 1, "top_logprobs_num": top})
            return self._of_sglang(reply, ids, first, top)

    def _of_vllm(self, reply: dict[str, Any], ids: list[int], first: int, top: int) -> list[Row]:
        """Raises NotScored: not of these tokens."""
        try:
            told, rows = reply["choices"][0]["prompt_logprobs"], []
            for token, given in zip(ids[first:], told[first:], strict=True):
                likeliest = sorted((int(each["rank"]), int(one), each["logprob"]) for one, each in given.items())
                named = [(one, float(logprob)) for _, one, logprob in likeliest[:top]]
                rows.append((float(given[str(token)]["logprob"]), named))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._unreadable(reply, error) from error
        return rows

    def _of_sglang(self, reply: dict[str, Any], ids: list[int], first: int, top: int) -> list[Row]:
        """Raises NotScored: not of these tokens."""
        try:
            told = reply["meta_info"]["input_token_logprobs"][1:]
            beside = reply["meta_info"]["input_top_logprobs"][1:] if top else [[]] * len(told)
            if [int(one[1]) for one in told] != ids[first:]:
                raise ValueError("it is of other tokens")
            pairs = zip(told, beside, strict=True)
            return [(float(one[0]), [(int(each[1]), float(each[0])) for each in row[:top]]) for one, row in pairs]
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable(reply, error) from error

    def _unreadable(self, reply: dict[str, Any], error: Exception) -> NotScored:
        said = f"{type(error).__name__}: {error}"
        return NotScored(f"{self._url} answered no logprobs of these tokens ({said}): {str(reply)[:200]} [corrupt]")
