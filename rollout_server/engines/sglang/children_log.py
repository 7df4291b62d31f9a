"""What SGLang's children log of their end, and the error of a start that it makes."""

import os
import re
import stat

from rollout_server.engines.base import EngineStartFailed, EngineStartRefused

LOG_TAIL_BYTES = 1 << 20
ERROR_LINE = re.compile(r"(?:\[[^\]]*\] )?[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Failure)\b")
"""The last line of a traceback."""
OF_WHAT_IS_GIVEN = re.compile(
    r"(?:\[[^\]]*\] )?(?:Value|Type|NotImplemented|Assertion|Import|ModuleNotFound)Error\b"
    r"(?!.*(?: memory | is not available in ))"
)
"""One about arguments, the model or packages, not about a device, nor about memory or a port that another process has
yet, of which SGLang makes a ValueError too."""


class ChildrenLog:
    """This process's stderr from now on, which SGLang's children share."""

    def __init__(self, descriptor: int = 2) -> None:
        self._path = f"/proc/self/fd/{descriptor}"
        status = os.fstat(descriptor)
        self._begin = status.st_size if stat.S_ISREG(status.st_mode) else None

    def last_error(self) -> str:
        """The last line of a traceback; empty without one, or where it is unreadable."""
        if self._begin is None:
            return ""
        with open(self._path, "rb") as file:
            file.seek(max(self._begin, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return next((line.strip() for line in reversed(lines) if ERROR_LINE.match(line)), "")

    def caused(self, said: str) -> str:
        """What is `said` of a child's end, behind the last error that it logged, if there is one."""
        error = self.last_error()
        return f"{error} ({said})" if error else said


def start_failure(version: str, said: str, last_error: str) -> EngineStartFailed:
    """Why SGLang did not start: its children's last error, if known, and what it `said`."""
    # Its guess at the OOM killer is kept for a child that SIGKILL ended.
    if not (was_killed := "exit code: -9" in said):
        said = said.partition(" If exit code is -9")[0]
    why = f"{last_error} ({said})" if last_error else f"{said} The cause stands above in its log."
    kind = EngineStartRefused if OF_WHAT_IS_GIVEN.match(last_error) and not was_killed else EngineStartFailed
    return kind(f"SGLang {version} did not start: {why}")
