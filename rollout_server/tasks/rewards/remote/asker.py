"""Asks one HTTP endpoint: a limit of time for each try, retries where they help, so many requests at a time."""

import asyncio
import json
import logging
import math
import os
from typing import Any

import httpx

from configs.errors import SlipstreamError
from configs.rewards import Endpoint
from configs.schema import is_loopback
from rollout_server.tasks.rewards import RewardError

MAX_REPLY_BYTES = 1024 * 1024
MAX_SHOWN_CHARS = 200
RETRIED = (408, 409, 429, 500, 502, 503, 504, 529)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
logging.getLogger("httpx").setLevel(logging.WARNING)  # or it logs a line for each request


class Unanswered(SlipstreamError, RuntimeError, code="SLIP-REWARD-04"):
    """No reply, or one that is no JSON object; the message says what came, without the key."""


class Asker:
    """One endpoint. Belongs to the event loop that it was made in."""

    def __init__(self, label: str, settings: Endpoint) -> None:
        """Raises RewardError: the key's variable is not set."""
        self._settings, self._label = settings, label
        self._key = key_of(label, settings)
        self._slots = asyncio.Semaphore(settings.concurrency)
        host = httpx.URL(settings.url).host
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            limits=httpx.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency),
            timeout=None,  # each try has a limit as a whole
            trust_env=not is_loopback(host),  # a proxy does not know this machine
        )

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """The reply to a POST, and how many retries it took.

        Raises:
            Unanswered: the last try failed, or a try in a way that the next one would too.
        """
        async with self._slots:
            for number in range(self._settings.retries + 1):
                try:
                    return await self._once(path, body), number
                except _Again as again:
                    if number == self._settings.retries:
                        raise Unanswered(f"{again} ({number + 1} tries)") from again
                    pause = again.pause_s if again.pause_s is not None else FIRST_PAUSE_S * 2**number
                await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    async def _once(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = self._settings.url + path
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                async with self._client.stream("POST", url, json=body) as response:
                    text = await self._read(response)
        except TimeoutError as error:
            raise _Again(f"{url} gave no answer within {self._settings.timeout_s:g} s [slow]") from error
        except httpx.HTTPError as error:
            raise _Again(f"{url}: {type(error).__name__}: {self._shown(str(error))} [closed]") from error
        if response.status_code in RETRIED:
            raise _Again(self._status(url, response, text), _seconds(response.headers.get("retry-after")))
        if response.status_code != 200:
            raise Unanswered(self._status(url, response, text))
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"{url} answered no JSON: {self._shown(text)}") from error
        if not isinstance(reply, dict):
            raise Unanswered(f"{url} answered no JSON object: {self._shown(text)}")
        return reply

    async def _read(self, response: httpx.Response) -> str:
        data = bytearray()
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_REPLY_BYTES:
                raise Unanswered(f"{response.url} answered more than {MAX_REPLY_BYTES} bytes")
        return data.decode("utf-8", "replace")

    def _status(self, url: str, response: httpx.Response, text: str) -> str:
        return f"{url} answered {response.status_code}: {self._shown(text)}"

    def _shown(self, text: str) -> str:
        """A part of what came; services repeat the key that they refuse."""
        return (text.replace(self._key, "***") if self._key else text)[:MAX_SHOWN_CHARS]


class _Again(RuntimeError):
    """A try that failed in a way that may pass."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


def key_of(label: str, settings: Endpoint) -> str | None:
    """The key of an endpoint, from the environment. Raises RewardError: the variable is not set."""
    if settings.key_variable is None:
        return None
    key = os.environ.get(settings.key_variable, "").strip()
    if not key:
        raise RewardError(
            f"reward.function: {label!r}: no environment variable {settings.key_variable} here (key_variable); set it"
            " where the rollout servers start"
        )
    return key


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After; None for a date or nothing."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
