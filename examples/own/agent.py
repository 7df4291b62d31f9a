"""An agent that knows only `openai`. `environment.function: {agent: {command: [python, agent.py]}}`."""

import json

from openai import OpenAI

row = json.loads(input())  # the row of the dataset, a line on stdin; address and key are in the environment
client, messages = OpenAI(), list(row["prompt"])
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12).choices[0].message
    text = (answer.content or "").strip()
    if text.isdigit():
        break
    messages += [answer, {"role": "user", "content": "0"}]
print(json.dumps({"reward": float(text == row["ground_truth"]), "messages": len(messages)}))
