"""The verification of a cluster: exact node states, then an MPI job across idle nodes, its answer checked.

The job runs in a hidden partition of its own, so it never waits behind users' jobs. Nodes that are busy with
users' jobs are taken at their slurmd's word and named as not probed; so are those that a person drained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from clusterctl.cluster.converge import Converged
from clusterctl.cluster.diagnosis import Connect, driver_findings, is_right, verification_error
from clusterctl.cluster.hardware import REASON, reject_missing_gpus
from clusterctl.cluster.session import ClusterSession, Drift
from clusterctl.errors import (
    CommandError,
    Failure,
    SchedulerError,
    SlurmError,
    TransportError,
    UnreachableError,
    VerifyError,
)
from clusterctl.scheduler.base import NodeInfo, Scheduler, polls
from clusterctl.scheduler.session import scheduler_of
from clusterctl.scheduler.slurm_conf import HEALTH_REASON
from clusterctl.state.inventory import HEALTH_PROGRAM, Inventory
from clusterctl.util.assets import payload_hash

READY_TIMEOUT_S = 120.0  # slurmctld takes a minute to ask a node again that was out of reach
HEALTH_S = 60
_TAKEN = "Requested nodes are busy"  # srun's words when --immediate has run out


@dataclass(frozen=True, slots=True)
class Verification:
    """``probed`` hosts ran the job together, ``busy`` ones run users' jobs; why others did not: ``drained``.

    ``resumed`` has the nodes that Slurm had taken out of service, with the state they were in.
    """

    probed: tuple[str, ...]
    busy: tuple[str, ...] = ()
    drained: Mapping[str, str] = field(default_factory=dict)
    resumed: Mapping[str, str] = field(default_factory=dict)


def run_verification(
    inventory: Inventory, to: Connect, *, timeout_s: float = READY_TIMEOUT_S, only: Collection[str] = ()
) -> Verification:
    """Verify the cluster through its controller; ``to`` connects to a host.

    ``only`` names the nodes to verify, as when nothing else was touched; none: all.

    Raises:
        VerifyError: nodes are missing or out of service, or the job failed; names hosts and causes.
    """
    scheduler = scheduler_of(inventory, to)
    probe = partial(scheduler.run_verification_job, payload=f"/opt/clusterctl/payload/{payload_hash()}")
    for tries_left in (1, 0):
        found = _ready_nodes(inventory, scheduler, to, timeout_s=timeout_s, only=only)
        if not found.probed:
            return found
        result = probe(found.probed)
        taken = _TAKEN in result.stderr
        if tries_left and result.rc != 0 and taken:
            continue  # a user's job was faster: its nodes count as busy now
        if not is_right(result, found.probed):
            raise verification_error(result, found.probed, inventory, to, probe, alike=taken)
        return found
    raise AssertionError("the last try returns")


def _ready_nodes(
    inventory: Inventory, scheduler: Scheduler, to: Connect, *, timeout_s: float, only: Collection[str]
) -> Verification:
    """The nodes that can run the job, and those that run others."""
    if not scheduler.manages_nodes:
        busy = _busy(inventory, scheduler)
        return Verification(tuple(host.name for host in inventory.compute if host.name not in busy), busy)
    found = wait_until_ready(inventory, scheduler, timeout_s=timeout_s, only=only)
    # What their health check drained looks at itself now; one that is well is resumed by it.
    argv = ["sudo", "-n", HEALTH_PROGRAM]
    unwell = [host for host, why in found.drained.items() if HEALTH_REASON in why]
    looks = [to(host).run(argv, timeout_s=HEALTH_S, check=False) for host in unwell]
    if any(look.rc == 0 for look in looks):
        found = wait_until_ready(inventory, scheduler, timeout_s=timeout_s, only=only)
    return found


_PAUSE_S = 0.2
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL"})
_RESERVED = frozenset({"MAINT", "RESERVED"})
_SLURM = "slurm"  # the account of slurmctld
# How the reasons begin that clusterctl gives, and slurmd: as root, whom a person may be, too.
_OUR_WORDS = "clusterctl: "
_SLURMDS_WORDS = (
    *("Kill task failed", "Prolog error", "Epilog error", "batch job complete failure", "Low ", "gres/"),
    *("Not responding", "Node unexpectedly rebooted", "Duplicate jobid"),
)


class Standing(Enum):
    """What a node's state means for the verification."""

    READY = "ready"
    BUSY = "busy"
    DRAINED = "drained by a person, or reserved: their choice, so `up` leaves it"
    OUT = "taken out of service by Slurm, though it answers"
    FAILED = "failed"


_AT_SERVICE = {"IDLE": Standing.READY, **dict.fromkeys(("ALLOCATED", "MIXED", "COMPLETING"), Standing.BUSY)}


def wait_until_ready(
    inventory: Inventory, slurm: Scheduler, *, timeout_s: float, only: Collection[str] = ()
) -> Verification:
    """Wait until every node of the inventory is idle, busy, or drained; resume what Slurm gave up.

    ``only`` names those to look at; none: all.

    Raises:
        VerifyError: some are not in time; names hosts and Slurm's reasons.
    """
    names = [host.name for host in inventory.compute if not only or host.name in only]
    resumed: dict[str, str] = {}
    for _ in polls(timeout_s, longest_s=_PAUSE_S):
        try:
            nodes = {node.name: node for node in slurm.nodes() if not only or node.name in only}
            found = by_standing(nodes[name] for name in names if name in nodes)
            for node in found[Standing.OUT]:
                if node.name not in resumed:  # once: what it takes out again has a cause that lasts
                    slurm.resume([node.name])
                    resumed[node.name] = _says(node)
            wrong = dict(unusable(nodes.values()))
            wrong |= dict.fromkeys(set(names) - set(nodes), "Slurm does not know this node")
            wrong |= dict.fromkeys(set(nodes) - set(names), "Slurm still has a node that is gone")
        except (SlurmError, CommandError, UnreachableError) as exc:  # slurmctld may still be starting
            wrong = {inventory.controller.name: exc.why or exc.what}
        if not wrong:
            return Verification(
                probed=tuple(node.name for node in found[Standing.READY]),
                busy=tuple(node.name for node in found[Standing.BUSY]),
                drained={node.name: _why_drained(node) for node in found[Standing.DRAINED]},
                resumed=resumed,
            )
    failures = [Failure("verify", why, host, "verify") for host, why in sorted(wrong.items())]
    fix = "look at `sudo journalctl -u slurmd` there (`clusterctl ssh HOST`), then run `up` again"
    raise VerifyError.of_hosts("the cluster did not become ready", failures, fix=fix)


def standing(node: NodeInfo) -> Standing:
    """What the state of a node means for the verification."""
    states = {node.state, *node.flags}
    is_drained = bool(states & _DRAINED)
    by_slurm = node.reason_by == _SLURM or node.reason.startswith((_OUR_WORDS, *_SLURMDS_WORDS))
    if states & _RESERVED or (is_drained and not by_slurm):
        return Standing.DRAINED
    if (is_drained or node.state == "DOWN") and "NOT_RESPONDING" not in states:
        return Standing.OUT
    return _AT_SERVICE.get(node.state, Standing.FAILED) if node.usable else Standing.FAILED


def by_standing(nodes: Iterable[NodeInfo]) -> dict[Standing, list[NodeInfo]]:
    """The nodes of each standing."""
    found: dict[Standing, list[NodeInfo]] = {one: [] for one in Standing}
    for node in nodes:
        found[standing(node)].append(node)
    return found


def unusable(nodes: Iterable[NodeInfo]) -> tuple[tuple[str, str], ...]:
    """The nodes that Slurm gives no jobs, though no person wants it so, each with what Slurm says."""
    out = (Standing.OUT, Standing.FAILED)
    return tuple((node.name, f"Slurm says {_says(node)}") for node in nodes if standing(node) in out)


def out_of_service(nodes: Collection[NodeInfo]) -> tuple[str, ...]:
    """For who waits for nodes on which no job begins: each with its reason, then what puts them back."""
    given_up = unusable(nodes)
    drained = by_standing(nodes)[Standing.DRAINED]
    unwell = [node for node in drained if node.reason.startswith(HEALTH_REASON)]
    by_person = [node.name for node in drained if node not in unwell and not _is_reserved(node)]
    lines = [f"{name}: {why}" for name, why in given_up]
    lines += [f"{node.name}: {_why_drained(node)}" for node in drained]
    if given_up:
        lines.append("`clusterctl up` puts back what Slurm took out itself")
    if unwell:
        lines.append("what the health check drained comes back by itself once it is well")
    if by_person:
        lines.append(f"`clusterctl node resume {' '.join(by_person)}` puts back what a person drained")
    return tuple(lines)


def _says(node: NodeInfo) -> str:
    return "+".join((node.state, *node.flags)) + (f": {node.reason}" if node.reason else "")


def _why_drained(node: NodeInfo) -> str:
    if _is_reserved(node):
        return "reserved"
    return f"drained by {node.reason_by or 'somebody'}: {node.reason or 'no reason given'}"


def _is_reserved(node: NodeInfo) -> bool:
    return bool({node.state, *node.flags} & _RESERVED)


def _busy(inventory: Inventory, scheduler: Scheduler) -> tuple[str, ...]:
    try:
        jobs = scheduler.own_jobs()
    except (SchedulerError, TransportError) as exc:
        failure = Failure("verify", exc.why or exc.what, inventory.controller.name, "verify")
        raise VerifyError("the running jobs are not known", why=failure.cause, failures=(failure,)) from exc
    at_work = {node for job in jobs if not job.ended for node in job.nodes}
    return tuple(host.name for host in inventory.compute if host.name in at_work)


def verify(session: ClusterSession, converged: Converged, limit: Collection[str] = ()) -> Verification:
    """Run an MPI job across the nodes concerned, release held jobs, and check that all GPUs are there.

    Raises:
        VerifyError: the job failed, or hosts show fewer GPUs than they should; names hosts and causes.
    """
    inventory, to = converged.inventory, session.connections.to
    lead = inventory.controller.name
    others = (host.name for host in inventory.compute if host.name in limit and host.name != lead)
    found = run_verification(inventory, to, only=(lead, *others) if limit else ())
    given_up = ((host, was) for host, was in found.resumed.items() if REASON not in was)
    session.repaired(Drift(host, f"was {was}", "resumed") for host, was in given_up)
    released = scheduler_of(inventory, to).release_held_jobs()
    session.repaired(Drift(f"job {job}", "was held after a failed launch", "released") for job in released)
    session.note = f"MPI across {len(found.probed)} of {len(inventory.compute)} nodes"
    session.notes += converged.notes
    if found.busy:
        session.notes.append(f"not probed, busy with jobs: {', '.join(found.busy)}")
    session.notes += [f"not probed, and left as it is: {host}: {why}" for host, why in found.drained.items()]
    needs = driver_findings(session.spec, inventory, session.connections)
    session.notes += [note for note in map(str, needs) if note not in session.notes]
    reject_missing_gpus(session.spec, inventory, converged.reports, limit, needs=needs)
    return found
