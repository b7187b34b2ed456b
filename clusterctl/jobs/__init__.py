"""A job's life: JobSpec -> script -> sbatch -> job, and what becomes of it."""

from clusterctl.jobs.control import Cancelled, active, as_dict, cancel, known_jobs, list_jobs
from clusterctl.jobs.logs import LogChunk
from clusterctl.jobs.submission import Submitted, script_of, submit
from clusterctl.jobs.watch import follow, logs, raise_unless_completed, wait
from clusterctl.slurm.access import Session, session
from clusterctl.slurm.models import worst

__all__ = [
    "Cancelled",
    "LogChunk",
    "Session",
    "Submitted",
    "active",
    "as_dict",
    "cancel",
    "follow",
    "known_jobs",
    "list_jobs",
    "logs",
    "raise_unless_completed",
    "script_of",
    "session",
    "submit",
    "wait",
    "worst",
]
