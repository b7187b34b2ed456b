"""Names that packing and using a bundle share."""

from __future__ import annotations

from clusterctl.packages.bundle.manifest import SYSTEMS, WHEELS
from clusterctl.packages.os_packages import Nvidia, package_names, upstream_packages
from clusterctl.spec import ClusterSpec
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import Software
from clusterctl.state.journal import digest
from clusterctl.util.assets import gpu_lock, job_lock


def base_digest() -> str:
    """Names what is in the lock of the job environment."""
    return digest(job_lock().read_bytes())


def gpu_digest() -> str:
    """Names what nodes with GPUs have beside that."""
    return digest(gpu_lock().read_bytes())


def asks_for_cupy(spec: ClusterSpec) -> bool:
    """Whether its bundle must have CuPy: only the spec can tell which nodes have GPUs."""
    return spec.software.cupy and any(partition.gpus for partition in spec.partitions)


def lock_path(release: str) -> str:
    """Where the lock of the spec's requirements lies in a bundle."""
    return f"{WHEELS}/{release}.lock"


def system_folder(release: str) -> str:
    """Where the repository of a release lies in a bundle."""
    return f"{SYSTEMS}/{release}"


def names_of(distribution: Distribution, software: Software) -> tuple[str, ...]:
    """The packages that a spec's software comes to."""
    return package_names(
        distribution,
        openhpc=software.slurm == "openhpc",
        apptainer=software.apptainer,
        nvidia=nvidia_of(software),
    )


def nvidia_of(software: Software) -> Nvidia:
    """What is asked of NVIDIA's packages."""
    asked = software.nvidia
    return Nvidia(asked.parts, asked.branch or "", asked.toolkit or "")


def asked_of(distribution: Distribution, software: Software) -> tuple[str, ...]:
    """What a bundle must hold for hosts of a distribution: packages by name, and the files of upstream's."""
    upstream = upstream_packages(distribution, apptainer=software.apptainer)
    return (*names_of(distribution, software), *(one.file for one in upstream))
