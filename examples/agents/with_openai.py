"""A sum by `openai`, streamed, with a stop string; the reward is how alike answer and sum are."""

import json
import sys
from difflib import SequenceMatcher

from openai import OpenAI

row = json.loads(sys.stdin.readline())
chunks = OpenAI().chat.completions.create(
    model="policy", messages=row["prompt"], stream=True, stop=["."], max_tokens=16
)
said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
print(json.dumps({"reward": SequenceMatcher(None, said.strip(), row["ground_truth"]).ratio()}))
