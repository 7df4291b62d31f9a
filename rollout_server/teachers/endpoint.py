"""A teacher behind an OpenAI-compatible endpoint, asked for logprobs of a prompt that ends with the answer.

vLLM answers `/completions` with `prompt_logprobs`. SGLang has no such thing there, and is asked by its own `/generate`.
Both give them at temperature 1 whatever a request says, so other temperatures are refused (slipstream/check).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.teachers import Teacher
from rollout_server.engines.base import Scored
from rollout_server.tasks.rewards.built_in.endpoint import EndpointClient, Unanswered
from rollout_server.teachers import NotScored

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
            retries=0,  # who asks tries again
            otherwise=None,
        )
        self._native = teacher.url.removesuffix("/v1") + "/generate"
        self._slots = asyncio.Semaphore(teacher.concurrency)

    @property
    def key(self) -> str:
        return f"teachers.{self.name}"

    async def scored(self, sequences: Sequence[NDArray[np.int32]], firsts: Sequence[int], *, top: int) -> Scored:
        """As `Engine.score`, at temperature 1. Raises NotScored."""
        try:
            asked = zip(sequences, firsts, strict=True)
            rows = await asyncio.gather(*(self._rows(ids.tolist(), first, top) for ids, first in asked))
        except Unanswered as problem:
            raise NotScored(str(problem)) from problem
        flat = [row for of_sequence in rows for row in of_sequence]
        return Scored(
            version=0,
            logprobs=np.array([logprob for logprob, _ in flat], np.float32),
            ids=np.array([token for _, likeliest in flat for token, _ in likeliest], np.int32),
            top=np.array([logprob for _, likeliest in flat for _, logprob in likeliest], np.float32),
        )

    async def _rows(self, ids: list[int], first: int, top: int) -> list[Row]:
        """Of the tokens from number `first` on."""
        self.most_bytes = max(self.most_bytes, BYTES_A_TOKEN * len(ids) * (top + 1))
        async with self._slots:
            if self._url != self._native:
                body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
                reply, _ = await self.reply(body)
                if (rows := self._of_vllm(reply, ids, first, top)) is not None:
                    return rows
                self._url = self._native  # one that says nothing of prompts: SGLang
            sampling = {"max_new_tokens": 1, "temperature": 1.0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            reply, _ = await self.reply(body | {"logprob_start_len": first - 1, "top_logprobs_num": top})
            return self._of_sglang(reply, ids, first, top)

    def _of_vllm(self, reply: dict[str, Any], ids: list[int], first: int, top: int) -> list[Row] | None:
        """None where the reply has no logprobs of the prompt. Raises NotScored: not of these tokens."""
        try:
            told = reply["choices"][0].get("prompt_logprobs")
            if told is None:
                return None
            rows = []
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
