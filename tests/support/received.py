"""A web server on this machine that keeps what it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import NamedTuple


class Received(NamedTuple):
    """A request. path: of its URL."""

    path: str
    headers: Mapping[str, str]
    body: str


class Service(ThreadingHTTPServer):
    """status: of its answers. has_received: set at the first request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[Received] = []
        self.has_received = Event()
        self.status = 200

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.received.append(Received(self.path, dict(self.headers), body))
        self.server.has_received.set()
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Service]:
    with Service() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
