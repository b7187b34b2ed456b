"""The trial of nodes: what a job needs is done on each, rather than looked up in a list.

An MPI job across the nodes, in which each rank exchanges messages with each other, runs as the admin
user, who may use the hidden partition. Meanwhile the job user writes a log in a job's folder, and files
where programs do, imports the packages of the jobs' Python, and starts mpirun. `up` and `doctor` run the
same trial; the needs of the health program only explain what fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from clusterctl.cluster.host_files import record_wanted
from clusterctl.errors import ClusterctlError, CommandError, Failure, TransportError, VerifyError
from clusterctl.hosts.needs import lacks_of
from clusterctl.jobs.submit import new_token, reject_other_paths
from clusterctl.scheduler.base import Nodes
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.sites.script import Environment
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Connect, Transport, as_user, remove_folder
from clusterctl.transport.put import Upload, UploadResult, store_of
from clusterctl.util.process import Result, call_on_hosts, parallel_map, start_in_thread

_TIMEOUT_S: Final = 60.0
# Arguments: the job's folder, the name of the host, the script that loads Open MPI, the jobs' Python, its
# program. Writes HOST.log to the folder.
_TRY: Final = """\
cd -- "$1" && printf '%s\\n' "$2" >"$2.log" || exit
for folder in /tmp /dev/shm; do
    file=$(mktemp -p "$folder" .clusterctl-XXXXXX) && echo >"$file" && rm -- "$file" || exit
done
[ ! -r "$3" ] || . "$3"
"$4" -I -c "$5" || exit
exec mpirun --version >/dev/null
"""


# An error of an import may be as long as a page, with the cause in its last line.
_IMPORT: Final = """\
import sys
try:
    import numpy, mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
except Exception as exc:
    lines = str(exc).strip().splitlines() or [""]
    sys.exit(f"{sys.executable}: {type(exc).__name__}: {lines[-1]}")
"""


def run_trial(
    scheduler: Nodes, hosts: tuple[str, ...], prove: Callable[[Sequence[str]], None]
) -> Result:
    """Run the trial on nodes. Return the result of the MPI job, which may have failed.

    prove: called with the nodes while the MPI job runs on them. It may raise VerifyError, which is
    raised if the MPI job has passed; else the error of the job comes first.
    """
    proof = start_in_thread(partial(prove, hosts))
    result = scheduler.run_verification_job(hosts)
    try:
        proof()
    except VerifyError:
        if has_passed(result, hosts):
            raise
    return result


def record_trial(controller: Transport, nodes: Sequence[str], failed: Mapping[str, str]) -> None:
    """Record a trial on the controller, for `status`. failed: node -> why."""
    trial = {"at": time.time(), "nodes": [*nodes], "failed": dict(failed)}
    # It does not matter for the trial itself.
    with suppress(CommandError, TransportError):
        record_wanted(controller, trial=trial)


def has_passed(result: Result, hosts: tuple[str, ...]) -> bool:
    """Return whether the MPI job succeeded with a rank on each of these hosts."""
    try:
        answer = json.loads(result.stdout)
        return result.rc == 0 and answer["ok"] is True and answer["world_size"] == len(hosts)
    except (ValueError, KeyError, TypeError):
        return False


def prove_job_user(session: Session, to: Connect, nodes: Sequence[str]) -> None:
    """Log in as the job user, create a job's folder, do there on each node what jobs do, and fetch the
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
            _try_on_nodes(session.inventory, to, folder, nodes)
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
            fix=exc.fix or _fix(user, exc.failures, to),
            host=exc.host,
            failures=exc.failures,
        ) from exc


def _fix(user: str, failures: Sequence[Failure], to: Connect) -> str:
    """Return what to do: what the health program advises on the hosts, if it finds a cause."""
    lacks = lacks_of({each.host for each in failures if each.host}, to, within_s=_TIMEOUT_S)
    fixes = [lack.fix for unmet in lacks.values() for lack in unmet if lack.fix]
    own = (
        f"try the same as {user} on these hosts, and correct what fails, or recreate a node: "
        "`clusterctl node replace NODE`"
    )
    return f"{'; '.join(dict.fromkeys(fixes)) or own}; then run `clusterctl up` again"


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


def _try_on_nodes(inventory: Inventory, to: Connect, folder: str, nodes: Sequence[str]) -> None:
    of_jobs = Environment.of(inventory)
    programs = (of_jobs.profile, f"{of_jobs.base}/bin/python", _IMPORT)

    def try_on(host: str) -> None:
        user = as_user(inventory.job_user)
        to(host).run(
            (*user, "bash", "-c", _TRY, "bash", folder, host, *programs), timeout_s=_TIMEOUT_S
        )

    _, failed = call_on_hosts(nodes, try_on)
    if failed:
        failures = [exc.on(host, "verify") for host, exc in failed.items()]
        raise VerifyError.of_hosts(
            "what jobs do fails on {hosts}",
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
