"""Runs tests in a copy of the tree, each time in a fork that has other people's packages loaded and none of ours.

A line of standard input is a JSON list of arguments for `python -m`; the answer is [exit code, end of the output].
"""

import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import threading

LOADED = (
    "hypothesis", "msgpack", "pydantic.main", "pytest", "torch.distributed.checkpoint.state_dict", "zmq.asyncio",
    "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
"""What takes longer to load than most tests to run."""
LIMIT_S = 300.0
TAIL = 4000
FAILED = 1


def child(arguments: list[str], output: int) -> None:
    """Run a module as `python -m` does, and end this process."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = arguments
    code = FAILED
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            child(arguments, output.fileno())
        limit = threading.Timer(LIMIT_S, os.killpg, (pid, signal.SIGKILL))
        limit.start()
        _, status = os.waitpid(pid, 0)
        limit.cancel()
        output.seek(0)
        text = output.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # a hang, or a death, which is a failure as well
        return FAILED, text[-TAIL:] + f"\nProcessError: ended by signal {-code}"
    return code, text[-TAIL:]


for name in LOADED:
    importlib.import_module(name)
for line in sys.stdin:
    sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
    sys.stdout.flush()
