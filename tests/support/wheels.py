"""Wheels made for tests: a few bytes each, and an index to find them in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from zipfile import ZipFile


def a_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    requires: Iterable[str] = (),
    files: Mapping[str, str] | None = None,
) -> str:
    """Put a wheel into a folder; the line that locks it. By default it has one module, its version in it."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-{tag}.whl"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    contents = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        **(files if files is not None else {f"{name}.py": f"version = {version!r}\n"}),
    }
    with ZipFile(path, "w") as wheel:
        for file, content in contents.items():
            wheel.writestr(file, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in contents))
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
