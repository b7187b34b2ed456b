"""A job's life: JobSpec -> script -> sbatch -> job, and what becomes of it."""

from clusterctl.jobs.allocation import Allocation, allocate
from clusterctl.jobs.control import Cancelled, active, as_dict, cancel, known_jobs, list_jobs
from clusterctl.jobs.environment import PLAIN, Environment, build, environment_of, unbuilt
from clusterctl.jobs.gpus import with_gpus
from clusterctl.jobs.logs import LogChunk
from clusterctl.jobs.source import source_of
from clusterctl.jobs.submission import Submitted, script_of, submit
from clusterctl.jobs.tunnel import Forward, forwarded, parse_forwards
from clusterctl.jobs.watch import follow, logs, raise_unless_completed, wait
from clusterctl.scheduler.models import worst
from clusterctl.scheduler.session import Session, session

__all__ = [
    "PLAIN",
    "Allocation",
    "Cancelled",
    "Environment",
    "Forward",
    "LogChunk",
    "Session",
    "Submitted",
    "active",
    "allocate",
    "as_dict",
    "build",
    "cancel",
    "environment_of",
    "follow",
    "forwarded",
    "known_jobs",
    "list_jobs",
    "logs",
    "parse_forwards",
    "raise_unless_completed",
    "script_of",
    "session",
    "source_of",
    "submit",
    "unbuilt",
    "wait",
    "with_gpus",
    "worst",
]
