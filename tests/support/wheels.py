"""Wheels of a few bytes, and a bundle for Debian 12 from Debian's archive.

Clusterctl(home, cwd, unconnected(tmp_path, debian_bundle()))("up", "-f", spec)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from zipfile import ZipFile

from clusterctl.packages.bundle import WHEELS, BundleRequest, create
from clusterctl.packages.os_packages import package_names
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.load import default_spec
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import digest, job_lock, tree_hash
from clusterctl.util.process import temporary_folder


def a_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    requires: Iterable[str] = (),
    files: Mapping[str, str] | None = None,
) -> str:
    """Put a wheel into a folder; the line that locks it. By default it has one module, its version
    in it.
    """
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


DEBIAN: Final = distribution_of("debian-12")
_KEPT_S: Final = 24 * 3600
_CODE: Final = Path(__file__).resolve().parents[2] / "clusterctl" / "packages"


def unconnected(cache: Path, bundle: Path) -> dict[str, str]:
    """An environment in which wheels come from a bundle alone, and none lie in the cache."""
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(bundle / WHEELS),
        "PIP_CONFIG_FILE": os.devnull,
        "XDG_CACHE_HOME": str(cache),
    }


def debian_bundle() -> Path:
    """The bundle of the spec that has no requirements; it may be raised with any spec like that."""
    parts = (digest(job_lock().read_bytes()), tree_hash(_CODE), *package_names(DEBIAN))
    path = cache_home() / "test-bundles" / digest(*parts)
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.iterdir():
            if time.time() - old.stat().st_mtime > _KEPT_S:  # others may use what is younger
                shutil.rmtree(old, ignore_errors=True)
        with temporary_folder(path.parent) as made:
            create(BundleRequest(default_spec(), (DEBIAN,), {}, lambda _: None), made / "bundle")
            (made / "bundle").rename(path)
    return path
