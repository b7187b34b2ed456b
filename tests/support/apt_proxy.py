"""A way to Debian for machines without a route: an HTTP proxy on the bridge that knows apt's hosts alone.

It asks as this machine's own apt would. Packages, and lists named by their hash, never change: they are kept.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from clusterctl.providers.local.image import apt_proxy
from tests.support.namespaces import inside

PORT = 3128
_TIMEOUT_S = 60
_MOST_KEPT_MIB = 2048


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hosts: frozenset[str]
    cache: Path
    opener: urllib.request.OpenerDirector


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.scheme != "http" or url.netloc not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "not one of apt's hosts")
            return
        lasting = url.path.endswith(".deb") or "/by-hash/" in url.path
        name = (
            hashlib.sha256(self.path.encode()).hexdigest() if lasting else f"passed-{threading.get_ident()}"
        )
        kept = self.server.cache / name
        try:
            if not lasting or not kept.exists():
                self._keep(kept)
            self._send(kept)
        except HTTPError as exc:
            self.send_error(exc.code)
        except (URLError, http.client.HTTPException, TimeoutError) as exc:
            self.send_error(HTTPStatus.BAD_GATEWAY, str(exc))

    def _keep(self, kept: Path) -> None:
        part = kept.with_suffix(f".{threading.get_ident()}")
        request = urllib.request.Request(self.path)  # noqa: S310  (http alone got here)
        with self.server.opener.open(request, timeout=_TIMEOUT_S) as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file)
        part.rename(kept)

    def _send(self, kept: Path) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(kept.stat().st_size))
        self.end_headers()
        with kept.open("rb") as file:
            shutil.copyfileobj(file, self.wfile)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def serving(netns: Path, cache: Path, hosts: frozenset[str]) -> Iterator[None]:
    """Serve in a network namespace while the body runs; questions go out from this one."""
    cache.mkdir(parents=True, exist_ok=True)
    _bound(cache)
    with inside(netns):
        server = _Server(("0.0.0.0", PORT), _Handler)  # noqa: S104  (the namespace is the machines' own)
    server.hosts, server.cache = hosts, cache
    server.opener = urllib.request.build_opener(urllib.request.ProxyHandler(_own_proxy()))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _own_proxy() -> dict[str, str]:
    said = apt_proxy()
    return {"http": said.split('"')[1]} if said else {}


def _bound(cache: Path) -> None:
    """Forget what was fetched longest ago, where much was."""
    room = _MOST_KEPT_MIB << 20
    for path in sorted(cache.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True):
        room -= path.stat().st_size
        if room < 0:
            path.unlink()
