"""HTTP of the dashboard: loopback only, a token for every request, files of a fixed list, no code but its own.

What guards it, each with a test in tests/slipstream/test_dashboard_server.py:
- the socket is bound to 127.0.0.1, and the Host header must name the loopback (against DNS rebinding);
- every request brings the token, in the URL of the first page and in a cookie of this port afterwards (HttpOnly,
  SameSite=Strict), compared in constant time; requests that another site's page makes are refused;
- paths are looked up in a table, so no path reaches the file system;
- the policy of the page lets nothing run or load that does not come from this server as a file.
"""

import hmac
import json
import logging
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

from slipstream.view.dashboard.run import RunReader
from slipstream.view.dashboard.trajectories import SORTABLE

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names in a Host header, with any port: an ssh tunnel may end at another one."""
STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FILES = {"/": STATIC / "index.html", **{f"/{path.name}": path for path in STATIC.iterdir() if path.suffix != ".html"}}
"""By address: nothing else is read for a request."""
TRACE = "/trace"
"""Address of a merged trace, by run and name."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TIMEOUT_S = 30.0
"""Of an idle connection."""
Query = Mapping[str, str]


class HttpError(Exception):
    """A request that gets no answer but its status and why."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Dashboard:
    """Serves one run or two. `url` has the token."""

    def __init__(self, runs: Sequence[RunReader], port: int = 0, token: str | None = None) -> None:
        """Bind to the loopback interface. Raises OSError: the port is taken."""
        self.runs = list(runs)
        self.token = token or secrets.token_urlsafe(24)
        self._http = _Server((LOOPBACK, port), _Handler)
        self._http.dashboard = self
        self.port = int(self._http.server_address[1])
        self.cookie = f"slipstream_{self.port}"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Answer requests until `close`, which another thread calls, or a KeyboardInterrupt."""
        for run in self.runs:
            run.trajectories.scan()
        self._http.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop serving and give the port back."""
        for run in self.runs:
            run.trajectories.close()
        self._http.server_close()

    def stop(self) -> None:
        """Have `serve` return; not from its own thread."""
        self._http.shutdown()

    def check(self, host: str, fetch_site: str, tokens: Sequence[str]) -> None:
        """Raises HttpError: the request did not come from this page, or has not the token."""
        if _name_in(host) not in HOSTS:
            raise HttpError(HTTPStatus.FORBIDDEN, f"Host {host!r} is not this machine's loopback")
        if fetch_site in ("cross-site", "same-site"):
            raise HttpError(HTTPStatus.FORBIDDEN, "the page of another site asks")
        mine = self.token.encode()
        if not any([hmac.compare_digest(token.encode("utf-8", "replace"), mine) for token in tokens]):
            raise HttpError(HTTPStatus.UNAUTHORIZED, "open the whole URL, with ?token=, that the dashboard has printed")

    def answer(self, path: str, query: Query) -> Any:
        """What an address of the interface gives. Raises HttpError."""
        if path == "/api/runs":
            return [{"name": run.name, "age_s": run.age_s(), **run.ending()} for run in self.runs]
        view = VIEWS.get(path)
        if view is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such page")
        try:
            return view(self.run(query), query)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            status, why = HTTPStatus.BAD_REQUEST, str(error)
            if not isinstance(error, KeyError | ValueError):
                log.exception("dashboard: %s cannot be shown", path)
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                why = f"a file of the run holds what this view cannot show: {error}; the terminal says where it failed"
            raise HttpError(status, why) from error

    def run(self, query: Query) -> RunReader:
        """The one that is asked about. Raises HttpError."""
        number = query.get("run", "0")
        if not number.isdecimal() or len(number) > 1 or int(number) >= len(self.runs):
            raise HttpError(HTTPStatus.NOT_FOUND, f"run={number[:20]}: there are {len(self.runs)}, counted from 0")
        return self.runs[int(number)]

    def trace(self, query: Query) -> bytes:
        """A merged trace, for Perfetto. Raises HttpError: the run has none of this name."""
        path = self.run(query).traces().get(query.get("name", ""))
        if path is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "there is no such trace; the pipeline view lists those of the run")
        return path.read_bytes()


def _name_in(host: str) -> str:
    """Of a Host header, without the port; empty where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _number(query: Query, name: str) -> float | None:
    """Raises ValueError: it is there and not a finite number."""
    text = query.get(name, "")
    value = float(text) if text else None
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{name}={text}: not a finite number")
    return value


def _page(run: RunReader, query: Query) -> dict[str, Any]:
    filters = {}
    for column in SORTABLE:
        low, high = _number(query, f"{column}_min"), _number(query, f"{column}_max")
        if low is not None or high is not None:
            filters[column] = (-math.inf if low is None else low, math.inf if high is None else high)
    return run.trajectories.page(
        filters,
        kind=query.get("kind", ""),
        problem=query.get("problem", ""),
        sort=query.get("sort", "step"),
        descending=query.get("order", "desc") == "desc",
        first=max(0, int(query.get("first", "0"))),
        count=max(1, int(query.get("count", "50"))),
    )


VIEWS: Mapping[str, Callable[[RunReader, Query], Any]] = {
    "/api/metrics": lambda run, query: run.metrics(query.get("stamp", "")),
    "/api/series": lambda run, query: run.series([name for name in query.get("names", "").split(",") if name]),
    "/api/pipeline": lambda run, query: run.pipeline(_number(query, "start"), _number(query, "end")),
    "/api/fleet": lambda run, _: run.fleet(),
    "/api/trajectories": _page,
    "/api/trajectory": lambda run, query: run.trajectories.one(query.get("id", "")),
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    dashboard: Dashboard

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no news; anything else is logged with its trace."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            log.exception("dashboard: a request failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "slipstream", ""
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        dashboard, address = self.server.dashboard, urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        try:
            dashboard.check(self.headers.get("Host", ""), self.headers.get("Sec-Fetch-Site", ""), self._tokens(address))
            if address.path in FILES:
                file = FILES[address.path]
                kind = f"{TYPES[file.suffix]}; charset=utf-8"
                self._send(HTTPStatus.OK, kind, file.read_bytes(), sets_cookie="token" in query)
                return
            if address.path == TRACE:
                self._send(HTTPStatus.OK, "application/gzip", dashboard.trace(query))
                return
            body = json.dumps(_finite(dashboard.answer(address.path, query)), allow_nan=False)
            self._send(HTTPStatus.OK, "application/json", body.encode())
        except HttpError as refusal:
            self._send(refusal.status, "text/plain; charset=utf-8", f"{refusal}\n".encode())
        except OSError as error:  # of the run folder: a file that has gone meanwhile, a disk
            text = f"the run folder cannot be read: {error}\n"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", text.encode())

    def _tokens(self, address: SplitResult) -> list[str]:
        """What the request offers: in the URL of the page, or in this port's cookie."""
        offered = parse_qs(address.query).get("token", []) if address.path == "/" else []
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.dashboard.cookie:
                offered.append(value)
        return offered

    def _send(self, status: HTTPStatus, kind: str, body: bytes, *, sets_cookie: bool = False) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if sets_cookie:
            dashboard = self.server.dashboard
            self.send_header("Set-Cookie", f"{dashboard.cookie}={dashboard.token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No access log: its lines would hold the token."""


def _finite(value: Any) -> Any:
    """The same data with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
