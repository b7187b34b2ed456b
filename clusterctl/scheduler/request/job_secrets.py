"""The values of `submit --secret` on the cluster: send them, and remove those of ended jobs.

The job itself removes its values at its end (payload/node/secret_values.py). What a killed or
cancelled job has left is removed by the next command that reads the states of jobs. If hosts share
no folder, a job removes its values only from its own nodes, and that command removes the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from clusterctl.errors import CommandError, TransferError
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.session import SBATCH_MAY_HANG_S, Session
from clusterctl.spec.remote_folders import SECRETS
from clusterctl.state.ledger import JobEntry
from clusterctl.transport.base import Transport, remote_argv, remove_folders

if TYPE_CHECKING:
    from clusterctl.spec.job_options import JobOptions

_PROGRAM = "clusterctl.scheduler.request.remote_secrets"
# A host that is down must not delay commands for long.
_REMOVE_S = 10.0
# Slurm may start these jobs again.
_MAY_START_AGAIN = frozenset((JobState.NODE_FAIL, JobState.PREEMPTED))


def secrets_folder(remote_dir: str) -> str:
    """Return the folder with the values of a job's secrets. remote_dir: the job's folder."""
    path = PurePosixPath(remote_dir)
    return str(path.parent.parent / SECRETS / path.name)


def send_secrets(job: JobOptions, remote_dir: str, hosts: Sequence[Transport]) -> None:
    """Write the values of a job's secrets on hosts. TransferError: a host can't keep them secret.

    remote_dir: the job's folder.
    """
    values = {name: value.get_secret_value() for name, value in job.secret.items()}
    content = "".join(f"{name}={value}\0" for name, value in values.items()).encode()
    argv = remote_argv(_PROGRAM, secrets_folder(remote_dir))
    for to in hosts if values else ():
        try:
            to.run(argv, stdin=content)
        except CommandError as exc:
            raise TransferError(
                "the values of --secret can't be written on the cluster",
                about="secrets",
                where=to.host,
                why=exc.cause,
                fix="use a folder of your own for clusterctl, in a file system that has users' "
                "permissions",
            ) from exc


def remove_secrets(session: Session, entries: Iterable[JobEntry]) -> None:
    """Remove the values of jobs. If a host does not answer, the next command tries again."""
    entries = list(entries)
    folders = [secrets_folder(entry.remote_dir) for entry in entries if entry.remote_dir]
    hosts = (session.transport, *session.transports_of_partition(None))
    if folders and not remove_folders(hosts, folders, timeout_s=_REMOVE_S):
        return
    for entry in entries:
        session.ledger.update(entry, has_secrets=False)


def remove_session_secrets(session: Session, folder: str, hosts: Sequence[Transport]) -> None:
    """Remove the values of an interactive session that has ended. folder: of the session.

    If a host does not answer, the ledger gets an entry, by which the next command tries again.
    """
    if not remove_folders(hosts, [secrets_folder(folder)], timeout_s=_REMOVE_S):
        entry = JobEntry(
            token=PurePosixPath(folder).name,
            name="shell",
            user=session.inventory.job_user,
            submitted_at=time.time(),
            remote_dir=folder,
            refused=True,
            has_secrets=True,
        )
        session.ledger.add(entry)


def remove_old_secrets(session: Session) -> None:
    """Remove the values of jobs that were submitted from this machine and have ended."""
    entries = [entry for entry in session.ledger.entries() if entry.has_secrets]
    if not entries:
        return
    active = {
        PurePosixPath(job.work_dir).name
        for job in session.scheduler.own_jobs()
        if not job.ended or (session.site.restarts_jobs and job.state in _MAY_START_AGAIN)
    }
    remove_secrets(
        session,
        (
            entry
            for entry in entries
            if PurePosixPath(entry.remote_dir or "").name not in active
            # The answer of sbatch may be under way.
            and (entry.job_id or entry.refused or _is_old(entry))
        ),
    )


def _is_old(entry: JobEntry) -> bool:
    return time.time() - entry.submitted_at > SBATCH_MAY_HANG_S
