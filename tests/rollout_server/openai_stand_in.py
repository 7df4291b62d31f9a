"""A server on loopback that speaks as much of the OpenAI protocol as judges and reward models need, faults included."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""(status, body): a dict as JSON, bytes as they are; status 0 hangs up."""


@dataclass
class Served:
    """What the server has been asked, and how it answers."""

    answer: Callable[[str, dict[str, Any]], Reply]
    url: str = ""
    requests: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    """(path, body, Authorization) of each."""
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def verdict(text: str | None, reason: str = "stop", **message: Any) -> Reply:
    """A chat completion with this text."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}]}


@contextmanager
def serving(answer: Callable[[str, dict[str, Any]], Reply]) -> Iterator[Served]:
    """Answer requests until the end of the block."""
    served = Served(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                served.requests.append((self.path, body, self.headers.get("Authorization", "")))
                served.at_once += 1
                served.most_at_once = max(served.most_at_once, served.at_once)
            try:
                status, reply = served.answer(self.path, body)
            finally:
                with served.lock:
                    served.at_once -= 1
            if status == 0:
                self.close_connection = True
                return
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
