"""A bundle: a folder with all packages that a cluster is installed from.

Each distribution has a folder in it, such as `debian-12`, which is a repository for apt or dnf
(`software.mirrors.bundle`). `wheels` has the wheels of all, for pip's setting `find-links`.
`bundle.json` says which distribution needs which of them, and that the folder is a bundle: its
other files may be removed.
"""

from __future__ import annotations

import filecmp
import json
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
from clusterctl.state.workspace import write_atomic
from clusterctl.util.assets import gpu_lock, job_lock
from clusterctl.util.disk import translating_write_errors
from clusterctl.util.process import temporary_folder
from clusterctl.util.progress import LineReporter

WHEELS = "wheels"
_CONTENTS = "bundle.json"


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
class BundledDistribution:
    """The content of a bundle for a distribution: numbers of packages and of wheels, for this
    Python.
    """

    packages: int
    python: str
    wheels: int


def create(request: BundleRequest, folder: Path) -> dict[str, BundledDistribution]:
    """Download all packages that a spec needs to ``folder``: a new or empty folder, or a bundle, of
    which needed packages and those of other releases are kept.

    Return the content for each release. The folder, the tools and the requirements file are checked
    before any download.

    Raises:
        MachineError: a tool is missing, a download fails, or a file can't be written.
        UsageError: the folder has files and is not a bundle, the requirements conflict, or the
            distribution is not supported.
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
    systems = {}
    wheels = dict[str, list[Path]]()
    with translating_write_errors(folder):
        contents = _contents(folder)
        _check(request.spec, requests)
        folder.mkdir(parents=True, exist_ok=True)
        _write_contents(folder, contents)
        for each in requests:
            distribution = each.distribution
            with temporary_folder(folder) as scratch:
                packages = pack(each, package_names(distribution, software), scratch)
            needed = wheels[distribution.release] = list(_wheels(request, distribution))
            systems[distribution.release] = BundledDistribution(
                packages, distribution.python_version, len({path.name for path in needed})
            )
        put_wheels(folder, wheels)
    return systems


def put_wheels(folder: Path, wheels: Mapping[str, Sequence[Path]]) -> None:
    """Copy wheels to a bundle, and remove those that no distribution in it needs.

    wheels: release -> all wheels that it needs. Other releases in the bundle keep theirs.
    """
    place = folder / WHEELS
    place.mkdir(exist_ok=True)
    for path in (path for paths in wheels.values() for path in paths):
        copy = place / path.name
        if not (copy.is_file() and filecmp.cmp(path, copy, shallow=False)):
            part = place / f"{path.name}.part"
            shutil.copy(path, part)
            part.replace(copy)
    new = {release: sorted({path.name for path in paths}) for release, paths in wheels.items()}
    contents = {**_contents(folder), **new}
    _write_contents(folder, contents)
    keep_only(place, {name for names in contents.values() for name in names})


def _contents(folder: Path) -> dict[str, list[str]]:
    """Return release -> names of its wheels, for the releases in a bundle. {}: it is a new folder.

    Raise a UsageError if the folder has files and is not a bundle.
    """
    try:
        contents: dict[str, list[str]] = json.loads((folder / _CONTENTS).read_text())
    except FileNotFoundError as exc:
        if folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"{folder} is not a bundle",
                code="file-invalid",
                about="bundle",
                why=f"it has other files, and no {_CONTENTS}; in a bundle, what is no longer needed "
                "is removed",
                fix="pass a new or an empty folder with --out",
            ) from exc
        return {}
    return {release: names for release, names in contents.items() if (folder / release).is_dir()}


def _write_contents(folder: Path, contents: Mapping[str, Sequence[str]]) -> None:
    write_atomic(folder / _CONTENTS, f"{json.dumps(contents, indent=1)}\n", mode=0o644)


def _check(spec: ClusterSpec, requests: Sequence[RepositoryRequest]) -> None:
    for request in requests:
        for loc, refusal in software_refusals(spec, request.distribution):
            raise UsageError(
                refusal.what,
                about=refusal.code,
                where=dotted(loc),
                why=refusal.why,
                fix=refusal.fix,
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
