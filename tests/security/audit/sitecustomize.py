"""Watches every Python process of a run for code that is made from data. Python imports this file by its name.

Opt-in: with this folder on PYTHONPATH and SLIPSTREAM_AUDIT naming a folder, each process that starts writes there

    live-<pid>      the command line, of a forked one its parent's: the hook is in place
    allowed-<pid>   every place that made code and may, once
    caught-<pid>    the first place that made code and may not, with its stack; the process is killed

The nearest frame that is known decides. The import system and the places in ALLOWED may; a frame of ours that comes
first may not, and neither may a library on its behalf. What has no frame of ours on its stack is a library's own.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

WATCHED = {"pickle.find_class", "marshal.loads", "marshal.load", "exec", "compile", "code.__new__", "os.system"}
ROOT = str(Path(__file__).resolve().parents[3])
OURS = tuple(
    f"{ROOT}/{name}/"
    for name in ("configs", "slipstream", "replay", "weight_bus", "rollout_server", "learner", "scripts")
)
IMPORTS = ("<frozen importlib", "<frozen zipimport", "<frozen runpy", "<frozen posixpath")
CODE = {"exec", "compile"}
ALLOWED = {
    # place: what it may do, and why
    "/torch/distributed/checkpoint/": (WATCHED, "our own checkpoints, and what their ranks tell each other"),
    "/torch/fx/operator_schemas.py": (CODE, "names of types in the schemas of torch's own operators"),
    "/packaging/_parser.py": ({"compile"}, "ast.literal_eval of quoted words in what installed packages require"),
    f"{ROOT}/tests/support/forking.py": (CODE, "runs this file in programs that it forks"),
    f"{os.path.dirname(os.__file__)}/typing.py": (CODE, "get_type_hints: annotations of classes that were imported"),
}
FUNCTION = 1
"""CO_OPTIMIZED, which the bodies of modules and classes lack: they run when they are imported, and pydantic and
dataclasses make code of what they say."""


def install(folder):
    """Watch this process from now on."""
    seen = set()

    def note(kind, record):
        with open(f"{folder}/{kind}-{os.getpid()}", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def hook(event, arguments):
        if event not in WATCHED:
            return
        frame = sys._getframe().f_back
        where = judge(event, frame)
        if where is None:
            frames = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=40, lookup_lines=False)
            stack = [f"{place.filename}:{place.lineno} {place.name}" for place in frames]  # innermost first
            note("caught", {"event": event, "what": repr(arguments)[:200], "stack": stack})
            os.kill(os.getpid(), signal.SIGKILL)
        elif (event, where) not in seen:
            seen.add((event, where))
            note("allowed", {"event": event, "where": where})

    def live():
        seen.clear()
        note("live", {"command": sys.orig_argv})

    live()
    os.register_at_fork(after_in_child=live)
    sys.addaudithook(hook)


def judge(event, frame):
    """Who made code, in one word, when he may; None when he may not."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(IMPORTS):
            return "import"
        for place, (events, _) in ALLOWED.items():
            if place in file and event in events:
                return place
        if file.startswith(OURS) and frame.f_code.co_flags & FUNCTION:
            return None
        frame = frame.f_back
    return "library"


if os.environ.get("SLIPSTREAM_AUDIT") and not hasattr(sys, "audited"):
    sys.audited = True  # a forked program has its parent's hook
    install(os.environ["SLIPSTREAM_AUDIT"])
