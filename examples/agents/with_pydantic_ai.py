"""A sum by pydantic-ai, with a tool."""

import json
import re
import sys

from pydantic_ai import Agent

row = json.loads(sys.stdin.readline())
agent = Agent("openai-chat:policy")


@agent.tool_plain
def calculator(expression: str) -> str:
    """Add two numbers."""
    return str(sum(int(number) for number in re.findall(r"\d+", expression)))


said = agent.run_sync(row["prompt"][-1]["content"]).output
print(json.dumps({"reward": float(said.strip() == row["ground_truth"])}))
