"""Small bundles in the real format, which tests damage."""

from __future__ import annotations

from pathlib import Path

from clusterctl import __version__
from clusterctl.packages.bundle import FORMAT, Manifest, System, write_bundle
from clusterctl.packages.os_packages import package_names
from clusterctl.spec.distributions import distribution_of
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.assets import digest, job_lock

RELEASE = "debian-12"
SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1}}
partitions: [{name: train, hosts: a}]
"""
FILES: dict[str, bytes] = {
    f"systems/{RELEASE}/Packages": b"",
    f"systems/{RELEASE}/pool/munge_1%3a0.5_amd64.deb": b"munge" * 1000,
    f"systems/{RELEASE}/pool/slurmd_22_amd64.deb": bytes(512),
    "wheels/numpy-2.0-py3-none-any.whl": b"wheel",
}


def system(**other: object) -> System:
    """Return the manifest's entry for Debian 12, with all that this clusterctl needs."""
    values = {
        "asked": package_names(distribution_of(RELEASE)),
        "packages": 2,
        "python": "3.11",
        "base": digest(job_lock().read_bytes()),
        "wheels": ("numpy-2.0-py3-none-any.whl",),
    }
    return System.model_validate(values | other)


def damage(path: Path, *contents: bytes) -> None:
    """Flip a bit in the package munge, or in the files that end with these contents."""
    raw = bytearray(path.read_bytes())
    for content in contents or (b"munge",):
        raw[raw.rindex(content)] ^= 1
    path.write_bytes(raw)


def a_bundle(path: Path, files: dict[str, bytes] = FILES, **other: object) -> Path:
    """Write one for this clusterctl; ``other`` are fields of its manifest."""
    values = {
        "format": FORMAT,
        "clusterctl": __version__,
        "cluster": "demo",
        "architecture": ARCHITECTURE,
        "systems": {RELEASE: system()},
    }
    write_bundle(path, Manifest.model_validate(values | other), dict(files))
    return path
