"""The hook that watches whole runs for code that is made of data (tests/e2e/test_whole_run.py)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("body", "caught"),
    [
        ("import pickle; return pickle.loads(b'cbuiltins\\nlen\\n.')", "pickle.find_class"),
        ("return eval(text)", "compile"),
        ("exec(text)", "compile"),
        ("import marshal; return marshal.loads(marshal.dumps(text))", "marshal.loads"),
        ("import os; os.system('true')", "os.system"),
        ("import ast; return ast.literal_eval(text)", "compile"),
        ("import collections; return collections.namedtuple('T', 'a')", "compile"),
        ("import wave; return text", None),
        ("import json; return json.loads(text)", None),
        ("import msgpack; return msgpack.unpackb(msgpack.packb(text))", None),
    ],
)
def test_the_hook_knows_code_from_data(tmp_path, body, caught):
    """A function whose file is one of ours, in a process of its own."""
    file = HERE.parents[2] / "replay" / "channel" / "no_such_file.py"
    source = f"def handle(text):\n    {body}\n"
    program = f"scope = {{}}\nexec(compile({source!r}, {str(file)!r}, 'exec'), scope)\nscope['handle']('1')\n"
    environment = {**os.environ, "SLIPSTREAM_AUDIT": str(tmp_path), "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", program], cwd=HERE, env=environment, timeout=150, capture_output=True)
    assert done.returncode == (0 if caught is None else -signal.SIGKILL), done.stderr
    events = [json.loads(file.read_text())["event"] for file in tmp_path.glob("caught-*")]
    assert events == ([] if caught is None else [caught])
