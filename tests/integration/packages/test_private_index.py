"""Packages of an index with a password: uv and pip take it from .netrc, and nothing else has it."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from uv import find_uv_bin

from clusterctl.errors import MachineError
from clusterctl.packages.node_platform import DEFAULT_PLATFORM
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip, WheelLock
from tests.support.messages import refused
from tests.support.sshd import reserved_port
from tests.support.wheels import a_wheel

CANARY = "canary-7f3a"
_USER = base64.b64encode(f"ada:{CANARY}".encode()).decode()


class PrivateIndex(SimpleHTTPRequestHandler):
    """A simple index that answers 401 without the password."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") == f"Basic {_USER}":
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="index"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "simple" / "first"
    folder.mkdir(parents=True)
    a_wheel(folder, "first")
    handler = partial(PrivateIndex, directory=str(tmp_path / "simple"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def project(tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that depends on a package of the index; the password is in .netrc."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login ada password {CANARY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\n'
        'dependencies = ["first"]\n'
        f'[[tool.uv.index]]\nname = "lab"\nurl = "{index}"\ndefault = true\n'
    )
    (folder / "requirements.txt").write_text(f"--index-url {index}\nfirst\n")
    (folder / "base.lock").touch()
    return folder


def resolved(choice: Path) -> tuple[WheelLock, list[str]]:
    """The lock of a file, and what pip prints."""
    heard: list[str] = []
    packages = PackageList.read(choice, DEFAULT_PLATFORM)
    requirements = Requirements((packages,), choice.parent / "base.lock")
    return resolve(requirements, Pip(DEFAULT_PLATFORM, heard.append, heard.append)), heard


@pytest.mark.parametrize("name", ["uv.lock", "requirements.txt"])
def test_password_of_an_index_is_nowhere_but_in_netrc(project: Path, name: str) -> None:
    subprocess.run([find_uv_bin(), "lock", "--quiet"], cwd=project, check=True)
    lock, heard = resolved(project / name)
    assert [wheel.name for wheel in lock.wheels] == ["first"]
    files = [file for file in project.parent.rglob("*") if file.is_file() and file.name != ".netrc"]
    assert [file for file in files if CANARY.encode() in file.read_bytes()] == []
    assert not any(CANARY in line for line in heard)
    assert CANARY not in lock.text


def test_index_that_refuses_the_password_is_an_error_without_it(project: Path) -> None:
    (project.parent / ".netrc").write_text(f"machine 127.0.0.1 login eve password {CANARY}\n")
    with refused("unreachable/index", MachineError, "401") as caught:
        resolved(project / "requirements.txt")
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("is_down", [False, True])
def test_index_that_uv_can_not_read_for_a_lock_without_hashes_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, is_down: bool
) -> None:
    subprocess.run([find_uv_bin(), "lock", "--quiet"], cwd=project, check=True)
    lock = project / "uv.lock"
    monkeypatch.setenv("UV_CACHE_DIR", str(project / "other"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    (project.parent / ".netrc").unlink()
    with reserved_port() as port:
        if is_down:
            lock.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", lock.read_text()))
        why = "refused" if is_down else "401"
        with refused("unreachable/index", MachineError, "first-1.0", why):
            PackageList.read(lock, DEFAULT_PLATFORM)


@pytest.mark.parametrize("option", ["--find-links", "--extra-index-url"])
def test_package_of_another_index_does_not_replace_that_of_a_refused_one(
    project: Path, option: str
) -> None:
    (project.parent / ".netrc").unlink()
    public = project / "public" / "first"
    public.mkdir(parents=True)
    a_wheel(public, "first", "2.0")
    (public / "index.html").write_text('<a href="first-2.0-py3-none-any.whl">first</a>')
    file = project / "requirements.txt"
    place = public if option == "--find-links" else public.parent.as_uri()
    file.write_text(f"{option} {place}\n{file.read_text()}")
    for _ in range(2):
        with refused("unreachable/index", MachineError, "401"):
            resolved(file)
    # Without the index that refuses, the other one has it.
    file.write_text(f"--no-index\n--find-links {public}\nfirst\n")
    assert [wheel.version for wheel in resolved(file)[0].wheels] == ["2.0"]


def test_index_without_a_server_is_no_conflict_of_versions(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with reserved_port() as port:
        (project / "requirements.txt").write_text(f"--index-url http://127.0.0.1:{port}/\nfirst\n")
        with refused("unreachable/index", MachineError, f"127.0.0.1:{port}/first/"):
            resolved(project / "requirements.txt")
