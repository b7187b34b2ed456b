"""A container image with Python and MPI for the tests, and Apptainer for nodes.

As a program (`python -m tests.e2e.container_image FILE SUITE`, as root) this module makes the image's
layer.
"""

from __future__ import annotations

import fcntl
import lzma
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from clusterctl.providers.local.image import DEFAULT_MIRROR, debootstrap
from clusterctl.state.workspace import cache_home
from tests.support.processes import ROOT, as_root

_TIMEOUT_S: Final = 600


def mpi_layer(suite: str) -> Path:
    """Return a tar file, compressed by zstd, with mpi4py and Open MPI of a release of Debian. It is
    kept in the cache.
    """
    layer = cache_home() / f"test-image-{suite}.tar.zst"
    layer.parent.mkdir(parents=True, exist_ok=True)
    with layer.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layer.is_file():
            argv = [
                *as_root(),
                sys.executable,
                "-m",
                "tests.e2e.container_image",
                str(layer),
                suite,
            ]
            subprocess.run(argv, cwd=ROOT, check=True, timeout=_TIMEOUT_S)
    return layer


@contextmanager
def apptainer_files(suite: str) -> Iterator[Path]:
    """Yield a tar file with the files of Debian unstable's Apptainer, and of what it needs, for the
    root of a host with a release of Debian.
    """
    with TemporaryDirectory(prefix="apptainer-") as name:
        for package, release in (("apptainer", "sid"), ("squashfs-tools", suite)):
            deb = Path(name) / f"{package}.deb"
            urllib.request.urlretrieve(_address(package, release), deb)  # noqa: S310
            subprocess.run(["dpkg-deb", "-x", deb, f"{name}/root"], check=True)
        tar = Path(name) / "files.tar"
        subprocess.run(["tar", "-C", f"{name}/root", "-cf", tar, "etc", "usr", "var"], check=True)
        yield tar


def _address(package: str, release: str) -> str:
    index = f"{DEFAULT_MIRROR}/dists/{release}/main/binary-amd64/Packages.xz"
    with urllib.request.urlopen(index, timeout=_TIMEOUT_S) as answer:  # noqa: S310
        text = lzma.decompress(answer.read()).decode()
    entry = text.partition(f"\nPackage: {package}\n")[2].partition("\n\n")[0]
    path = entry.partition("\nFilename: ")[2].partition("\n")[0]
    return f"{DEFAULT_MIRROR}/{path}"


def main() -> None:
    """Make the layer. The file is renamed to its final name when it is complete."""
    layer, suite = Path(sys.argv[1]), sys.argv[2]
    partial = layer.with_suffix(".partial")
    with TemporaryDirectory(prefix="test-image-", dir=layer.parent) as name:
        root = Path(name) / "root"
        debootstrap(root, DEFAULT_MIRROR, ("python3-mpi4py",), suite)
        words = ["tar", "-C", str(root), "--exclude=./dev/*", "--exclude=./var/cache/apt"]
        subprocess.run([*words, "-I", "zstd -1", "-cf", str(partial), "."], check=True)
    partial.rename(layer)


if __name__ == "__main__":
    main()
