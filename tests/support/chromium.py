"""A headless Chromium, driven over its own debugging pipe: no driver program, no port.

Commands and answers are JSON objects that end with a zero byte (Chrome DevTools Protocol, --remote-debugging-pipe).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MISSING = "no Chromium on this machine (Debian: apt-get install chromium-headless-shell)"
ANSWER_S = 60.0


def find() -> str | None:
    """A Chromium's path; None without."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. A context manager."""

    def __init__(self, program: str, profile: Path) -> None:
        here, there = os.pipe(), os.pipe()
        os.set_inheritable(here[0], True), os.set_inheritable(there[1], True)
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--remote-debugging-pipe", "--disable-extensions",
            "--disable-background-networking", f"--user-data-dir={profile}",
        ]  # fmt: skip

        def place_pipes() -> None:
            os.dup2(here[0], 203), os.dup2(there[1], 204)
            os.dup2(203, 3), os.dup2(204, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=place_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(here[0]), os.close(there[1])
        self._to, self._from, self._buffer, self._number = here[1], there[0], b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self._write("Browser.close", {})
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._to), os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; what happens meanwhile goes to `events`."""
        number, deadline = self._write(method, params), time.monotonic() + ANSWER_S
        while True:
            message = self._read(deadline, method)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self.events.append(message)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, timeout_s: float = ANSWER_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"{script} is not true: {self.run('document.body.innerText')[:2000]}"
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Load a page, until its load event; not one that differs in its fragment alone."""
        seen, deadline = len(self.events), time.monotonic() + ANSWER_S
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[seen:]):
            self.events.append(self._read(deadline, f"load {url}"))

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Size of the window, and the reader's wish for dark pages."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Write the visible page as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def errors(self) -> list[str]:
        """Exceptions, and what the console and the log of the browser complained of."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(json.dumps(params["args"]))
        return found

    def _write(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        return self._number

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], f"{method}: no answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, f"{method}: Chromium has ended"
            self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(text))
