"""Checks of a bundle (damaged, missing and extra files; mismatches with a spec), and installing from one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl import __version__
from clusterctl.errors import BundleError, Failure, ProvisionError
from clusterctl.packages.accelerators import has_gpus
from clusterctl.packages.bundle import (
    WHEELS,
    WHEELS_LOCK,
    Bundle,
    Manifest,
    System,
    damages,
    named,
    open_bundle,
    reject_defects,
)
from clusterctl.packages.os_packages import asked_packages, package_names
from clusterctl.packages.wheelhouse import (
    Lock,
    NodePlatform,
    Requirements,
    content_hash,
    has_wheelhouse,
    new_wheelhouse,
    store_lock,
    wheel_path,
)
from clusterctl.spec.common import Software
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import digest, gpu_lock, job_lock
from clusterctl.util.process import temporary_folder


def asks_for_cupy(spec: ClusterSpec) -> bool:
    """Whether its bundle must have CuPy: only the spec can tell which nodes have GPUs."""
    return spec.software.cupy and any(partition.gpus for partition in spec.partitions)


def mismatches(
    bundle: Bundle, spec: ClusterSpec | None, releases: Collection[str] = ()
) -> tuple[Failure, ...]:
    """Compare a bundle with this clusterctl, the spec, if there is one, and hosts of these releases."""
    manifest = bundle.manifest
    found = [*_of_clusterctl(manifest)]
    others = f"the bundle has no packages for it, only for {', '.join(manifest.systems)}"
    found += [(release, others) for release in releases if release not in manifest.systems]
    for release, system in manifest.systems.items():
        if not releases or release in releases:
            found += [(release, why) for why in _of_system(release, system, spec)]
    fix = "make a bundle for this with `clusterctl bundle create`, with the clusterctl that is to use it"
    return tuple(Failure("bundle-mismatch", f"mismatch: {what}: {why}", fix=fix) for what, why in found)


def _of_clusterctl(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.clusterctl != __version__:
        yield "clusterctl", f"made by version {manifest.clusterctl}, and this is {__version__}"
    if manifest.architecture != ARCHITECTURE:
        yield "architecture", f"for {manifest.architecture}, and the hosts have {ARCHITECTURE}"


def _of_system(release: str, system: System, spec: ClusterSpec | None) -> Iterator[str]:
    if lacking := _wanted(release, spec) - set(system.asked):
        yield f"lacks the packages {named(sorted(lacking))}"
    if system.base != digest(job_lock().read_bytes()):
        yield "the wheels of the job environment are from another version of clusterctl"
    if system.gpu_base not in (None, digest(gpu_lock().read_bytes())):
        yield "CuPy and CUDA's libraries are from another version of clusterctl"
    elif spec is not None and asks_for_cupy(spec) and not system.gpu:
        yield "the spec has GPUs, and the bundle has no CuPy for them"
    asked = spec.software.python.requirements if spec is not None else None
    if asked is not None and system.requirements != content_hash((asked,)):
        has = "other ones" if system.requirements else "none"
        yield f"{asked} asks for Python packages, and the bundle was made for {has}"


def _wanted(release: str, spec: ClusterSpec | None) -> set[str]:
    """What must be in it for a release; without a spec, what all specs ask for."""
    try:
        distribution = distribution_of(release)
    except ProvisionError:  # no host of it can be configured, so nothing is wanted
        return set()
    if spec is not None:
        return set(asked_packages(distribution, spec.software))
    return set(package_names(distribution)) & set(package_names(distribution, Software(slurm="openhpc")))


class Remembered(BaseModel):
    """The bundle of a cluster: its path, and its state when all of it was checked."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: Path
    digest: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, bundle: Bundle) -> Remembered:
        stat = bundle.file.stat()
        return cls(file=bundle.file, digest=bundle.digest, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def cluster_bundle(workspace: Workspace) -> Remembered | None:
    """The bundle that the cluster's hosts are installed from, if they are."""
    try:
        return Remembered.model_validate_json(workspace.bundle.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def missing_bundle(workspace: Workspace) -> BundleError:
    """The error for hosts that are to be installed from a bundle that is not there any more."""
    known = cluster_bundle(workspace)
    return BundleError(
        "the bundle that this cluster is installed from is missing",
        code="bundle-gone",
        where=str(known.file) if known else "",
        why="some hosts have packages to install, and no repository of their own is asked",
        fix="give its new path: `clusterctl up --bundle FILE`; or `clusterctl up --no-bundle`, with the "
        "hosts' own repositories",
    )


def use_bundle(file: Path, spec: ClusterSpec, workspace: Workspace) -> Bundle:
    """Check a bundle, record it for the cluster, and put its wheels where the rest of `up` looks for them.

    What was checked already, and has not been written to since, is not read once more.

    Raises:
        BundleError: it is damaged, or is not for this spec or clusterctl.
        MachineError: the cache of downloads can't be written.
    """
    bundle = open_bundle(file)
    reject_defects(file, mismatches(bundle, spec))
    now = Remembered.of(bundle)
    if now != cluster_bundle(workspace):
        reject_defects(file, damages(bundle))
        write_atomic(workspace.bundle, now.model_dump_json() + "\n")
    _place_wheels(bundle, spec)
    return bundle


def _place_wheels(bundle: Bundle, spec: ClusterSpec) -> None:
    for release, system in bundle.manifest.systems.items():
        node = NodePlatform.of(distribution_of(release))
        for lock, names in ((job_lock(), system.wheels), (gpu_lock(), system.gpu)):
            if names and not has_wheelhouse(lock, node):
                with new_wheelhouse(lock, node) as folder:
                    bundle.copy([f"{WHEELS}/{name}" for name in names], folder)
        if (asked := spec.software.python.requirements) is None:
            continue
        with temporary_folder() as folder:
            lock_file = WHEELS_LOCK.format(release)
            bundle.copy([lock_file], folder)
            text = (folder / PurePosixPath(lock_file).name).read_text()
            missing = [wheel for wheel in Lock.read(text, {}).wheels if not wheel_path(wheel).is_file()]
            bundle.copy([f"{WHEELS}/{wheel.file}" for wheel in missing], folder)
            store_lock(Requirements((asked,), job_lock(), node=node, gpus=has_gpus(spec)), text, folder)
