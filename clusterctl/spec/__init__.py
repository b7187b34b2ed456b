"""The typed description of a cluster and of a job, and how it is read from a file."""

from clusterctl.spec.job import BUNDLED_JOBS, JobSpec, Launcher
from clusterctl.spec.models import (
    ClusterSpec,
    LocalProvider,
    Monitoring,
    Partition,
    Provider,
    Qos,
    SlurmSettings,
    User,
)

__all__ = [
    "BUNDLED_JOBS",
    "ClusterSpec",
    "JobSpec",
    "Launcher",
    "LocalProvider",
    "Monitoring",
    "Partition",
    "Provider",
    "Qos",
    "SlurmSettings",
    "User",
]
