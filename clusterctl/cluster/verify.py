"""The proof that a cluster works: exact node states, then an MPI job across every node, its answer checked.

The job runs in a hidden partition of its own, so it never waits behind users' jobs. Nodes that are busy with
users' jobs are taken at their slurmd's word and named as not probed; so are those that a person set aside.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from clusterctl.cluster.converge import Converged
from clusterctl.cluster.diagnosis import Connect, driver_findings, failed, is_right
from clusterctl.cluster.hardware import REASON, reject_missing_gpus
from clusterctl.cluster.nodes import concerned
from clusterctl.cluster.session import ClusterSession, Repair
from clusterctl.errors import (
    CommandError,
    Failure,
    SchedulerError,
    SlurmError,
    TransportError,
    UnreachableError,
    VerifyError,
)
from clusterctl.scheduler.base import Scheduler
from clusterctl.scheduler.models import NodeInfo
from clusterctl.scheduler.session import scheduler_of
from clusterctl.scheduler.slurm.config import HEALTH_REASON
from clusterctl.state.inventory import HEALTH_PROGRAM, Inventory
from clusterctl.util.assets import payload_hash

READY_TIMEOUT_S = 120.0  # slurmctld takes a minute to ask a node again that was out of reach
HEALTH_S = 60
_TAKEN = "Requested nodes are busy"  # srun's words when --immediate has run out


@dataclass(frozen=True, slots=True)
class Verification:
    """``probed`` hosts ran the job together; ``busy`` ones run users' jobs, ``aside`` ones a person drained.

    ``resumed`` has the nodes that Slurm had taken out of service, with the state they were in.
    """

    probed: tuple[str, ...]
    busy: tuple[str, ...] = ()
    aside: tuple[Aside, ...] = ()
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
    probe = partial(scheduler.probe, payload=f"/opt/clusterctl/payload/{payload_hash()}")
    for tries_left in (1, 0):
        found = _settled(inventory, scheduler, to, timeout_s=timeout_s, only=only)
        if not found.probed:
            return found
        result = probe(found.probed)
        taken = _TAKEN in result.stderr
        if tries_left and result.rc != 0 and taken:
            continue  # a user's job was faster: its nodes count as busy now
        if not is_right(result, found.probed):
            raise failed(result, found.probed, inventory, to, probe, alike=taken)
        return found
    raise AssertionError("the last try returns")


def _settled(
    inventory: Inventory, scheduler: Scheduler, to: Connect, *, timeout_s: float, only: Collection[str]
) -> Verification:
    """The nodes that can run the job, and those that run others."""
    if not scheduler.manages_nodes:
        busy = _busy(inventory, scheduler)
        return Verification(tuple(host.name for host in inventory.compute if host.name not in busy), busy)
    found = settle(inventory, scheduler, timeout_s=timeout_s, only=only)
    if _look_again(found.aside, to):
        found = settle(inventory, scheduler, timeout_s=timeout_s, only=only)
    return found


def _look_again(aside: Iterable[Aside], to: Connect) -> bool:
    """Have nodes that their health check drained look at themselves now; whether one is well, and resumed."""
    drained = [one.host for one in aside if HEALTH_REASON in one.reason]
    looks = [
        to(host).run(["sudo", "-n", HEALTH_PROGRAM], timeout_s=HEALTH_S, check=False) for host in drained
    ]
    return any(look.rc == 0 for look in looks)


_PAUSE_S = 0.2
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAIL"})
_RESERVED = frozenset({"MAINT", "RESERVED"})
_SLURM = "slurm"  # the account of slurmctld
_OURS = "clusterctl: "  # how the reasons begin that clusterctl gives
# slurmd gives its reasons as root, whom a person may be too: these are its words.
_SLURMDS_WORDS = (
    *("Kill task failed", "Prolog error", "Epilog error", "batch job complete failure", "Low ", "gres/"),
    *("Not responding", "Node unexpectedly rebooted", "Duplicate jobid"),
)


class Standing(Enum):
    """What a node's state means for the proof."""

    READY = "ready"
    BUSY = "busy"
    ASIDE = "aside"
    OUT = "out"  # of service by Slurm's own will, and it answers
    SICK = "sick"


_AT_SERVICE = {"IDLE": Standing.READY, **dict.fromkeys(("ALLOCATED", "MIXED", "COMPLETING"), Standing.BUSY)}


@dataclass(frozen=True, slots=True)
class Aside:
    """A node that a person took out of service: their choice, so `up` leaves it."""

    host: str
    reason: str

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}"


def settle(
    inventory: Inventory, slurm: Scheduler, *, timeout_s: float, only: Collection[str] = ()
) -> Verification:
    """Wait until every node of the inventory is idle, at work, or set aside; resume what Slurm gave up.

    ``only`` names those to look at; none: all.

    Raises:
        VerifyError: some are not in time; names hosts and Slurm's reasons.
    """
    expected = {host.name for host in inventory.compute}
    deadline = time.monotonic() + timeout_s
    resumed: dict[str, str] = {}
    while True:
        try:
            nodes = {node.name: node for node in slurm.nodes()}
            _resume([node for node in nodes.values() if not only or node.name in only], resumed, slurm)
            sick = tuple(f for f in _sick(expected, nodes) if not only or f.host in only)
            if not sick:
                names = [host.name for host in inventory.compute if not only or host.name in only]
                return _sorted([nodes[name] for name in names], resumed)
        except (SlurmError, CommandError, UnreachableError) as exc:
            # slurmctld may still be starting
            sick = (Failure("verify", exc.why or exc.what, inventory.controller.name, "verify"),)
        if time.monotonic() > deadline:
            fix = "look at `sudo journalctl -u slurmd` there (`clusterctl ssh HOST`), then run `up` again"
            raise VerifyError.of_hosts("the cluster did not become ready", sick, fix=fix)
        time.sleep(_PAUSE_S)


def standing(node: NodeInfo) -> Standing:
    """What the state of a node means for the proof."""
    states = {node.state, *node.flags}
    if _is_reserved(node):
        return Standing.ASIDE
    if states & _DRAINED:
        if not _slurms_own(node):
            return Standing.ASIDE
        return Standing.SICK if "NOT_RESPONDING" in states else Standing.OUT
    if node.state == "DOWN" and "NOT_RESPONDING" not in states:
        return Standing.OUT
    if node.usable and node.state in _AT_SERVICE:
        return _AT_SERVICE[node.state]
    return Standing.SICK


def unusable(nodes: Iterable[NodeInfo]) -> tuple[tuple[str, str], ...]:
    """The nodes that Slurm gives no jobs, though no person wants it so, each with what Slurm says."""
    out = (Standing.OUT, Standing.SICK)
    return tuple((node.name, f"Slurm says {_says(node)}") for node in nodes if standing(node) in out)


def out_of_service(nodes: Collection[NodeInfo]) -> tuple[str, ...]:
    """For who waits for nodes on which no job begins: each with its reason, then what puts them back."""
    given_up = unusable(nodes)
    aside = [node for node in nodes if standing(node) is Standing.ASIDE]
    unwell = [node for node in aside if node.reason.startswith(HEALTH_REASON)]
    drained = [node.name for node in aside if node not in unwell and not _is_reserved(node)]
    lines = [f"{name}: {why}" for name, why in given_up]
    lines += [f"{node.name}: {_why_aside(node)}" for node in aside]
    if given_up:
        lines.append("`clusterctl up` puts back what Slurm took out itself")
    if unwell:
        lines.append("what the health check drained comes back by itself once it is well")
    if drained:
        lines.append(f"`clusterctl node resume {' '.join(drained)}` puts back what a person drained")
    return tuple(lines)


def _slurms_own(node: NodeInfo) -> bool:
    return node.reason_by == _SLURM or node.reason.startswith((_OURS, *_SLURMDS_WORDS))


def _resume(nodes: Iterable[NodeInfo], resumed: dict[str, str], slurm: Scheduler) -> None:
    """Put back what Slurm took out of service, once each: what it takes out again has a cause that lasts."""
    for node in nodes:
        if standing(node) is Standing.OUT and node.name not in resumed:
            slurm.resume([node.name])
            resumed[node.name] = _says(node)


def _sick(expected: set[str], nodes: Mapping[str, NodeInfo]) -> tuple[Failure, ...]:
    failures = []
    for name in sorted(expected | set(nodes)):
        node = nodes.get(name)
        if node is None:
            failures.append(Failure("verify", "Slurm does not know this node", name, "verify"))
        elif name not in expected:
            failures.append(Failure("verify", "Slurm still has a node that is gone", name, "verify"))
        elif standing(node) in (Standing.SICK, Standing.OUT):
            failures.append(Failure("verify", f"Slurm says {_says(node)}", name, "verify"))
    return tuple(failures)


def _says(node: NodeInfo) -> str:
    return "+".join((node.state, *node.flags)) + (f": {node.reason}" if node.reason else "")


def _sorted(nodes: list[NodeInfo], resumed: dict[str, str]) -> Verification:
    """Every node, by what can be done with it."""

    def those(wanted: Standing) -> list[NodeInfo]:
        return [node for node in nodes if standing(node) is wanted]

    return Verification(
        probed=tuple(node.name for node in those(Standing.READY)),
        busy=tuple(node.name for node in those(Standing.BUSY)),
        aside=tuple(Aside(node.name, _why_aside(node)) for node in those(Standing.ASIDE)),
        resumed=resumed,
    )


def _why_aside(node: NodeInfo) -> str:
    if _is_reserved(node):
        return "reserved"
    return f"drained by {node.reason_by or 'somebody'}: {node.reason or 'no reason given'}"


def _is_reserved(node: NodeInfo) -> bool:
    return bool({node.state, *node.flags} & _RESERVED)


def _busy(inventory: Inventory, scheduler: Scheduler) -> tuple[str, ...]:
    controller = inventory.controller.name
    try:
        jobs = scheduler.own_jobs()
    except (SchedulerError, TransportError) as exc:
        failure = Failure("verify", exc.why or exc.what, controller, "verify")
        raise VerifyError("the running jobs are not known", why=failure.cause, failures=(failure,)) from exc
    at_work = {node for job in jobs if not job.ended for node in job.nodes}
    return tuple(host.name for host in inventory.compute if host.name in at_work)


def verify(session: ClusterSession, converged: Converged, limit: Collection[str] = ()) -> Verification:
    """Run an MPI job across the nodes concerned, release held jobs, and check that all GPUs are there.

    Raises:
        VerifyError: the job failed, or hosts show fewer GPUs than they should; names hosts and causes.
    """
    inventory, to = converged.inventory, session.connections.to
    verification = run_verification(inventory, to, only=concerned(inventory, limit))
    given_up = ((host, was) for host, was in verification.resumed.items() if REASON not in was)
    session.repaired(Repair(host, f"was {was}", "resumed") for host, was in given_up)
    released = scheduler_of(inventory, to).release_held_jobs()
    session.repaired(Repair(f"job {job}", "was held after a failed launch", "released") for job in released)
    session.note = f"MPI across {len(verification.probed)} of {len(inventory.compute)} nodes"
    session.notes += (*converged.notes, *_unprobed(verification))
    needs = driver_findings(session.spec, inventory, session.connections)
    session.notes += [note for note in map(str, needs) if note not in session.notes]
    reject_missing_gpus(session.spec, inventory, converged.reports, limit, needs=needs)
    return verification


def _unprobed(proof: Verification) -> tuple[str, ...]:
    """What to say of nodes that the proof left out."""
    busy = (f"not probed, busy with jobs: {', '.join(proof.busy)}",) if proof.busy else ()
    return (*busy, *(f"not probed, and left as it is: {node}" for node in proof.aside))
