"""A process under a supervisor (supervisor.py), which ends everything that it leaves behind.

`python -m rollout_server.tasks.workers.worker MODULE PID`, with a socket as stdin: a worker of any kind. MODULE
(rewards/worker.py, environments/worker.py) has `work(channel) -> exit code`; PID is the process that asks it
(process.Worker). The first frame is an order, which one frame answers: {"error": text} where code of the user cannot be
loaded. What follows is the kind's own. Prints go to stderr, and the socket is not fd 0, 1 or 2 any more when code of
the user is loaded.

`... program PID PACKAGES COMMAND...`: a program that is not ours. PACKAGES is what PYTHONPATH has for our own sake,
which it does not get.
"""

import importlib
import os
import sys
from typing import NoReturn

from rollout_server.tasks.workers.supervisor import supervise
from slipstream.runtime.packages import SAFE_PATH

PROGRAM = "program"
NOT_FOUND = 127


def main() -> NoReturn:
    """Entry point."""
    module, asker, *rest = sys.argv[1:]
    supervise(int(asker))
    if module == PROGRAM:
        _become(*rest)
    from rollout_server.tasks.workers.frames import private_channel  # loads msgpack

    os.environ.pop(SAFE_PATH, None)  # for programs that code of the user starts
    sys.path.append(os.getcwd())  # last, for its modules that are named without a path
    code: int = importlib.import_module(module).work(private_channel())
    sys.stdout.flush()
    os._exit(code)  # threads and loops of the user must not hold up the end


def _become(packages: str, *command: str) -> NoReturn:
    left = [path for path in os.environ.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", packages)]
    if left:
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    sys.exit(NOT_FOUND)


if __name__ == "__main__":
    main()
