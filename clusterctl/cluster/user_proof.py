"""The proof that jobs of the job user find their folder and can write their log.

The MPI job of the verification runs as the admin user, who may use the hidden partition. That users
can run the jobs' Python is a check of each node's health program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from clusterctl.errors import ClusterctlError, VerifyError
from clusterctl.jobs.submit import new_token, reject_other_paths
from clusterctl.scheduler.session import Session
from clusterctl.transport.base import Connect, Transport, as_user, remove_folder
from clusterctl.transport.put import Upload, UploadResult, store_of
from clusterctl.util.process import call_on_hosts, parallel_map

_TIMEOUT_S: Final = 60.0
# Arguments: the job's folder, the name of the host. Writes HOST.log to the folder.
_WRITE_LOG: Final = 'cd -- "$1" && printf "%s\\n" "$2" >"$2.log"'


def prove_job_user(session: Session, to: Connect, nodes: Sequence[str]) -> None:
    """Log in as the job user, create a job's folder, write a log in it on each node, and fetch the
    logs.

    to: connects to a host as the admin user, who may become the job user there.

    Raise VerifyError, with a failure for each host, if a step fails. The folder is removed.
    """
    user = session.inventory.job_user
    hosts = [transport for _, transport in session.hosts_with_files(nodes)]
    others = [transport for transport in hosts if transport is not session.transport]
    try:
        folder = _create_folder(session, others)
        try:
            _write_logs(user, to, folder, nodes)
            _fetch_logs(session, folder, nodes)
        finally:
            remove_folder((session.transport, *others), folder)
    except ClusterctlError as exc:
        raise VerifyError(
            f"jobs of {user} would fail",
            code="host-unfit",
            about="job-user",
            where=exc.where,
            why=exc.cause,
            fix=exc.fix
            or f"correct the account of {user} on these hosts (its home, shell and limits), then "
            "run `clusterctl up` again",
            host=exc.host,
            failures=exc.failures,
        ) from exc


def _create_folder(session: Session, others: Sequence[Transport]) -> str:
    """Create a job's folder as `submit` does. Return its path, which is the same on all hosts."""
    area = session.inventory.folder
    name = f"{area}/jobs/verification-{new_token()}"

    def send(to: Transport) -> UploadResult:
        return Upload(to).new_folder((), {}, name, store=store_of(area), ours={})

    sent = send(session.transport)
    try:
        reject_other_paths(session, sent.folder, others, parallel_map(others, send))
    except ClusterctlError:
        remove_folder((session.transport, *others), sent.folder)
        raise
    return sent.folder


def _write_logs(user: str, to: Connect, folder: str, nodes: Sequence[str]) -> None:
    def write(host: str) -> None:
        words = (*as_user(user), "sh", "-c", _WRITE_LOG, "sh", folder, host)
        to(host).run(words, timeout_s=_TIMEOUT_S)

    _, failed = call_on_hosts(nodes, write)
    if failed:
        failures = [exc.on(host, "verify") for host, exc in failed.items()]
        raise VerifyError.of_hosts(
            "the job user can't write a log on {hosts}",
            failures,
            code="host-unfit",
            about="job-user",
        )


def _fetch_logs(session: Session, folder: str, nodes: Sequence[str]) -> None:
    """Read the logs where `collect` finds those of a job. Raise CommandError if one is missing."""
    hosts = session.hosts_with_files(nodes)
    for host, transport in hosts:
        logs = [f"{name}.log" for name in ([host] if len(hosts) > 1 else nodes)]
        transport.run(("sh", "-c", 'cd -- "$1" && shift && cat -- "$@"', "sh", folder, *logs))
