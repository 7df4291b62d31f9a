"""A worker process of any kind: `python -m rollout_server.tasks.workers.worker MODULE PID`, with a socket as stdin.

MODULE (rewards/worker.py, environments/worker.py) has `work(channel) -> exit code`; PID is the process that asks it
(process.Worker). The first frame is an order, which one frame answers: {"error": text} where code of the user cannot be
loaded. What follows is the kind's own. A supervisor (supervisor.py) ends everything that is left behind; prints go to
stderr, and the socket is not fd 0, 1 or 2 any more when code of the user is loaded.
"""

import importlib
import os
import sys

from rollout_server.tasks.workers.frames import private_channel
from rollout_server.tasks.workers.supervisor import supervise
from slipstream.runtime.packages import SAFE_PATH


def main() -> int:
    """Entry point."""
    module, asker = sys.argv[1:]
    supervise(int(asker))
    os.environ.pop(SAFE_PATH, None)  # for programs that code of the user starts
    sys.path.append(os.getcwd())  # last, for its modules that are named without a path
    code: int = importlib.import_module(module).work(private_channel())
    sys.stdout.flush()
    os._exit(code)  # threads and loops of the user must not hold up the end


if __name__ == "__main__":
    sys.exit(main())
