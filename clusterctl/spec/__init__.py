"""The typed description of a cluster and of a job, and how it is read from a file."""

from clusterctl.spec.caller import Caller, notes, resolved
from clusterctl.spec.flags import job_spec, job_words
from clusterctl.spec.job import BUNDLED_JOBS, JobSpec, JobWords, Launcher
from clusterctl.spec.load import dump_spec, find_spec, load_spec, parse_spec
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
from clusterctl.spec.schema import json_schema
from clusterctl.spec.starter import init_text
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
    "dump_spec",
    "find_spec",
    "init_text",
    "job_spec",
    "job_words",
    "json_schema",
    "load_spec",
    "notes",
    "parse_spec",
    "resolved",
    "script_kind",
]
