"""What the rewards `judge` and `remote_model` share: a model behind an OpenAI-compatible endpoint is asked.

Each has a process of its own (rewards/pool.py): replies are not parsed where the engine is served, and code of the user
sees no keys.
"""

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import httpx

from configs.schema import is_loopback
from rollout_server.tasks.rewards import LONGEST_PAUSE_S, NotScored, RewardError, Sample

MAX_REPLY_BYTES = 1024 * 1024
MAX_SHOWN_CHARS = 200
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)
FIRST_PAUSE_S = 0.5


class Unanswered(NotScored, code="SLIP-REWARD-04"):
    """No reply, or one that is no JSON object; the message says what came, without the key."""


class NoVerdict(NotScored, code="SLIP-REWARD-05"):
    """A reply without a grade. `kind` is `refused` or `unreadable`, as it is counted."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class _Again(RuntimeError):
    """A try that failed in a way that may pass, and for how long to pause where the service says that."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class EndpointClient:
    """Asks an endpoint of each answer: a limit of time for each try, and retries where they help."""

    name = path = ""
    most_bytes = MAX_REPLY_BYTES
    """Of a reply."""

    def __init__(
        self,
        url: str,
        model: str,
        key_variable: str | None,
        concurrency: int,
        timeout_s: float,
        retries: int,
        otherwise: float | None,
    ) -> None:
        """The options of configs.rewards.Endpoint. Raises RewardError: the variable of the key is not set."""
        key = "" if key_variable is None else os.environ.get(key_variable, "").strip()
        if key_variable is not None and not key:
            raise RewardError(
                f"{self.key}: no environment variable {key_variable} here (key_variable); set it"
                " where the rollout servers start"
            )
        self.model, self._url, self._key = model, url + self.path, key
        self._timeout_s, self._retries, self._otherwise = timeout_s, retries, otherwise
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            timeout=None,  # each try has a limit as a whole
            trust_env=not is_loopback(httpx.URL(url).host),  # a proxy does not know this machine
        )

    @property
    def key(self) -> str:
        """Of the configuration, for messages."""
        return f"reward.function: {self.name!r}"

    def request(self, sample: Sample) -> dict[str, Any]:
        """The body. Raises NotScored: there is none for this sample."""
        raise NotImplementedError

    def score(self, reply: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Score and metrics of a reply. Raises NoVerdict."""
        raise NotImplementedError

    async def __call__(self, sample: Sample) -> dict[str, float]:
        """Score and metrics of a sample. Raises NotScored: it has none."""
        body, metrics = self.request(sample), {"refused": 0.0, "unreadable": 0.0}
        reply, retries = await self.reply(body)
        metrics["retries"] = float(retries)
        try:
            score, more = self.score(reply)
        except NoVerdict as problem:
            if self._otherwise is None:
                raise
            score, more = self._otherwise, {problem.kind: 1.0}
        return {"score": score, **metrics, **more}

    async def reply(self, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The reply, and how many retries it took. Raises Unanswered: no further try, or none that would help."""
        for number in range(self._retries + 1):
            try:
                return await self._once(body), number
            except _Again as again:
                if number == self._retries:
                    raise Unanswered(f"{again} ({number + 1} tries)") from again
                pause = again.pause_s if again.pause_s is not None else FIRST_PAUSE_S * 2**number
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    async def _once(self, body: dict[str, Any]) -> dict[str, Any]:
        url, data = self._url, bytearray()
        try:
            async with asyncio.timeout(self._timeout_s), self._client.stream("POST", url, json=body) as response:
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > self.most_bytes:
                        raise Unanswered(f"{url} answered more than {self.most_bytes} bytes")
        except TimeoutError as error:
            raise _Again(f"{url} gave no answer within {self._timeout_s:g} s [slow]") from error
        except httpx.HTTPError as error:
            raise _Again(f"{url}: {type(error).__name__}: {self._shown(str(error))} [closed]") from error
        text = data.decode("utf-8", "replace")
        if (status := response.status_code) != 200:
            said = f"{url} answered {status}: {self._shown(text)}"
            raise _Again(said, _seconds(response.headers.get("retry-after"))) if status in RETRIED else Unanswered(said)
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"{url} answered no JSON: {self._shown(text)}") from error
        if not isinstance(reply, dict):
            raise Unanswered(f"{url} answered no JSON object: {self._shown(text)}")
        return reply

    def _shown(self, text: str) -> str:
        """A part of what came; services repeat the key that they refuse."""
        return (text.replace(self._key, "***") if self._key else text)[:MAX_SHOWN_CHARS]

    def text_of(self, option: str, given: str) -> str:
        """The text of a file that an option names. Raises RewardError: it cannot be read."""
        try:
            return Path(given).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            said = f"{self.key}: {option} {given!r} cannot be read: {error}"
            raise RewardError(said) from error


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After; None for a date or nothing."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
