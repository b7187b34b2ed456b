"""The typed description of a cluster and of a job.

``load`` reads it from a file, ``schema`` describes it, ``starter`` writes a first one: each is imported by
those who need it, since YAML alone takes as long to import as all that stands here.
"""

from clusterctl.spec.caller import Caller, notes, resolved
from clusterctl.spec.flags import job_spec, job_words
from clusterctl.spec.job import BUNDLED_JOBS, JobSpec, JobWords, Launcher
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
from clusterctl.spec.target import ScriptKind, script_kind

__all__ = [
    "BUNDLED_JOBS",
    "Caller",
    "ClusterSpec",
    "JobSpec",
    "JobWords",
    "Launcher",
    "LocalProvider",
    "Monitoring",
    "Partition",
    "Provider",
    "Qos",
    "ScriptKind",
    "SlurmSettings",
    "User",
    "job_spec",
    "job_words",
    "notes",
    "resolved",
    "script_kind",
]
