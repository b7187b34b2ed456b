"""The last phase of `up`: the cluster works, and what Slurm had given up is taken up again."""

from __future__ import annotations

from collections.abc import Collection

from clusterctl.cluster.checkup import driver_findings
from clusterctl.cluster.converge import Configured, Mended, refuse_missing_gpus
from clusterctl.cluster.jobs_in_the_way import REASON
from clusterctl.cluster.membership import concerned
from clusterctl.cluster.phases import Run
from clusterctl.cluster.verify import Proof, release_held, verify
from clusterctl.spec import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.transport.connections import Connections


def prove(
    spec: ClusterSpec,
    inventory: Inventory,
    configured: Configured,
    connections: Connections,
    *,
    limit: Collection[str],
    run: Run,
) -> Proof:
    """Run the proof job on the nodes concerned, and say what was mended on the way.

    Raises:
        VerifyError: it does not work, or hosts show fewer GPUs than they should; names hosts and causes.
    """
    with run.phase("verify") as (step, _):
        proof = verify(inventory, connections.to, only=concerned(inventory, limit))
        given_up = ((host, was) for host, was in proof.resumed.items() if REASON not in was)
        run.has_mended(Mended(host, f"was {was}", "resumed") for host, was in given_up)
        released = release_held(inventory, connections.to)
        run.has_mended(
            Mended(f"job {job}", "was held, its launch had failed", "released") for job in released
        )
        step.note = f"MPI across {len(proof.probed)} of {len(inventory.compute)} nodes"
        run.notes += (*configured.notes, *_unprobed(proof))
        needs = driver_findings(spec, inventory, connections)
        run.notes += tuple(note for note in map(str, needs) if note not in run.notes)
        refuse_missing_gpus(spec, inventory, configured.views, limit, needs=needs)
    return proof


def _unprobed(proof: Proof) -> tuple[str, ...]:
    """What to say of nodes that the proof left out."""
    busy = (f"not probed, busy with jobs: {', '.join(proof.busy)}",) if proof.busy else ()
    return (*busy, *(f"not probed, and left as it is: {node}" for node in proof.aside))
