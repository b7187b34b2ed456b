"""A container registry of this machine, Debian's docker-registry, and faults between it and a client.

``registry`` starts it, ``Registry.push`` gives it a small image by its HTTP API. ``Faults`` is a
server that passes requests on to it, and breaks those that a test chooses.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

import bcrypt
import pytest

from tests.support.sshd import reserved_port

PROGRAM = "docker-registry"
USER = "ann"
PASSWORD = "s3cret-word"  # noqa: S105
LOGIN = f"{USER}:{PASSWORD}"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
# Incompressible, so that transfers can be cut in the middle.
LAYER_BYTES = 3 << 20
_START_S = 20.0
_CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}, cache: {{blobdescriptor: inmemory}}}}
http: {{addr: "{address}"}}
{auth}
"""


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def basic(login: str) -> str:
    """The Authorization header of a login."""
    return f"Basic {base64.b64encode(login.encode()).decode()}"


@dataclass(frozen=True)
class Image:
    """An image. parts: digest -> content, of the layers and at last the configuration."""

    manifest: bytes
    parts: Mapping[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    def save(self, archive: Path) -> None:
        """Write an OCI archive."""
        entry = {**_entry(self.manifest, MANIFEST), "annotations": {}}
        index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        files = {f"blobs/{digest.replace(':', '/')}": part for digest, part in self.parts.items()}
        files[f"blobs/{self.digest.replace(':', '/')}"] = self.manifest
        files |= {"index.json": index, "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
        with tarfile.open(archive, "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def image(seed: str, machine: str = "amd64", size: int = LAYER_BYTES) -> Image:
    """An image of two layers, the second with ``size`` bytes that ``seed`` decides."""
    noise = hashlib.shake_256(seed.encode()).digest(size)
    layers = [_tar("etc/name", seed.encode()), _tar("data", noise)]
    return image_of(layers, [f"SEED={seed}"], machine)


def image_of(layers: Sequence[bytes], variables: Sequence[str], machine: str = "amd64") -> Image:
    """An image of these layers, plain or compressed tar files."""
    settings = {
        "architecture": machine,
        "os": "linux",
        "config": {"Env": variables},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(_plain(layer)) for layer in layers]},
    }
    config = json.dumps(settings).encode()
    kind = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _entry(config, f"{kind}.config.v1+json"),
        "layers": [_entry(layer, f"{kind}.layer.v1.tar{_suffix(layer)}") for layer in layers],
    }
    parts = {digest_of(part): part for part in (*layers, config)}
    return Image(json.dumps(manifest).encode(), parts)


def _suffix(layer: bytes) -> str:
    return "+zstd" if layer[:4] == b"\x28\xb5\x2f\xfd" else ""


def _plain(layer: bytes) -> bytes:
    if not _suffix(layer):
        return layer
    return subprocess.run(["zstd", "-dc"], input=layer, capture_output=True, check=True).stdout


def _tar(name: str, content: bytes) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        return file.getvalue()


def _entry(content: bytes, kind: str) -> Mapping[str, Any]:
    return {"mediaType": kind, "digest": digest_of(content), "size": len(content)}


class Registry:
    """A registry. login: USER:PASSWORD or ""."""

    def __init__(self, address: str, login: str) -> None:
        self.address = address
        self._login = login

    def push(self, path: str, tag: str, pushed: Image) -> str:
        """Push an image; return its name, such as 127.0.0.1:5000/demo:1."""
        for digest, content in pushed.parts.items():
            place = self._call("POST", f"/v2/{path}/blobs/uploads/", b"", 202)
            url = urlsplit(place)
            self._call("PUT", f"{url.path}?{url.query}&digest={digest}", content, 201)
        self._call("PUT", f"/v2/{path}/manifests/{tag}", pushed.manifest, 201, MANIFEST)
        return f"{self.address}/{path}:{tag}"

    def push_index(self, path: str, tag: str, images: Mapping[str, Image]) -> str:
        """Push images for processors (``images``: architecture -> image), and a list of them."""
        listed = []
        for machine, pushed in images.items():
            self.push(path, f"{tag}-{machine}", pushed)
            entry = _entry(pushed.manifest, MANIFEST)
            listed.append({**entry, "platform": {"os": "linux", "architecture": machine}})
        index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}).encode()
        self._call("PUT", f"/v2/{path}/manifests/{tag}", index, 201, INDEX)
        return f"{self.address}/{path}:{tag}"

    def _call(self, method: str, path: str, body: bytes, status: int, kind: str = "") -> str:
        headers = {"Content-Type": kind or "application/octet-stream"}
        if self._login:
            headers["Authorization"] = basic(self._login)
        connection = http.client.HTTPConnection(self.address, timeout=_START_S)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert answer.status == status, (answer.status, text)
        return answer.headers.get("Location", "")


@contextmanager
def registry(folder: Path, login: str = "") -> Iterator[Registry]:
    """Run a registry with its files in ``folder``. login: USER:PASSWORD that it wants."""
    if not (program := shutil.which(PROGRAM)):
        pytest.fail(f"there is no {PROGRAM}: run scripts/bootstrap")
    folder.mkdir(parents=True, exist_ok=True)
    auth = ""
    if login:
        user, _, password = login.partition(":")
        kept = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()
        (folder / "htpasswd").write_text(f"{user}:{kept}\n")
        auth = f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}"
    config = folder / "config.yml"
    with reserved_port() as port, (folder / "log").open("wb") as log:
        address = f"127.0.0.1:{port}"
        config.write_text(_CONFIG.format(folder=folder, address=address, auth=auth))
        process = subprocess.Popen([program, "serve", config], stdout=log, stderr=log)
        try:
            _await(process, address, folder / "log")
            yield Registry(address, login)
        finally:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    host, _, port = address.partition(":")
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.02)
    pytest.fail(f"the registry did not start: {log.read_text()}")


@dataclass(frozen=True)
class Asked:
    """A request that ``Faults`` got. path: with the query."""

    path: str
    headers: Mapping[str, str]

    @property
    def part(self) -> str:
        """The digest of the layer that is asked for, or ""."""
        return self.path.rpartition("/blobs/")[2] if "/blobs/" in self.path else ""


@dataclass
class Answer:
    """An answer. cut: bytes of the body that are sent before the connection ends. None: all."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: int | None = None


# Returns what a client gets in place of the registry's answer.
Fault = Callable[[Asked, Answer], Answer]


class Faults(ThreadingHTTPServer):
    """Passes requests on to a registry. fault: changes its answers. asked: the requests, in order.

    sent: digest of a layer -> bytes of it that were sent.
    """

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = behind
        self.fault: Fault = lambda _, answer: answer
        self.asked: list[Asked] = []
        self.sent: dict[str, int] = {}
        self.lock = Lock()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def ask_behind(self, asked: Asked) -> Answer:
        connection = http.client.HTTPConnection(self.behind, timeout=_START_S)
        connection.request("GET", asked.path, headers={**asked.headers, "Host": self.behind})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return Answer(answer.status, dict(answer.headers), body)


class _Passing(BaseHTTPRequestHandler):
    server: Faults

    def do_GET(self) -> None:
        asked = Asked(self.path, dict(self.headers))
        with self.server.lock:
            self.server.asked.append(asked)
        answer = self.server.fault(asked, self.server.ask_behind(asked))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name not in ("Date", "Content-Length", "Transfer-Encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body = answer.body[: answer.cut]
        with suppress(ConnectionError):
            for start in range(0, len(body), 1 << 16):
                piece = body[start : start + (1 << 16)]
                self.wfile.write(piece)
                with self.server.lock:
                    self.server.sent[asked.part] = self.server.sent.get(asked.part, 0) + len(piece)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def faults(behind: str) -> Iterator[Faults]:
    """Run a server between clients and the registry at an address."""
    with Faults(behind) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()
