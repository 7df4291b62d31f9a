"""A sum by openai-agents, with a tool."""

import json
import re
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def calculator(expression: str) -> str:
    """Add two numbers."""
    return str(sum(int(number) for number in re.findall(r"\d+", expression)))


set_tracing_disabled(True)  # it would send traces to OpenAI
row = json.loads(sys.stdin.readline())
agent = Agent(name="sums", model="policy", tools=[calculator])
said = Runner.run_sync(agent, row["prompt"][-1]["content"]).final_output
print(json.dumps({"reward": float(said.strip() == row["ground_truth"])}))
