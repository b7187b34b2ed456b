"""The proof without a scheduler: mpirun across every node on which no job runs, as the user of jobs."""

from __future__ import annotations

from clusterctl.cluster.blame import failed, is_right
from clusterctl.cluster.diagnose import Connect
from clusterctl.cluster.proof import Proof
from clusterctl.errors import Failure, SchedulerError, TransportError, VerifyError
from clusterctl.scheduler.mpirun.client import MpirunClient
from clusterctl.spec.distributions import JOB_PROFILE
from clusterctl.state.inventory import Inventory
from clusterctl.transport.base import Result
from clusterctl.util.assets import payload_hash

LIMIT_S = 30
LIMIT_PER_NODE_S = 3  # many local nodes start their ranks on few cores
_ENTER = f'cd && {{ [[ ! -r {JOB_PROFILE} ]] || . {JOB_PROFILE}; }} && exec "$@"'


def prove(inventory: Inventory, user: str, to: Connect) -> Proof:
    """Prove the cluster; ``to`` connects to a host, ``user`` is who jobs run as.

    Raises:
        VerifyError: the job failed; names hosts and causes.
    """
    busy = _busy(inventory, user, to)
    free = tuple(host.name for host in inventory.compute if host.name not in busy)
    if not free:
        return Proof((), busy)

    def probe(hosts: tuple[str, ...]) -> Result:
        return _probe(hosts, user, to)

    result = probe(free)
    if not is_right(result, free):
        raise failed(result, free, inventory, to, probe)
    return Proof(free, busy)


def _busy(inventory: Inventory, user: str, to: Connect) -> tuple[str, ...]:
    controller = inventory.controller.name
    try:
        jobs = MpirunClient(inventory, user, to(controller), to).own_jobs()
    except (SchedulerError, TransportError) as exc:
        failure = Failure("verify", exc.why or exc.what, controller, "verify")
        raise VerifyError("nobody can tell which jobs run", why=failure.cause, failures=(failure,)) from exc
    at_work = {node for job in jobs if not job.ended for node in job.nodes}
    return tuple(host.name for host in inventory.compute if host.name in at_work)


def _probe(hosts: tuple[str, ...], user: str, to: Connect) -> Result:
    """Run the bundled probe from the first of these hosts, a rank on each. It ends by itself if it hangs."""
    limit_s = LIMIT_S + LIMIT_PER_NODE_S * len(hosts)
    argv = [
        *("sudo", "-n", "-H", "-u", user, "timeout", "--kill-after=5", str(limit_s)),
        *("env", f"PYTHONPATH=/opt/clusterctl/payload/{payload_hash()}", "OMP_NUM_THREADS=1"),
        *("bash", "-c", _ENTER, "probe"),
        *("mpirun", "-np", str(len(hosts)), "--host", ",".join(f"{host}:1" for host in hosts)),
        *("--map-by", "ppr:1:node", "-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"),
        *("/opt/clusterctl/env/bin/python", "-m", "payload", "probe", "--device", "cpu"),
        *("--expect-hosts", ",".join(hosts)),
    ]
    return to(hosts[0]).run(argv, timeout_s=limit_s + 30, check=False)
