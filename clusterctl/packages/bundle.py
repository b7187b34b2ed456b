"""A bundle: a folder with all packages that a cluster is installed from.

Each distribution has a folder in it, such as `debian-12`, which is a repository for apt or dnf
(`software.mirrors.bundle`). `wheels` has the wheels, for pip's setting `find-links`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import UsageError
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.os_packages import package_names, upstream_packages
from clusterctl.packages.project_files import content_hash
from clusterctl.packages.repository import RepositoryRequest, check, keep_only, pack
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip, wheel_path, wheelhouse
from clusterctl.spec.base import dotted
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec, software_refusals
from clusterctl.util.assets import gpu_lock, job_lock
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import LineReporter

WHEELS = "wheels"


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """The input for the creation of a bundle. ``report`` is called with a line about each step.

    archives: release such as debian-12 -> absolute path of a file that lists the package repositories
        to use. For releases that are not in ``archives``, the public repositories are used.
    """

    spec: ClusterSpec
    distributions: Sequence[Distribution]
    archives: Mapping[str, Path]
    report: LineReporter


@dataclass(frozen=True, slots=True)
class System:
    """What a bundle has for a distribution: numbers of packages and of wheels, for this Python."""

    packages: int
    python: str
    wheels: int


def create(request: BundleRequest, folder: Path) -> dict[str, System]:
    """Download all packages that a spec needs to ``folder``. Packages that are there are kept.

    Return what there is for each release. The tools and the requirements file are checked before any
    download.

    Raises:
        MachineError: a tool is missing, a download fails, or a file can't be written.
        UsageError: the requirements conflict, or the distribution is not supported.
    """
    software = request.spec.software
    folder = folder.absolute()
    requests = [
        RepositoryRequest(
            distribution,
            folder / distribution.release,
            request.report,
            request.archives.get(distribution.release),
            software,
            upstream_packages(distribution, software),
        )
        for distribution in request.distributions
    ]
    _check(request.spec, requests)
    systems = {}
    wheels = dict[str, Path]()
    with translating_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for each in requests:
            distribution = each.distribution
            with temporary_folder(folder) as scratch:
                packages = pack(each, package_names(distribution, software), scratch)
            needed = {path.name: path for path in _wheels(request, distribution)}
            wheels |= needed
            systems[distribution.release] = System(
                packages, distribution.python_version, len(needed)
            )
        place = folder / WHEELS
        place.mkdir(exist_ok=True)
        keep_only(place, wheels)
        for name, path in wheels.items():
            if not (place / name).exists():
                shutil.copy(path, place / f"{name}.part")
                (place / f"{name}.part").rename(place / name)
    return systems


def _check(spec: ClusterSpec, requests: Sequence[RepositoryRequest]) -> None:
    for request in requests:
        for loc, refusal in software_refusals(spec, request.distribution):
            raise UsageError(
                refusal.what, code=refusal.code, where=dotted(loc), why=refusal.why, fix=refusal.fix
            )
        check(request)
    if (file := spec.software.python.requirements) is not None:
        content_hash((file,))


def _wheels(request: BundleRequest, distribution: Distribution) -> Iterator[Path]:
    spec = request.spec
    node = NodePlatform.of(distribution)
    request.report("downloading the wheels of the job environment")
    yield from wheelhouse(job_lock(), node).glob("*.whl")
    if spec.software.cupy and any(partition.gpus for partition in spec.partitions):
        request.report("downloading CuPy and CUDA's libraries")
        yield from wheelhouse(gpu_lock(), node).glob("*.whl")
    if (file := spec.software.python.requirements) is not None:
        lock = resolve(Requirements.of_cluster(spec, file, node), Pip(node, request.report))
        yield from map(wheel_path, lock.wheels)
