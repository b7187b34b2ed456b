"""The proof that a cluster works: exact node states, then an MPI job across every node, its answer checked.

The job runs in a hidden partition of its own, so it never waits behind users' jobs. Nodes that are busy with
users' jobs are taken at their slurmd's word and named as not probed.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass

from clusterctl.assets import payload_hash
from clusterctl.errors import CommandError, Failure, SlurmError, UnreachableError, VerifyError
from clusterctl.inventory import Inventory
from clusterctl.slurm.client import SlurmClient
from clusterctl.slurm.models import NodeInfo
from clusterctl.spec.models import ADMIN_USER, PROOF_PARTITION
from clusterctl.transport.base import Result, Transport

READY_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60
PROBE_S = 60
PROBE_PER_NODE_S = 5  # many local nodes start their ranks on few cores
_PAUSE_S = 0.2
_IDLE = frozenset({"IDLE"})
_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING"})
_TAKEN = "Requested nodes are busy"  # srun's words when --immediate has run out


@dataclass(frozen=True, slots=True)
class Proof:
    """``probed`` hosts ran the job together; ``busy`` ones run users' jobs and were not probed."""

    probed: tuple[str, ...]
    busy: tuple[str, ...]
    ranks: int


def verify(inventory: Inventory, transport: Transport, *, timeout_s: float = READY_TIMEOUT_S) -> Proof:
    """Prove the cluster through its controller.

    Raises:
        VerifyError: nodes are missing or sick, or the job failed; names hosts and causes.
    """
    slurm = SlurmClient(transport)
    for tries_left in (1, 0):
        nodes = _ready(inventory, slurm, timeout_s)
        idle = tuple(node.name for node in nodes if node.state in _IDLE)
        busy = tuple(node.name for node in nodes if node.state not in _IDLE)
        if not idle:
            return Proof((), busy, 0)
        result = _probe(idle, transport)
        if tries_left and result.rc != 0 and _TAKEN in result.stderr:
            continue  # a user's job was faster: its nodes count as busy now
        return Proof(idle, busy, _answer(result, idle))
    raise AssertionError("the last try returns")


def _ready(inventory: Inventory, slurm: SlurmClient, timeout_s: float) -> tuple[NodeInfo, ...]:
    """Every node of the inventory, each idle or at work, with nothing held against it."""
    expected = {host.name for host in inventory.compute}
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            nodes = {node.name: node for node in slurm.nodes()}
            sick = _sick(expected, nodes)
            if not sick:
                return tuple(nodes[host.name] for host in inventory.compute)
        except (SlurmError, CommandError, UnreachableError) as exc:
            # slurmctld may still be starting
            sick = (Failure("verify", exc.why or exc.what, inventory.controller.name, "verify"),)
        if time.monotonic() > deadline:
            raise VerifyError(
                "the cluster did not become ready",
                why="; ".join(f"{f.host}: {f.cause}" for f in sick),
                fix="look at `journalctl -u slurmd` on the host with `clusterctl ssh`, then run `up` again",
                failures=sick,
            )
        time.sleep(_PAUSE_S)


def _sick(expected: set[str], nodes: dict[str, NodeInfo]) -> tuple[Failure, ...]:
    failures = []
    for name in sorted(expected | set(nodes)):
        node = nodes.get(name)
        if node is None:
            failures.append(Failure("verify", "Slurm does not know this node", name, "verify"))
        elif name not in expected:
            failures.append(Failure("verify", "Slurm still has a node that is gone", name, "verify"))
        elif node.state not in _IDLE | _BUSY or not node.usable:
            cause = f"Slurm says {'+'.join((node.state, *node.flags))}" + (
                f": {node.reason}" if node.reason else ""
            )
            failures.append(Failure("verify", cause, name, "verify"))
    return tuple(failures)


def _probe(hosts: tuple[str, ...], transport: Transport) -> Result:
    """Run the bundled probe, one rank a host. Slurm ends it first if it hangs, and then names hosts."""
    minutes = math.ceil((PROBE_S + PROBE_PER_NODE_S * len(hosts)) / 60)
    argv = [
        "srun",
        f"--partition={PROOF_PARTITION}",
        f"--account={ADMIN_USER}",
        "--job-name=clusterctl-probe",
        f"--nodes={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        "--ntasks-per-node=1",
        "--mem=64M",
        "--mpi=pmix",
        f"--time={minutes}",
        f"--immediate={START_TIMEOUT_S}",
        "--chdir=/tmp",
        "--kill-on-bad-exit=1",
        f"--export=PYTHONPATH=/opt/clusterctl/payload/{payload_hash()},OMP_NUM_THREADS=1",
        "/opt/clusterctl/env/bin/python",
        *("-m", "payload", "probe", "--expect-hosts", ",".join(hosts)),
    ]
    # A minute more than Slurm needs: it looks at limits twice a minute.
    return transport.run(argv, timeout_s=START_TIMEOUT_S + 60 * (minutes + 1), check=False)


def _answer(result: Result, hosts: tuple[str, ...]) -> int:
    """How many ranks agreed.

    Raises:
        VerifyError: not all did.
    """
    try:
        answer = json.loads(result.stdout)
        if result.rc == 0 and answer["ok"] and answer["world_size"] == len(hosts):
            return len(hosts)
    except (ValueError, KeyError, TypeError):
        answer = None
    said = (result.stderr.strip() or result.stdout.strip())[-2000:]
    named = tuple(host for host in hosts if host in said) or hosts
    raise VerifyError(
        f"the proof job failed on {', '.join(named)}",
        why=said or f"srun ended with exit code {result.rc} and said nothing",
        fix="correct the cause on these hosts, then run `clusterctl up` again",
        failures=tuple(Failure("verify", said, host, "verify") for host in named),
    )
