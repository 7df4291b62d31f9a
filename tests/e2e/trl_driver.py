"""The example under TRL's trainer with rollout servers that have a planted fault: `FAULT ORDINAL <its arguments>`."""

import sys
from collections.abc import Mapping
from typing import Any

from examples.trl import processes, sort6
from learner.launch.children import Child

real_start: Any = processes.LauncherBeside._start


def start(self: Any, name: str, command: list[str], environment: Mapping[str, str]) -> Child:
    if "rollout_server.main" in command:
        place = command.index("rollout_server.main")
        command = [*command[:place], "tests.e2e.faulty_rollout_server", *sys.argv[1:3], *command[place + 1 :]]
    child: Child = real_start(self, name, command, environment)
    return child


if __name__ == "__main__":
    processes.LauncherBeside._start = start  # type: ignore[method-assign]
    sys.exit(sort6.main(sys.argv[3:]))
