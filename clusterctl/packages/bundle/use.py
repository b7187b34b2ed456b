"""Installing from a bundle: checked, recorded in the workspace, its wheels put into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.errors import BundleError
from clusterctl.packages.bundle.archive import WHEELS, Bundle, open_bundle
from clusterctl.packages.bundle.checks import damages, lock_path, mismatches, raise_faults
from clusterctl.packages.requirements import Requirements, store_lock
from clusterctl.packages.wheelhouse import NodePlatform, Wheel, fill_wheelhouse
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import gpu_lock, job_lock
from clusterctl.util.lifetime import temporary_folder
from clusterctl.util.progress import LineReporter


class Remembered(BaseModel):
    """The bundle of a cluster: its path, and its state when all of it was checked."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: Path
    digest: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, bundle: Bundle) -> Remembered:
        """The bundle as it is now."""
        stat = bundle.file.stat()
        return cls(file=bundle.file, digest=bundle.digest, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def cluster_bundle(workspace: Workspace) -> Remembered | None:
    """The bundle that the cluster's hosts are installed from, if they are."""
    try:
        return Remembered.model_validate_json(workspace.bundle.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def forget(workspace: Workspace) -> None:
    """Install from the hosts' own repositories from now on."""
    workspace.bundle.unlink(missing_ok=True)


def missing_bundle(workspace: Workspace) -> BundleError:
    """The error for hosts that are to be installed from a bundle that is not there any more."""
    known = cluster_bundle(workspace)
    return BundleError(
        "the bundle that this cluster is installed from is missing",
        where=str(known.file) if known else "",
        why="some hosts have packages to install, and no repository of their own is asked",
        fix="give its new path: `clusterctl up --bundle FILE`; or `clusterctl up --no-bundle`, with the "
        "hosts' own repositories",
    )


def use_bundle(file: Path, spec: ClusterSpec, workspace: Workspace, *, report: LineReporter) -> Bundle:
    """Check a bundle, record it for the cluster, and put its wheels where the rest of `up` looks for them.

    What was checked already, and has not been written to since, is not read once more.

    Raises:
        BundleError: it is damaged, or is not for this spec or clusterctl.
        MachineError: the cache of downloads can't be written.
    """
    bundle = open_bundle(file)
    raise_faults(file, mismatches(bundle, spec))
    now = Remembered.of(bundle)
    if now != cluster_bundle(workspace):
        report(f"checking {bundle.file.name}")
        raise_faults(file, damages(bundle))
        write_atomic(workspace.bundle, now.model_dump_json() + "\n")
    _place_wheels(bundle, spec)
    return bundle


def _place_wheels(bundle: Bundle, spec: ClusterSpec) -> None:
    for release, system in bundle.manifest.systems.items():
        node = NodePlatform.of(distribution_of(release))
        fill_wheelhouse(job_lock(), partial(_bring_all, bundle, system.wheels), node)
        if system.gpu:
            fill_wheelhouse(gpu_lock(), partial(_bring_all, bundle, system.gpu), node)
        asked = spec.software.python.requirements
        if asked is not None:
            text = _text(bundle, lock_path(release))
            store_lock(
                Requirements((asked,), job_lock(), node=node),
                text,
                lambda wheel, to: _bring(bundle, wheel, to),
            )


def _bring_all(bundle: Bundle, names: Sequence[str], folder: Path) -> None:
    for name in names:
        bundle.copy(f"{WHEELS}/{name}", folder / name)


def _bring(bundle: Bundle, wheel: Wheel, to: Path) -> None:
    bundle.copy(f"{WHEELS}/{wheel.file}", to)


def _text(bundle: Bundle, path: str) -> str:
    with temporary_folder() as folder:
        bundle.copy(path, folder / "text")
        return (folder / "text").read_text()
