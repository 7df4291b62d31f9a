"""An environment's function is looked at before anything starts, without running its code."""

from pathlib import Path
from typing import Any

import pytest

from configs.environment import Environment
from slipstream.check import functions
from slipstream.check.functions import problem_with_environment, problem_with_tools

SOURCE = """
raise SystemExit("this is never run")
async def rollout(row, client, depth=3): ...
async def one(row): ...
def plain(row, client): ...
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rollout", None),
        ("one", "has the parameters (row); take `async def one(row, client)`"),
        ("plain", "is not asynchronous"),
        ("rolout", "has no function 'rolout'; did you mean 'rollout'"),
    ],
)
def test_the_function_is_there_and_takes_a_row_and_a_client(tmp_path: Path, name: str, said: str | None) -> None:
    (tmp_path / "env.py").write_text(SOURCE)
    problem = problem_with_environment(f"{tmp_path}/env.py:{name}")
    assert problem is said or (said is not None and said in str(problem))


def test_tools_are_looked_at_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(*tools: str, **options: Any) -> str | None:
        return problem_with_tools(Environment(function="tools", options={"tools": list(tools), **options}))

    (tmp_path / "mine.py").write_text("def search(query: str): ...")
    assert problem("calculator", f"{tmp_path}/mine.py:search", "mcp:python server.py:x.py") is None
    assert problem_with_tools(Environment(function="tools", options={"tools": "calculator"})) is None
    one = problem_with_tools(Environment(function="tools", options={"tools": "mine.py:search"}))
    assert "'mine.py:search': no file 'mine.py'" in str(one)
    assert "'mine.py:search': no file 'mine.py'" in str(problem("mine.py:search"))
    assert "has no function 'serch'; did you mean 'search'" in str(problem(f"{tmp_path}/mine.py:serch"))
    monkeypatch.setattr(functions, "_problem_with_sandbox", lambda: "programs cannot be isolated here")
    assert "'python': programs cannot be isolated here; accept it with environment.options" in str(problem("python"))
    assert problem("python", allow_unisolated=True) is None


def test_a_missing_file_is_named_and_names_are_left_to_the_server() -> None:
    assert "no file 'missing.py'" in str(problem_with_environment("missing.py:rollout"))
    assert [problem_with_environment(spec) for spec in (None, "tools", "package.module:rollout")] == [None] * 3


def test_a_sandbox_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "SANDBOX_S", 0.001)
    problem = problem_with_tools(Environment(function="tools", options={"tools": ["python"]}))
    assert problem is not None and "rollout_server.tasks.sandbox did not answer within 0.001 s" in problem
