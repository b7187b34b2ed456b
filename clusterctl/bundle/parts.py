"""Names that packing and using a bundle share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clusterctl.assets import asset
from clusterctl.bundle.manifest import SYSTEMS, WHEELS
from clusterctl.journal import digest
from clusterctl.spec import ClusterSpec


def base_lock() -> Path:
    """The lock of the job environment."""
    return asset("payload") / "requirements.lock"


def base_digest() -> str:
    """Names what is in the lock of the job environment."""
    return digest(base_lock().read_bytes())


def lock_path(release: str) -> str:
    """Where the lock of the spec's requirements lies in a bundle."""
    return f"{WHEELS}/{release}.lock"


def system_folder(release: str) -> str:
    """Where the repository of a release lies in a bundle."""
    return f"{SYSTEMS}/{release}"


def left_out(spec: ClusterSpec) -> Mapping[str, str]:
    """What a spec asks for that is in no bundle: key -> why."""
    found = {}
    if spec.software.slurm == "openhpc":
        found["software.slurm"] = "OpenHPC's packages are in no bundle, the distribution's are"
    if spec.software.apptainer:
        found["software.apptainer"] = "Apptainer is in no bundle; hosts that have it may keep it"
    return found
