"""The typed description of a cluster and of a job.

``load`` reads the one from a file, ``job_file`` the other, ``schema`` describes both, ``starter`` writes a
first spec: each is imported by those who need it, since YAML alone takes as long to import as all of this.
"""

from clusterctl.spec.caller import Caller, notes, resolved
from clusterctl.spec.flags import job_spec, job_words
from clusterctl.spec.gcp import GcpProvider
from clusterctl.spec.gpus import Gpus
from clusterctl.spec.job import BUNDLED_JOBS, RUN_ME_AGAIN, JobSpec, JobWords, Launcher
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
from clusterctl.spec.onprem import OnpremHost, OnpremProvider
from clusterctl.spec.target import ScriptKind, is_job_file, script_kind

__all__ = [
    "BUNDLED_JOBS",
    "RUN_ME_AGAIN",
    "Caller",
    "ClusterSpec",
    "GcpProvider",
    "Gpus",
    "JobSpec",
    "JobWords",
    "Launcher",
    "LocalProvider",
    "Monitoring",
    "OnpremHost",
    "OnpremProvider",
    "Partition",
    "Provider",
    "Qos",
    "ScriptKind",
    "SlurmSettings",
    "User",
    "is_job_file",
    "job_spec",
    "job_words",
    "notes",
    "resolved",
    "script_kind",
]
