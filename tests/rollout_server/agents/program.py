"""Agents that are programs, without the client package, which takes a second to import: what a row's mode says."""

import json
import os
import subprocess
import sys
import time
import urllib.request

row = json.loads(sys.stdin.readline())
mode, folder = row["extra_info"]["mode"], row["extra_info"]["folder"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/completions",
    json.dumps({"model": os.environ["OPENAI_MODEL"], "prompt": sys.argv[1], "max_tokens": 3}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)
if mode in ("hangs", "leaves"):
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    path = os.path.join(folder, f"{mode}-{os.getpid()}")
    subprocess.Popen([sys.executable, "-c", code, path], start_new_session=True)
    while not (os.path.exists(path) and os.path.getsize(path)):
        time.sleep(0.01)
if mode == "hangs":
    time.sleep(600)
if mode == "crashes":
    sys.exit("no such game")
if mode == "floods":
    for _ in range(64):
        sys.stdout.write("x" * 65536)
    print()
if mode == "misspells":
    print(json.dumps({"rewrd": 1.0}))
elif mode == "judged":
    print("the answer is", said["choices"][0]["text"])
else:
    print(
        json.dumps(
            {"reward": 0.5, "tokens": said["usage"]["completion_tokens"], "paths": int("PYTHONPATH" in os.environ)}
        )
    )
