"""A sum by smolagents, with a tool; the reward is how alike answer and sum are."""

import json
import os
import re
import sys
from difflib import SequenceMatcher

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Add two numbers.

    Args:
        expression: two numbers, with a plus between.
    """
    return str(sum(int(number) for number in re.findall(r"\d+", expression)))


row = json.loads(sys.stdin.readline())
model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"])
agent = ToolCallingAgent([calculator], model, max_steps=2, verbosity_level=LogLevel.OFF)
said = agent.run(row["prompt"][-1]["content"])
print(json.dumps({"reward": SequenceMatcher(None, str(said).strip(), row["ground_truth"]).ratio()}))
