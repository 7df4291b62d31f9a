"""`python -m rollout_server.tasks.agents.launch PID PACKAGES COMMAND...`: an agent under a supervisor of its own.

PID is the environment process; PACKAGES is what PYTHONPATH has for our own sake, which the agent does not get.
"""

import os
import sys

from rollout_server.tasks.workers.supervisor import supervise

NOT_FOUND = 127


def main() -> int:
    """Entry point; on success the agent takes the place of this process."""
    parent, packages, *command = sys.argv[1:]
    supervise(int(parent))
    left = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", packages)]
    if left:
        os.environ["PYTHONPATH"] = os.pathsep.join(left)
    else:
        os.environ.pop("PYTHONPATH", None)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
