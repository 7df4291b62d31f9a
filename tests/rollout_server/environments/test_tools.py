"""The tool loop and the games, spoken to by a scripted policy."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import textarena_games

from rollout_server.tasks.environments import EnvironmentFailed, NoMoreTurns, tool_loop, tools
from rollout_server.tasks.environments.tool_loop import NoThread
from rollout_server.tasks.environments.tools import calculator, tool_of
from rollout_server.tasks.sandbox import probe
from rollout_server.tasks.sandbox.probe import Isolation
from tests.rollout_server.environments.scripted import Scripted
from tests.rollout_server.reward_runs import needs_isolation

ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "48+27"}], "columns": {}, "ground_truth": "75"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def converse(answers: Sequence[str], **options: Any) -> tuple[Scripted, Any]:
    options.setdefault("tools", ["calculator"])
    tool_loop.prepare(options)
    client = Scripted(answers, options)
    return client, await tool_loop.rollout(ROW, client)  # type: ignore[arg-type]


async def test_a_tool_is_called_and_its_answer_goes_back() -> None:
    client, trajectory = await converse([call("calculator", expression="48+27"), "75"], tools="calculator")
    told = client.contexts[1][-1]
    assert (told["role"], told["content"], told["name"]) == ("tool", "75", "calculator")
    assert client.contexts[1][-2]["tool_calls"][0]["id"] == told["tool_call_id"]
    assert trajectory.reward is None, "the reward function judges the last answer"
    assert trajectory.metrics == {"episode/tool_calls": 1.0, "episode/tool_errors": 0.0}


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<tool_call>{oops</tool_call>", "error: the call is no JSON"),
        (call("caculator", expression="1"), "error: no tool 'caculator'; there are calculator"),
        (call("calculator", wrong="1"), "error: TypeError: "),
        (
            '<tool_call>{"name": "calculator", "arguments": {"\\ud800": 1}}</tool_call>',
            "unexpected keyword argument '?'",
        ),
        (call("calculator", expression="1/0"), "error: ZeroDivisionError: division by zero"),
        (call("calculator", expression="__import__('os')"), "is no arithmetic"),
        (
            '<tool_call>{"name": "calculator", "arguments": "[1]"}</tool_call>',
            "error: the arguments are no JSON object",
        ),
    ],
)
async def test_a_bad_call_is_answered_and_ends_nothing(said: str, answer: str) -> None:
    client, trajectory = await converse([said, "75"])
    assert answer in client.contexts[1][-1]["content"]
    assert trajectory.metrics["episode/tool_errors"] == 1.0


async def test_several_calls_of_a_turn_are_all_answered_and_a_slow_tool_is_given_up() -> None:
    client, _ = await converse([call("calculator", expression="1+1") + call("calculator", expression="2*3"), "8"])
    assert [message["content"] for message in client.contexts[1][-2:]] == ["2", "6"]
    slow = f"{__file__}:slow"
    client, _ = await converse([call("slow"), "8"], tools=[slow], tool_timeout_s=0.05)
    assert client.contexts[1][-1]["content"] == "error: slow took longer than 0.05 s"


async def test_a_call_that_is_given_up_keeps_its_thread_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits for longer than a call may take, which begins with the call."""
    monkeypatch.setattr(tool_loop, "MAX_THREADS", 1)
    said = [call("naps", seconds=0.6) + call("naps", seconds=0), "8"]
    client, _ = await converse(said, tools=[f"{__file__}:naps"], tool_timeout_s=0.3)
    told = [message["content"] for message in client.contexts[1][-2:]]
    assert told == ["error: naps took longer than 0.3 s", "rested"]


async def test_tools_that_hold_all_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_loop, "MAX_THREADS", 3)
    monkeypatch.setattr(Scripted, "turn_timeout_s", 1.0)
    own = [f"{__file__}:naps", f"{__file__}:dozes"]
    held = call("naps", seconds=1.6) * 2 + call("dozes", seconds=1.6)
    said = r"naps waited 0\.9 s for one of 3 threads: .*2 of naps, 1 of dozes.*SLIP-ENV-05"
    with pytest.raises(NoThread, match=said):
        await converse([held + call("naps", seconds=0), "8"], tools=own, tool_timeout_s=0.2)


def dozes(seconds: float) -> str:
    """Sleep lightly."""
    return naps(seconds)


def naps(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "rested"


async def slow() -> str:
    """Takes its time."""
    import asyncio

    await asyncio.sleep(60)
    return "late"


async def test_where_turns_end_what_was_said_last_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    _, trajectory = await converse([call("calculator", expression="1")] * 2)
    assert trajectory.reward is None and trajectory.metrics["episode/NoMoreTurns"] == 1.0
    with pytest.raises(NoMoreTurns):
        await converse([])  # nothing was said that could be judged
    monkeypatch.setattr(Scripted, "finish_reason", "length")
    client, trajectory = await converse([call("calculator", expression="1"), "1"])
    assert len(client.contexts) == 1 and not trajectory.metrics["episode/tool_calls"], "a call that was cut is none"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("(3 + 4) * 2 ** 5 / sqrt(16)", "56"), ("7 // 2 - -1", "4"), ("1/3", str(1 / 3)), ("gcd(12, 18)", "6")],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["9**9**9", "x", "().__class__", "'a'*9", "[1]*9", "1 if 1 else 2", "1" * 1001])
def test_the_calculator_runs_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"is no arithmetic|too large|characters"):
        calculator(expression)


def test_a_function_says_what_it_takes() -> None:
    def add(
        a: int,
        b: float = 1.0,
        names: list[str] | None = None,
        most: Optional[int] = None,  # noqa: UP045 - the older spelling
        unit: Literal["cm", "inch"] = "cm",
        level: Literal[1, 2, None] = None,
        more: dict[str, int] | None = None,
        rest: list | None = None,  # type: ignore[type-arg]
        untold="",  # type: ignore[no-untyped-def]
    ) -> float:
        """Add two numbers."""
        return a + b

    function = tool_of(add).schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"] == {
        "a": {"type": "integer"}, "b": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}},
        "most": {"type": "integer"}, "unit": {"type": "string", "enum": ["cm", "inch"]},
        "level": {"type": "integer", "enum": [1, 2]}, "more": {"type": "object"}, "rest": {"type": "array"},
        "untold": {"type": "string"},
    }  # fmt: skip


def test_a_parameter_without_a_form_in_json_is_refused() -> None:
    def either(a: int | str) -> None: ...
    def mixed(a: Literal["x", 1]) -> None: ...
    def nested(a: list[Path]) -> None: ...
    def picture(a: bytes) -> None: ...
    def anything(*a: int) -> None: ...
    def keyed(**a: int) -> None: ...
    def placed(a: int, /) -> None: ...

    for function in (either, mixed, nested, picture, anything, keyed, placed):
        with pytest.raises(EnvironmentFailed, match=rf"'{function.__name__}': the parameter `\**a: .*; take str, int"):
            tool_of(function)

    def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(EnvironmentFailed, match="'unknown': its annotations cannot be read: name 'Nowhere'"):
        tool_of(unknown)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool": []}, "environment.function.tools.tool: unknown"),
        ({"tools": ["abacus"]}, "'abacus' is no tool"),
        ({"tools": ["missing.py:f"]}, "no file 'missing.py'"),
        ({"tools": ["mcp:x"]}, "pip install 'slipstream-rl\\[mcp\\]'|does not start"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_at_the_start(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        tool_loop.prepare(options)


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def calculator(expression: str) -> str:\n    """Mine."""\n    return ""\n')
    mine = f"{tmp_path}/mine.py:calculator"
    said = f"'calculator' and '{mine}' both have a tool 'calculator'.*; rename one or leave it out"
    with pytest.raises(EnvironmentFailed, match=said):
        tool_loop.prepare({"tools": ["calculator", mine]})


@pytest.fixture
def arena() -> None:
    pytest.importorskip("textarena", reason="the extra textarena is not installed")


async def play(answers: Sequence[str], **options: Any) -> tuple[Scripted, Any]:
    options = {"game": "GuessTheNumber-v0", "style": "text", **options}
    textarena_games.prepare(options)
    client = Scripted(answers, options)
    return client, await textarena_games.rollout({"prompt": "Play.", "columns": {"seed": 3}}, client)  # type: ignore[arg-type]


async def test_a_game_is_the_same_for_all_episodes_of_a_prompt(arena: None) -> None:
    guesses = [f"[{number}]" for number in range(1, 10)]
    won = [await play(guesses, settings={"max_number": 9}) for _ in range(2)]
    (first, outcome), (second, again) = won
    assert outcome.reward == again.reward == 1.0 and outcome.metrics["episode/finished"] == 1.0
    assert first.contexts == second.contexts, "the number to guess follows from the seed of the prompt"
    assert all(later.startswith(earlier) for earlier, later in zip(first.contexts, first.contexts[1:], strict=False))
    assert "higher" in first.contexts[-1] and "Play." in first.contexts[0]


async def test_a_game_of_two_trains_one_seat(arena: None) -> None:
    client, outcome = await play([f"[{cell}]" for cell in (0, 4, 1, 5, 2, 8)], game="TicTacToe-v0", players=2)
    assert outcome.leave_out == [1, 3] and outcome.reward == 1.0
    assert client.contexts[2].startswith(client.contexts[0]) and not client.contexts[1].startswith(client.contexts[0])


@pytest.mark.parametrize("options", [{"game": "Nothing-v0"}, {"style": "loud"}, {"seats": 3}, {"settings": {"x": 1}}])
async def test_a_game_that_cannot_be_played_is_refused_at_the_start(arena: None, options: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFailed, match=next(iter(options))):
        await play([], **options)


LOOKS = """
import os
print(os.getcwd(), os.path.exists({file!r}), os.environ.get("SLIPSTREAM_WORD"))
"""


async def test_programs_of_the_python_tool_run_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_isolation()
    monkeypatch.setenv("SLIPSTREAM_WORD", "told")
    said = [call("python", code="print(6 * 7)"), call("python", code=LOOKS.format(file=__file__)), "42"]
    client, trajectory = await converse(said, tools=["python"])
    assert client.contexts[1][-1]["content"] == "42"
    assert client.contexts[2][-1]["content"] == "/box False None"
    assert trajectory.metrics == {"episode/tool_calls": 2.0, "episode/tool_errors": 0.0}


async def test_where_nothing_isolates_the_python_tool_is_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nothing = Isolation(is_whole=False, possible=("files", "network"), reason="unshare: Operation not permitted")
    for module in (probe, tools):
        monkeypatch.setattr(module, "isolation", lambda: nothing)
    for allowed in (False, "true"):
        with pytest.raises(EnvironmentFailed, match=r"'python': .* read and write files.*tools.allow_unisolated: true"):
            tool_loop.prepare({"tools": ["python"], "allow_unisolated": allowed})
    client, _ = await converse([call("python", code="print(6 * 7)"), "42"], tools=["python"], allow_unisolated=True)
    assert client.contexts[1][-1]["content"] == "42"
    assert "WARNING: programs cannot be isolated here" in capfd.readouterr().err


MCP_SERVER = '''
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ValueError("negative")
    return a + b

@server.tool()
def path() -> str:
    """PYTHONPATH of the server."""
    return os.environ.get("PYTHONPATH", "")

@server.tool()
def die() -> int:
    """End the server."""
    os._exit(1)

server.run(transport="stdio")
'''


@pytest.mark.slow
async def test_tools_of_a_real_mcp_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/lib")
    (tmp_path / "server.py").write_text(MCP_SERVER)
    tools = [f"mcp:{sys.executable} {tmp_path}/server.py"]
    client, trajectory = await converse([call("add", a=2, b=3), call("add", a=-1, b=3), "5"], tools=tools)
    assert client.contexts[1][-1]["content"] == "5"
    assert (
        "error: RuntimeError: " in client.contexts[2][-1]["content"]
        and trajectory.metrics["episode/tool_errors"] == 1.0
    )
    client, _ = await converse([call("path"), "done"], tools=tools)
    assert client.contexts[1][-1]["content"] == f"{tmp_path}/lib"
    client, trajectory = await converse([call("add", a=2, b=3), call("die"), call("add", a=2, b=4), "6"], tools=tools)
    said = [context[-1]["content"] for context in client.contexts[1:]]
    assert said == ["5", "error: MCPError: Connection closed", "6"], "a server that has died is started again"
