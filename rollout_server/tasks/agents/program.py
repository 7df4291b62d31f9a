"""An agent as a process of its own: its row on stdin, its reward as the last line of stdout.

It is started under a supervisor (workers/supervisor.py): when it has ended, is late or is called off, everything that
it has started is killed, processes in other sessions included.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import SlipstreamError
from rollout_server.tasks.environments.protocol import shown
from rollout_server.tasks.workers.process import FLOOD_PAUSE_S, KILL_TIMEOUT_S, PACKAGE_ROOT, WORKER
from rollout_server.tasks.workers.worker import PROGRAM

TAIL_BYTES = 65536
"""Of what it prints, for its last line."""
FREE_BYTES = 1024 * 1024
"""Read at full speed; a flood past it may not take all of the environment process."""
STREAMS_S = 2.0
"""For the last prints after the end, when no process is left to write more."""
REWARDS = ("reward", "score")


class AgentFailed(SlipstreamError, RuntimeError, code="SLIP-ENV-03"):
    """The agent ended with an error, or its last line cannot be understood."""


def variables(base_url: str, api_key: str, model: str) -> dict[str, str]:
    """The environment of an agent: where and as which episode it asks."""
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost"]))
    return {
        **os.environ,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,  # the name that older clients read
        "OPENAI_API_KEY": api_key,
        "OPENAI_MODEL": model,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


async def play(
    command: Sequence[str], row: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, float] | None:
    """Run an agent to its end: its reward as `score` and its metrics, or None where it says none.

    Raises AgentFailed.
    """
    said = _as_json(row)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", WORKER, PROGRAM, str(os.getpid()), PACKAGE_ROOT, *_filled(command, row),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(said + b"\n")  # it need not read its row
    process.stdin.close()
    prints = [asyncio.create_task(_last_line(stream)) for stream in (process.stdout, process.stderr)]
    try:
        code = await process.wait()
        async with asyncio.timeout(STREAMS_S):
            out, errors = await asyncio.gather(*prints)
    finally:
        await _end(process)
        for task in prints:
            task.cancel()
    if code != 0:
        raise AgentFailed(f"the agent ended with exit code {code}; its last line on stderr: {errors}")
    return reward_of(out)


def reward_of(line: str) -> dict[str, float] | None:
    """What an agent's last line says: a JSON object with `reward` (or `score`) and further numbers.

    None for any other text. Raises AgentFailed: a JSON object without a reward.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    key = next((key for key in REWARDS if key in value), None)
    if key is None:
        raise AgentFailed(
            f"the agent's last line is {shown(value)}, a JSON object without `reward`; print that, or no JSON object"
            " for reward.function to judge the last answer"
        )
    return {"score": value[key], **{name: number for name, number in value.items() if name not in REWARDS}}


def _filled(command: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The command with this Python for `python`, and the prompt where it says {prompt}."""
    prompt = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])
    first, *rest = (part.replace("{prompt}", prompt) for part in command)
    return [sys.executable if first in ("python", "python3") else first, *rest]


def _as_json(row: Mapping[str, Any]) -> bytes:
    """A row for stdin. Raises AgentFailed: it has bytes in it, which JSON cannot hold."""
    inner = {f"{outer}.{name}": row[outer][name] for outer in ("columns", "extra_info") for name in row.get(outer, ())}
    for name, value in [*inner.items(), *row.items()]:
        try:
            json.dumps(value)
        except TypeError as error:
            raise AgentFailed(
                f"the row's {name!r} cannot be given to a program as JSON: {error}; drop such columns of the data, or"
                " take environment.function.agent.function, which gets the row itself"
            ) from error
    return json.dumps(row).encode()


async def _last_line(stream: asyncio.StreamReader) -> str:
    """The last line of what is printed; all of it is read, so that printing blocks no agent."""
    tail, num_bytes = b"", 0
    while chunk := await stream.read(TAIL_BYTES):
        tail, num_bytes = (tail + chunk)[-TAIL_BYTES:], num_bytes + len(chunk)
        if num_bytes > FREE_BYTES:
            await asyncio.sleep(FLOOD_PAUSE_S)
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the supervisor kill all that is left; kill the supervisor where it cannot."""
    for kill in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), KILL_TIMEOUT_S)
