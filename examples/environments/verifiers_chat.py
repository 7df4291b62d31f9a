"""A harness of verifiers for tasksets without tools: a chat in this process, where `null` starts a program per episode.

It is found under the id `slipstream_chat` (verifiers_tasks.py); a seat whose taskset brings none gets it.
Every request goes through the endpoint of verifiers, so its trace is whole.
"""

from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["SlipstreamChat"]
REQUEST_S = 3600.0
"""Past every limit of an episode, which end it sooner (environment.turn_timeout_s)."""
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_clients: list[httpx.AsyncClient] = []


class SlipstreamChat(Harness[HarnessConfig]):  # type: ignore[misc]
    """One answer to the conversation so far; verifiers starts it anew for each turn of a user."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Ask for an answer; exit code 1 with the endpoint's error where it is refused."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        if not _clients:
            _clients.append(httpx.AsyncClient(timeout=REQUEST_S, limits=CONNECTIONS, trust_env=False))
        answer = await _clients[0].post(
            f"{endpoint.rstrip('/')}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        failed = answer.status_code != httpx.codes.OK
        return ProgramResult(exit_code=int(failed), stdout="", stderr=answer.text[:2000] if failed else "")
