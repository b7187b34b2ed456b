"""The proof that a cluster works: exact node states, then an MPI job across every node, its answer checked.

The job runs in a hidden partition of its own, so it never waits behind users' jobs. Nodes that are busy with
users' jobs are taken at their slurmd's word and named as not probed; so are those that a person set aside.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import partial

from clusterctl.cluster import verify_mpirun
from clusterctl.cluster.blame import failed, is_right
from clusterctl.cluster.diagnose import Connect
from clusterctl.cluster.held import release_held
from clusterctl.cluster.node_states import Aside, astray, out_of_service, settle
from clusterctl.cluster.proof import Proof
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.scheduler.slurm.config import HEALTH_REASON
from clusterctl.spec.distributions import JOB_PROFILE
from clusterctl.spec.models import ADMIN_USER, PROOF_PARTITION
from clusterctl.state.inventory import HEALTH_PROGRAM, Inventory
from clusterctl.transport.base import Result, Transport
from clusterctl.util.assets import payload_hash

__all__ = ["Aside", "Proof", "astray", "out_of_service", "release_held", "verify"]

READY_TIMEOUT_S = 120.0  # slurmctld takes a minute to ask a node again that was out of reach
START_TIMEOUT_S = 30
PROBE_S = 20
PROBE_PER_NODE_S = 3  # many local nodes start their ranks on few cores
CLEAN_UP_S = 20
HEALTH_S = 60
_TAKEN = "Requested nodes are busy"  # srun's words when --immediate has run out


def verify(
    inventory: Inventory, to: Connect, *, timeout_s: float = READY_TIMEOUT_S, only: Collection[str] = ()
) -> Proof:
    """Prove the cluster through its controller; ``to`` connects to a host.

    ``only`` names the nodes to prove, as when nothing else was touched; none: all.

    Raises:
        VerifyError: nodes are missing or sick, or the job failed; names hosts and causes.
    """
    if not inventory.has_slurm and inventory.job_user is not None:
        return verify_mpirun.prove(inventory, inventory.job_user, to)
    controller = to(inventory.controller.name)
    probe = partial(_probe, transport=controller)
    for tries_left in (1, 0):
        stand = settle(inventory, SlurmClient(controller), timeout_s=timeout_s, only=only)
        if _look_again(stand.aside, to):
            stand = settle(inventory, SlurmClient(controller), timeout_s=timeout_s, only=only)
        proof = Proof(stand.idle, stand.busy, stand.aside, stand.resumed)
        if not stand.idle:
            return proof
        result = probe(stand.idle)
        if tries_left and result.rc != 0 and _TAKEN in result.stderr:
            continue  # a user's job was faster: its nodes count as busy now
        if not is_right(result, stand.idle):
            alike = _TAKEN in result.stderr
            raise failed(result, stand.idle, inventory, to, probe, alike=alike)
        return proof
    raise AssertionError("the last try returns")


def _look_again(aside: Iterable[Aside], to: Connect) -> bool:
    """Have nodes that their health check drained look at themselves now; whether one is well, and resumed."""
    drained = [one.host for one in aside if HEALTH_REASON in one.reason]
    looks = [
        to(host).run(["sudo", "-n", HEALTH_PROGRAM], timeout_s=HEALTH_S, check=False) for host in drained
    ]
    return any(look.rc == 0 for look in looks)


def _probe(hosts: tuple[str, ...], transport: Transport) -> Result:
    """Run the bundled probe, one rank a host. It ends by itself if it hangs; should srun hang, that too."""
    limit_s = PROBE_S + PROBE_PER_NODE_S * len(hosts)
    patience_s = START_TIMEOUT_S + limit_s + CLEAN_UP_S
    argv = [
        *("timeout", "--kill-after=5", str(patience_s)),
        "srun",
        f"--partition={PROOF_PARTITION}",
        f"--account={ADMIN_USER}",
        "--job-name=clusterctl-probe",
        f"--nodes={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        "--ntasks-per-node=1",
        "--mem=64M",
        "--mpi=pmix",
        f"--time={math.ceil((limit_s + CLEAN_UP_S) / 60)}",
        f"--immediate={START_TIMEOUT_S}",
        "--chdir=/tmp",
        "--kill-on-bad-exit=1",
        f"--export=PYTHONPATH=/opt/clusterctl/payload/{payload_hash()},OMP_NUM_THREADS=1",
        *("/usr/bin/timeout", "--kill-after=2", str(limit_s)),
        *("bash", "-c", f'[[ ! -r {JOB_PROFILE} ]] || . {JOB_PROFILE}; exec "$@"', "probe"),
        *("/opt/clusterctl/env/bin/python", "-m", "payload", "probe"),
        *("--device", "cpu", "--expect-hosts", ",".join(hosts)),  # CuPy alone would take more than its memory
    ]
    return transport.run(argv, timeout_s=patience_s + 30, check=False)
