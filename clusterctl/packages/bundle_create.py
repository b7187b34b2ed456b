"""Creation of a bundle: OS packages for each distribution, and wheels for its Python."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl import __version__
from clusterctl.errors import UsageError
from clusterctl.packages import bundle
from clusterctl.packages.bundle import (
    REPOSITORY,
    WHEELS,
    WHEELS_LOCK,
    Bundle,
    System,
    asks_for_cupy,
)
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.os_packages import asked_packages, package_names, upstream_packages
from clusterctl.packages.project_files import content_hash
from clusterctl.packages.repository import RepositoryRequest, check, pack
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip, cache_of_downloads, wheel_path, wheelhouse
from clusterctl.spec.base import dotted
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec, software_refusals
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import WAIT_S, hold
from clusterctl.util.assets import digest, gpu_lock, job_lock, tree_files
from clusterctl.util.progress import LineReporter

Sources = dict[str, Path | bytes]
_PACKAGES: Final = frozenset({".deb", ".rpm"})


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """The input for the creation of a bundle. ``report`` is called with a line about each step.

    archives: release such as debian-12 -> file that lists the package repositories to use. For
        releases that are not in ``archives``, the public repositories are used.
    """

    spec: ClusterSpec
    distributions: Sequence[Distribution]
    archives: Mapping[str, Path]
    report: LineReporter


def create(request: BundleRequest, out: Path) -> Bundle:
    """Download all packages that a spec needs, and pack them into the file ``out``. Downloads are
    cached.

    The tools, the requirements files and ``out`` are checked before any download. Raise a
    MachineError if a tool is missing or a download fails, or a UsageError if the requirements
    conflict, the distribution is not supported, or ``out`` can't be written.
    """
    _check_request(request, out)
    lock = _cache_folder() / ".lock"
    software = request.spec.software
    report = request.report
    with hold(lock, "bundle create", what="the cache of packages", wait_s=WAIT_S, waiting=report):
        sources: Sources = {}
        systems = {}
        for distribution in request.distributions:
            release = distribution.release
            folder = _cache_folder(f"{release}-{ARCHITECTURE}")
            archive = request.archives.get(release)
            upstream = upstream_packages(distribution, software)
            packing = RepositoryRequest(distribution, folder, report, archive, software, upstream)
            repository = pack(packing, package_names(distribution, software))
            files = tree_files(repository)
            inner = REPOSITORY.format(release)
            sources |= {
                f"{inner}/{path.relative_to(repository).as_posix()}": path for path in files
            }
            packages = sum(path.suffix in _PACKAGES for path in files)
            systems[release], wheels = _wheels(request, distribution, packages)
            sources |= wheels
        report("packing")
        manifest = bundle.Manifest(
            format=bundle.FORMAT,
            clusterctl=__version__,
            cluster=request.spec.name,
            architecture=ARCHITECTURE,
            systems=systems,
        )
        bundle.write_bundle(out, manifest, sources)
    return bundle.open_bundle(out)


def _wheels(
    request: BundleRequest, distribution: Distribution, packages: int
) -> tuple[System, Sources]:
    spec = request.spec
    report = request.report
    node = NodePlatform.of(distribution)
    report("downloading the wheels of the job environment")
    base = sorted(wheelhouse(job_lock(), node).glob("*.whl"))
    gpu = []
    more = []
    sources = Sources()
    if asks_for_cupy(spec):
        report("downloading CuPy and CUDA's libraries")
        gpu = sorted(wheelhouse(gpu_lock(), node).glob("*.whl"))
    if (file := spec.software.python.requirements) is not None:
        lock = resolve(Requirements.of_cluster(spec, file, node), Pip(node, report))
        more = [wheel_path(wheel) for wheel in lock.wheels]
        sources[WHEELS_LOCK.format(distribution.release)] = lock.text.encode()
    system = System(
        asked=asked_packages(distribution, spec.software),
        packages=packages,
        python=distribution.python_version,
        base=digest(job_lock().read_bytes()),
        gpu_base=digest(gpu_lock().read_bytes()) if gpu else None,
        requirements=content_hash((file,)) if file is not None else None,
        wheels=tuple(sorted(path.name for path in base)),
        gpu=tuple(sorted(path.name for path in gpu)),
        more=tuple(sorted(path.name for path in more)),
    )
    return system, sources | {f"{WHEELS}/{path.name}": path for path in (*base, *gpu, *more)}


def _check_request(request: BundleRequest, out: Path) -> None:
    for distribution in request.distributions:
        for loc, refusal in software_refusals(request.spec, distribution):
            raise UsageError(
                refusal.what, code=refusal.code, where=dotted(loc), why=refusal.why, fix=refusal.fix
            )
        check(distribution, request.archives.get(distribution.release))
    if (file := request.spec.software.python.requirements) is not None:
        content_hash((file,))
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        fix = "pass another file with --out, in an existing and writable folder"
        raise UsageError(
            "the bundle can't be written", code="bundle-unwritable", where=str(out), fix=fix
        )


def _cache_folder(name: str = "") -> Path:
    with cache_of_downloads(f"bundle/{name}") as folder:
        folder.mkdir(parents=True, exist_ok=True)
        # An existing folder may belong to another user.
        with tempfile.TemporaryFile(dir=folder):
            return folder
