"""Fetches container images from registries. Runs on the cluster, or on this machine if the cluster
has no way to the registry: standard library only, Python 3.9.

    main()

The first line of stdin is JSON: ``name``, such as docker.io/library/python:3.12, ``folder``, where
layers are kept by their SHA-256 (a relative path starts at the home folder), and ``login``,
USER:PASSWORD, <token>:IDENTITY_TOKEN or "". Each line of stdout is JSON: {"bytes", "of"} while
layers are fetched, and at the end {"image": {"digest", "config", "layers"}} with absolute paths, or
{"problem": CODE, "why": TEXT, "machine": PROCESSOR}.

The protocol is that of https://github.com/opencontainers/distribution-spec (spec.md), the login
that of https://distribution.github.io/distribution/spec/auth/token/ and, for identity tokens, of
https://distribution.github.io/distribution/spec/auth/oauth/.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import http.client
import json
import os
import platform
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from clusterctl.spec.remote_reference import DOCKER_HUB, Reference

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# The registry of Docker Hub has another host than its images' names, and `docker login` a third.
HUB_HOST = "registry-1.docker.io"
HUB_LOGIN = "https://index.docker.io/v1/"
# Docker's credential helpers give an identity token with this user. It is a refresh token.
OF_TOKEN = "<token>"  # noqa: S105
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64"}
LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d+){3}|\[::1\])(?::\d+)?")
UNAUTHORIZED = 401
LOGIN_REFUSED = (UNAUTHORIZED, 403)
NOT_FOUND = 404
TOO_MANY = 429
PARTIAL = 206
# A registry that answers so, or with a higher number, may answer the next try.
FAULT = 500
# What urllib and sockets raise if a connection fails.
BROKEN = (
    urllib.error.URLError,
    http.client.HTTPException,
    ssl.SSLError,
    ConnectionError,
    socket.timeout,
)
UNREACHABLE = "image-registry-unreachable"
THREADS = 4
TRIES = 4
WAIT_S = 30.0
CHUNK = 1 << 20
MOST_MANIFEST = 1 << 22
UNUSED_S = 30 * 86400.0


class ProblemError(Exception):
    """An image can't be fetched. code: for clusterctl's error."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect that ends the encryption."""

    def redirect_request(self, req: Any, *others: Any) -> Any:
        new = super().redirect_request(req, *others)
        if new is not None and req.type == "https" != new.type:
            raise ProblemError("image-not-fetched", f"{req.host} redirects to {new.type}:")
        return new


class Registry:
    """The registry of an image. login: USER:PASSWORD, <token>:IDENTITY_TOKEN or "". machine: a
    processor, as for `uname -m`.

    is_over: set to end transfers that other threads have begun.
    """

    def __init__(self, image: Reference, login: str, machine: str) -> None:
        host = HUB_HOST if image.registry == DOCKER_HUB else image.registry
        # As for Docker, a registry on the same machine needs no encryption, and no proxy sees it.
        self._is_here = LOOPBACK.fullmatch(host) is not None
        self._image = image
        user, _, secret = login.partition(":")
        self._has_login = bool(login)
        self._identity = secret if user == OF_TOKEN else ""
        is_plain = login and not self._identity
        self._login = base64.b64encode(login.encode()).decode() if is_plain else ""
        self._processor = PROCESSORS.get(machine, machine)
        self._base = f"{'http' if self._is_here else 'https'}://{host}/v2/{image.path}"
        proxies = [urllib.request.ProxyHandler({})] if self._is_here else []
        self._opener = urllib.request.build_opener(Redirects, *proxies)
        self._header = ""
        self.is_over = False

    def open(self, path: str, accept: str = "*/*", offset: int = 0) -> Any:
        """Return the answer to a request, from ``offset`` on. Raises ProblemError, or those of
        ``BROKEN``.
        """
        answer = self._ask(path, accept, offset)
        if answer.status == UNAUTHORIZED:
            answer.close()
            self._log_in(answer.headers.get("WWW-Authenticate", ""))
            answer = self._ask(path, accept, offset)
        self._check(answer)
        return answer

    def _ask(self, path: str, accept: str, offset: int) -> Any:
        request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": accept})
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        return self._answer(request, self._header)

    def _answer(self, request: urllib.request.Request, login: str) -> Any:
        """Return the answer to a request, which is an HTTPError if it is no success."""
        if login:
            # Layers are often on another host, which must not get the password.
            request.add_unredirected_header("Authorization", login)
        for attempt in range(TRIES):
            time.sleep(attempt)
            try:
                return self._opener.open(request, timeout=WAIT_S)
            except urllib.error.HTTPError as exc:
                answer = exc
                if exc.code < FAULT:
                    break
                exc.close()
        return answer

    def _check(self, answer: Any) -> None:
        """Raise ProblemError if the answer is no success."""
        if not isinstance(answer, urllib.error.HTTPError):
            return
        answer.close()
        where = self._image.registry
        if answer.code in LOGIN_REFUSED:
            how = "this" if self._has_login else "without a"
            raise ProblemError("registry-login", f"{where} refuses {self._image} {how} login")
        if answer.code == NOT_FOUND:
            raise ProblemError("no-such-image", f"{where} has no {self._image}")
        if answer.code == TOO_MANY:
            raise ProblemError("registry-busy", f"{where} had too many requests from this address")
        raise ProblemError("image-not-fetched", f"{where} answers {answer.code} {answer.reason}")

    def _log_in(self, wanted: str) -> None:
        """Set the header that a registry wants. wanted: its WWW-Authenticate."""
        kind, _, rest = wanted.partition(" ")
        values = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        basic = f"Basic {self._login}" if self._login else ""
        if kind.lower() == "basic":
            self._header = basic
            return
        realm = values.pop("realm", "")
        address = urllib.parse.urlsplit(realm)
        is_local = self._is_here and LOOPBACK.fullmatch(address.netloc)
        if address.scheme != "https" and not (address.scheme == "http" and is_local):
            raise ProblemError(
                "registry-login",
                f"{self._image.registry} wants a login at {realm!r}, which does not begin with https:",
            )
        values.setdefault("scope", f"repository:{self._image.path}:pull")
        asked = {k: values[k] for k in ("service", "scope") if k in values}
        if self._identity:
            asked |= {"grant_type": "refresh_token", "refresh_token": self._identity}
            body = urllib.parse.urlencode({**asked, "client_id": "clusterctl"}).encode()
            request = urllib.request.Request(realm, data=body)
        else:
            request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(asked)}")
        answer = self._answer(request, basic)
        self._check(answer)
        with answer:
            given = json.load(answer)
        self._header = f"Bearer {given.get('token') or given['access_token']}"

    def manifest(self) -> tuple[str, Mapping[str, Any]]:
        """Return the digest and the content of the image's manifest for the processor. ProblemError:
        there is none.
        """
        digest, content = self._read_manifest(self._image.version)
        if "manifests" in content:
            found = [
                entry["digest"]
                for entry in content["manifests"]
                if entry.get("platform", {}).get("os") == "linux"
                and entry["platform"].get("architecture") == self._processor
            ]
            if not found:
                raise ProblemError(
                    "no-such-image", f"{self._image} does not exist for linux/{self._processor}"
                )
            digest, content = self._read_manifest(found[0])
        if content["schemaVersion"] == 1:
            raise ProblemError("no-such-image", f"the format of {self._image} is too old")
        return digest, content

    def _read_manifest(self, version: str) -> tuple[str, Mapping[str, Any]]:
        with self.open(f"manifests/{version}", ", ".join((*INDEXES, *MANIFESTS))) as answer:
            text = answer.read(MOST_MANIFEST)
        digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
        if version.startswith("sha256:") and version != digest:
            raise ProblemError("wrong-digest", f"the registry sent {digest} in place of {version}")
        return digest, json.loads(text)

    def fetch(self, entry: Mapping[str, Any], folder: str) -> str:
        """Fetch a part of the image, unless the folder has it, and return its path. An interrupted
        transfer goes on where it ended.
        """
        kind, _, sha = entry["digest"].partition(":")
        if kind != "sha256" or not re.fullmatch("[0-9a-f]{64}", sha):
            raise ProblemError("wrong-digest", f"the digest {entry['digest']!r} is not a SHA-256")
        path = f"{folder}/{sha}"
        with locked(f"{path}.partial") as file:
            if os.path.exists(path):
                os.utime(path)
                with suppress(FileNotFoundError):
                    os.unlink(file.name)
                return path
            self._complete(entry, file, folder)
            os.fsync(file.fileno())
            if sha256_of(file.name) != sha:
                os.unlink(file.name)
                raise ProblemError(
                    "wrong-digest", f"the registry sent other bytes for layer {sha[:12]}"
                )
            os.rename(file.name, path)
            return path

    def _complete(self, entry: Mapping[str, Any], file: BinaryIO, folder: str) -> None:
        """Append the bytes of a part that the file lacks. If a connection breaks, try again."""
        failures = 0
        while failures < TRIES:
            time.sleep(failures)
            code = "image-not-fetched"
            begin = file.tell()
            try:
                self._append(entry, file)
                reason = f"it ended after {file.tell():,} of {entry['size']:,} bytes"
            except (OSError, http.client.HTTPException) as exc:
                raise_if_full(exc, folder)
                code = UNREACHABLE if isinstance(exc, urllib.error.URLError) else code
                reason = str(exc) or repr(exc)
            if file.tell() >= entry["size"]:
                return
            failures = 1 if file.tell() > begin else failures + 1
        layer = entry["digest"].rpartition(":")[2][:12]
        raise ProblemError(code, f"layer {layer}: {reason}")

    def _append(self, entry: Mapping[str, Any], file: BinaryIO) -> None:
        lacking = entry["size"] - file.tell()
        if lacking <= 0:
            return
        with self.open(f"blobs/{entry['digest']}", offset=file.tell()) as answer:
            if file.tell() and answer.status != PARTIAL:
                lacking = entry["size"]
                file.truncate(0)
                file.seek(0)
            while lacking > 0 and (chunk := answer.read1(min(CHUNK, lacking))):
                if self.is_over:
                    raise ProblemError("image-not-fetched", "the transfer was interrupted")
                file.write(chunk)
                file.flush()
                lacking -= len(chunk)


@contextmanager
def locked(path: str) -> Iterator[BinaryIO]:
    """Open a file to append to it, as the only program that does. The file system may have no
    locks.
    """
    while True:
        with open(path, "ab") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # The program that had it before may have removed the file.
            if os.fstat(file.fileno()).st_nlink:
                file.seek(0, os.SEEK_END)
                yield file
                return


def raise_if_full(exc: Exception, folder: str) -> None:
    if getattr(exc, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        raise ProblemError(
            "no-room-for-image", f"{folder}: {getattr(exc, 'strerror', exc)}"
        ) from exc


def sha256_of(path: str) -> str:
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


def login_of(registry: str) -> str:
    """Return the login for a registry, USER:PASSWORD or <token>:IDENTITY_TOKEN, that `docker login`
    or `podman login` have kept for this user; "": there is none.
    """
    home = os.path.expanduser("~")
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    config = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    files = (
        os.environ.get("REGISTRY_AUTH_FILE", ""),
        run and f"{run}/containers/auth.json",
        f"{config}/containers/auth.json",
        f"{os.environ.get('DOCKER_CONFIG') or f'{home}/.docker'}/config.json",
    )
    own = HUB_LOGIN if registry == DOCKER_HUB else registry
    names = (f"https://{registry}", f"http://{registry}", own)
    for path in filter(None, files):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            with open(path) as file:
                content = json.load(file)
            for name in names:
                entry = content.get("auths", {}).get(name, {})
                # Beside an identity token, `auth` has a user without a password.
                if token := entry.get("identitytoken"):
                    return f"{OF_TOKEN}:{token}"
                if login := base64.b64decode(entry.get("auth", "")).decode():
                    return login
            # As Docker does, a helper is asked for one name only.
            helper = content.get("credHelpers", {}).get(names[-1]) or content.get("credsStore")
            if login := helper and ask(helper, names[-1]):
                return str(login)
    return ""


def ask(helper: str, name: str) -> str:
    """Return the login that a credential helper of Docker has (docker-credential-helpers, README)."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        answer = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=name.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WAIT_S,
            check=True,
        )
        given = json.loads(answer.stdout)
        return f"{given['Username']}:{given['Secret']}"
    return ""


def fetch_image(
    name: str, folder: str, login: str, machine: str = ""
) -> Iterator[Mapping[str, Any]]:
    """Fetch an image, and yield the lines of this program.

    login: as for ``Registry``. "": the one that is kept on this machine. machine: the processor that
    runs the image, as for `uname -m`. "": this machine's.
    """
    image = Reference.parse(name)
    where = image.registry
    machine = machine or platform.machine()
    try:
        yield from fetch_parts(Registry(image, login or login_of(where), machine), folder)
        return
    except ProblemError as exc:
        code, why = exc.code, str(exc)
    except BROKEN as exc:
        code, why = UNREACHABLE, f"{where}: {getattr(exc, 'reason', '') or exc}"
    except OSError as exc:
        code, why = "no-room-for-image", f"{exc.filename or folder}: {exc.strerror}"
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        code, why = "image-not-fetched", f"the answer of {where} can't be read: {exc!r}"
    yield {"problem": code, "why": why, "machine": machine}


def fetch_parts(registry: Registry, folder: str) -> Iterator[Mapping[str, Any]]:
    """Fetch the parts of an image, and yield the lines of this program. Raises ProblemError,
    OSError, or any error of values in a manifest.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    remove_unused(folder)
    digest, manifest = registry.manifest()
    parts = {part["digest"]: part for part in (manifest["config"], *manifest["layers"])}
    total = sum(part["size"] for part in parts.values())
    with ThreadPoolExecutor(THREADS) as pool:
        fetched = {key: pool.submit(registry.fetch, part, folder) for key, part in parts.items()}
        try:
            while wait(fetched.values(), 0.5, FIRST_EXCEPTION).not_done:
                if failed := [part for part in fetched.values() if has_failed(part)]:
                    failed[0].result()
                yield {"bytes": sum(size_of(key, folder) for key in parts), "of": total}
        finally:
            registry.is_over = True
    paths = {key: os.path.abspath(part.result()) for key, part in fetched.items()}
    layers = [paths[part["digest"]] for part in manifest["layers"]]
    config = paths[manifest["config"]["digest"]]
    yield {"image": {"digest": digest, "config": config, "layers": layers}}


def has_failed(part: Future[str]) -> bool:
    return part.done() and part.exception() is not None


def size_of(digest: str, folder: str) -> int:
    path = f"{folder}/{digest.rpartition(':')[2]}"
    for name in (path, f"{path}.partial"):
        with suppress(OSError):
            return os.path.getsize(name)
    return 0


def remove_unused(folder: str) -> None:
    for name in os.listdir(folder):
        with suppress(OSError):
            if time.time() - os.stat(f"{folder}/{name}").st_mtime > UNUSED_S:
                os.unlink(f"{folder}/{name}")


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    folder = os.path.join(os.path.expanduser("~"), wanted["folder"])
    for line in fetch_image(wanted["name"], folder, wanted["login"]):
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()
