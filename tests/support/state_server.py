"""A remote state with locks, as Terraform's `http` backend wants it; on loopback, for tests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StateServer:
    """Serves one state. ``lock`` is who holds it, as Terraform says; ``broken``: nothing can be written."""

    def __init__(self) -> None:
        self.state = b""
        self.lock: dict[str, Any] | None = None
        self.broken = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def backend(self) -> str:
        """The block of the module that uses it."""
        url = f"http://127.0.0.1:{self._server.server_port}/"
        return (
            f'terraform {{\n  backend "http" {{\n    address = "{url}"\n    lock_address = "{url}"\n'
            f'    unlock_address = "{url}"\n    retry_max = 0\n  }}\n}}\n'
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200 if store.state else 204, store.state)

            def do_POST(self) -> None:
                body = self._body()
                if store.broken:
                    return self._answer(500)
                store.state = body
                return self._answer(200)

            def do_LOCK(self) -> None:
                asked = json.loads(self._body())
                if store.lock is not None:
                    return self._answer(423, json.dumps(store.lock).encode())
                store.lock = asked
                return self._answer(200)

            def do_UNLOCK(self) -> None:
                self._body()
                store.lock = None
                self._answer(200)

            def log_message(self, *_: object) -> None:
                pass

            def _body(self) -> bytes:
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler
