"""Builds of Python 3.13 in the layout of python-build-standalone, and a list of downloads for uv.

    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", standalone_list(tmp_path, real_python()))

uv then downloads this Python and no other.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

from clusterctl.packages.standalone_python import RELEASE
from tests.support.furnish import python_prefix

_LEFT_OUT: Final = {"test", "site-packages", "__pycache__", "idlelib", "ensurepip"}


def standalone_list(folder: Path, python: bytes, **changed: Any) -> str:
    """Write an archive and a list with it into ``folder``. Return the URL of the list.

    changed: other values of the list's only entry, such as a wrong ``sha256``.
    """
    archive = folder / "python.tar.gz"
    archive.write_bytes(python)
    major, minor = map(int, RELEASE.split("."))
    entry = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": 0,
        "prerelease": "",
        "url": archive.as_uri(),
        "sha256": hashlib.sha256(python).hexdigest(),
        "variant": None,
        "build": "20260101",
    }
    file = folder / "downloads.json"
    file.write_text(json.dumps({f"cpython-{RELEASE}.0-linux-x86_64-gnu": {**entry, **changed}}))
    return file.as_uri()


def small_python(program: str = f'#!/bin/sh\nexec {sys.executable} "$@"\n') -> bytes:
    """Return an archive of a few bytes. Its program is a script, which runs this test's Python."""
    return _archive(program.encode(), None)


def real_python() -> bytes:
    """Return an archive of this machine's Python, or uv's. It starts from any folder."""
    prefix = python_prefix(RELEASE)
    # The program of this machine looks for its library in this machine's folder.
    here = f"{prefix}/lib\0".encode()
    beside = b"$ORIGIN/../lib".ljust(len(here), b"\0")
    program = (prefix / f"bin/python{RELEASE}").read_bytes()
    return _archive(program.replace(here, beside), prefix / "lib")


def _archive(program: bytes, library: Path | None) -> bytes:
    name = f"python{RELEASE}"
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as packed:

        def add(path: str, content: bytes, mode: int) -> None:
            member = tarfile.TarInfo(f"python/{path}")
            member.size = len(content)
            member.mode = mode
            packed.addfile(member, io.BytesIO(content))

        if library is not None:
            packed.add(library, "python/lib", filter=_packed)
        else:
            # uv changes this file.
            path = f"lib/{name}/_sysconfigdata__linux_x86_64-linux-gnu.py"
            add(
                path,
                b"# system configuration generated and used by the sysconfig module\nbuild_time_vars = {}\n",
                0o644,
            )
        add(f"bin/{name}", program, 0o755)
        link = tarfile.TarInfo("python/bin/python3")
        link.type = tarfile.SYMTYPE
        link.linkname = name
        packed.addfile(link)
    return archive.getvalue()


def _packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts
    is_left = _LEFT_OUT & {*parts} or parts[-1].startswith("config-") or member.name.endswith(".a")
    return None if is_left else member
