"""Web servers for the machines of a lab, which have no route out: files, and a proxy for apt.

The servers listen in the network namespace of the machines; this process has its own namespace.
"""

from __future__ import annotations

import ctypes
import hashlib
import http.client
import shutil
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from clusterctl.providers.local.image import apt_proxy

PROXY_PORT = 3128
_TIMEOUT_S = 60
_MOST_KEPT_MIB = 2048
_CLONE_NEWNET = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")


@contextmanager
def inside(namespace: Path) -> Iterator[None]:
    """Sockets that this thread makes in the body belong to that namespace, also afterwards. Needs
    root.
    """
    with _OWN.open() as own, namespace.open() as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


@contextmanager
def _serving(
    netns: Path, port: int, handler: Any, tls: ssl.SSLContext | None = None
) -> Iterator[None]:
    with inside(netns):
        server = ThreadingHTTPServer(("0.0.0.0", port), handler)  # noqa: S104  (the machines' own)
    server.daemon_threads = True
    if tls:
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def translate_path(self, path: str) -> str:
        """``web/HOST/PATH``; a host that is not there has no files."""
        host = self.headers.get("Host", "").partition(":")[0]
        return super().translate_path(f"/{host}{path}")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving_files(netns: Path, folder: Path) -> Iterator[None]:
    """Serve ``folder/web`` over http and https while the body runs, with the key of
    ``folder/tls``.
    """
    handler = partial(_Files, directory=str(folder / "web"))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "tls/server.pem")
    with _serving(netns, 80, handler), _serving(netns, 443, handler, tls):
        yield


class _Proxy(BaseHTTPRequestHandler):
    """Asks as this machine's own apt would. Packages, and lists named by their hash, are kept."""

    protocol_version = "HTTP/1.1"
    hosts: frozenset[str]
    cache: Path
    opener: urllib.request.OpenerDirector

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.scheme != "http" or url.netloc not in self.hosts:
            self.send_error(HTTPStatus.FORBIDDEN, "not one of apt's hosts")
            return
        lasting = url.path.endswith(".deb") or "/by-hash/" in url.path
        digest = hashlib.sha256(self.path.encode()).hexdigest()
        kept = self.cache / (digest if lasting else f"passed-{threading.get_ident()}")
        try:
            if not lasting or not kept.exists():
                self._keep(kept)
        except HTTPError as exc:
            self.send_error(exc.code)
        except (URLError, http.client.HTTPException, TimeoutError) as exc:
            self.send_error(HTTPStatus.BAD_GATEWAY, str(exc))
        else:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(kept.stat().st_size))
            self.end_headers()
            with kept.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)

    def _keep(self, kept: Path) -> None:
        part = kept.with_suffix(f".{threading.get_ident()}")
        with self.opener.open(self.path, timeout=_TIMEOUT_S) as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file)
        part.rename(kept)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving_apt(netns: Path, cache: Path, hosts: frozenset[str]) -> Iterator[None]:
    """Be apt's proxy to these hosts, and no others, while the body runs."""
    cache.mkdir(parents=True, exist_ok=True)
    room = _MOST_KEPT_MIB << 20
    for path in sorted(cache.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True):
        room -= path.stat().st_size
        if room < 0:  # the oldest go
            path.unlink()
    proxy = apt_proxy()
    proxies = urllib.request.ProxyHandler({"http": proxy.split('"')[1]} if proxy else {})
    _Proxy.hosts = hosts
    _Proxy.cache = cache
    _Proxy.opener = urllib.request.build_opener(proxies)
    with _serving(netns, PROXY_PORT, _Proxy):
        yield
