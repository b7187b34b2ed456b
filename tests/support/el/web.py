"""The part of the web that a lab's machines know: files by host and path, over http and https."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.namespaces import inside

_TLS = 443
_PORTS = (80, _TLS)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def translate_path(self, path: str) -> str:
        """``web/HOST/PATH``; a host that is not there has no files."""
        host = self.headers.get("Host", "").partition(":")[0]
        return super().translate_path(f"/{host}{path}")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def serving(netns: Path, folder: Path) -> Iterator[None]:
    """Serve ``folder/web`` in a network namespace while the body runs, with the key of ``folder/tls``."""
    handler = partial(_Handler, directory=str(folder / "web"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "tls/server.pem")
    with ExitStack() as stack:
        for port in _PORTS:
            with inside(netns):
                server = ThreadingHTTPServer(("0.0.0.0", port), handler)  # noqa: S104  (the machines' own)
            server.daemon_threads = True
            if port == _TLS:
                server.socket = context.wrap_socket(
                    server.socket, server_side=True, do_handshake_on_connect=False
                )
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
