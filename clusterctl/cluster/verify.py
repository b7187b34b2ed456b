"""The verification of a cluster: the states of its nodes, then an MPI job across the idle nodes.

The job runs in a hidden partition of its own, so it never waits behind users' jobs. Nodes that are busy or
were drained by a person do not take part, and are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.hardware import NOT_LINKED, reject_missing_gpus
from clusterctl.cluster.nodes import REASON
from clusterctl.cluster.phases import Drift, Outcome
from clusterctl.errors import (
    CommandError,
    Failure,
    MachineError,
    NotUpError,
    SlurmError,
    UnreachableError,
    UsageError,
    VerifyError,
)
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding
from clusterctl.hosts.pairs import Peer, examine_ports, needed_ports, unconnected
from clusterctl.hosts.probe import HostReport
from clusterctl.hosts.roles import expected, host_facts_request
from clusterctl.providers.base import Provider, Size, pending_releases
from clusterctl.scheduler.admin import AdminClient, scheduler_of
from clusterctl.scheduler.base import Jobs, Nodes
from clusterctl.scheduler.slurm_parse import fold_nodes
from clusterctl.scheduler.standing import (
    HEALTH_REASON,
    Standing,
    by_standing,
    slurms_words,
    unusable,
    why_drained,
)
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.state.inventory import HEALTH_PROGRAM, Host, Inventory, inventory_of
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import Result, parallel_map

READY_TIMEOUT_S = 120.0  # slurmctld takes a minute to ask a node again that was out of reach
HEALTH_S = 60
_TAKEN = "Requested nodes are busy"  # srun's words when --immediate has run out
_PAUSE_S = 0.2
TIMED_OUT = 124  # timeout(1)'s exit code
# Open MPI's, of what may be wrong
_ADVICE: Final = re.compile(r"^-{40,}\n.*?^-{40,}$\n?", re.MULTILINE | re.DOTALL)
_MOST_NAMED = 8  # hosts in one error, by name and with their causes
_TIMEOUT_S = 60.0
_OF_DRIVER = frozenset({"no-driver", "reboot-needed", "secure-boot", "gpu-lost", "no-devices", *NOT_LINKED})


@dataclass(frozen=True, slots=True)
class Verification:
    """``verified`` hosts ran the job together, ``busy`` run users' jobs; why others did not: ``drained``.

    ``resumed`` has the nodes that Slurm had taken out of service, with the state they were in.
    """

    verified: tuple[str, ...]
    busy: tuple[str, ...] = ()
    drained: Mapping[str, str] = field(default_factory=dict)
    resumed: Mapping[str, str] = field(default_factory=dict)


def verify(
    cluster: ClusterContext,
    inventory: Inventory,
    reports: Mapping[str, HostReport],
    limit: Collection[str] | None = None,
) -> Outcome[Verification]:
    """Run an MPI job across the nodes concerned, release held jobs, and check that all GPUs are there.

    limit: the only nodes to verify, besides the controller. None: all nodes.
    """
    concerned = inventory.names if limit is None else limit
    nodes = [host.name for host in inventory.compute if host.is_controller or host.name in concerned]
    found = run_verification(inventory, cluster.connections.to, nodes)
    given_up = ((host, was) for host, was in found.resumed.items() if REASON not in was)
    cluster.repaired(Drift(host, f"was {was}", "resumed") for host, was in given_up)
    scheduler = cluster.scheduler(inventory)
    released = scheduler.release_held_jobs() if isinstance(scheduler, Nodes) else ()
    cluster.repaired(Drift(f"job {job}", "was held after a failed launch", "released") for job in released)
    notes = [f"not probed, busy with jobs: {', '.join(found.busy)}"] if found.busy else []
    notes += [f"not probed, and left as it is: {host}: {why}" for host, why in found.drained.items()]
    needs = driver_findings(cluster.spec, inventory, cluster.connections)
    notes += [note for note in map(str, needs) if note not in cluster.notes]
    reject_missing_gpus(cluster.spec, inventory, reports, concerned, needs=needs)
    summary = f"MPI across {len(found.verified)} of {len(inventory.compute)} nodes"
    return Outcome(found, summary, tuple(notes))


def run_verification(
    inventory: Inventory, to: Connect, nodes: Sequence[str], *, timeout_s: float = READY_TIMEOUT_S
) -> Verification:
    """Verify these nodes through the controller; ``to`` connects to a host.

    Raises:
        VerifyError: nodes are missing or out of service, or the job failed; names hosts and causes.
    """
    scheduler = scheduler_of(inventory, to)
    found = _ready_nodes(inventory, nodes, scheduler, to, timeout_s=timeout_s)
    result = scheduler.run_verification_job(found.verified) if found.verified else None
    if result and result.rc != 0 and _TAKEN in result.stderr:  # a user's job was faster
        found = _ready_nodes(inventory, nodes, scheduler, to, timeout_s=timeout_s)
        result = scheduler.run_verification_job(found.verified) if found.verified else None
    if result and not is_right(result, found.verified):
        raise verification_error(result, found.verified, inventory, to, scheduler)
    return found


def _ready_nodes(
    inventory: Inventory, nodes: Sequence[str], scheduler: Jobs, to: Connect, *, timeout_s: float
) -> Verification:
    """The nodes that can run the job, and those that run others."""
    if not isinstance(scheduler, Nodes):
        at_work = {node for job in scheduler.own_jobs() if not job.ended for node in job.nodes}
        idle = tuple(node for node in nodes if node not in at_work)
        return Verification(idle, tuple(node for node in nodes if node in at_work))
    found = wait_until_ready(inventory, nodes, scheduler, timeout_s=timeout_s)
    # What their health check drained looks at itself now; one that is well is resumed by it.
    argv = ["sudo", "-n", HEALTH_PROGRAM]
    unwell = [host for host, why in found.drained.items() if HEALTH_REASON in why]
    looks = [to(host).run(argv, timeout_s=HEALTH_S, check=False) for host in unwell]
    if any(look.rc == 0 for look in looks):
        found = wait_until_ready(inventory, nodes, scheduler, timeout_s=timeout_s)
    return found


def wait_until_ready(
    inventory: Inventory, names: Sequence[str], slurm: Nodes, *, timeout_s: float
) -> Verification:
    """Resume nodes that Slurm drained; wait until all are idle, busy, or drained, and Slurm has no others.

    Raises:
        VerifyError: some are not in time; names hosts and Slurm's reasons.
    """
    others = {host.name for host in inventory.compute}.difference(names)
    resumed: dict[str, str] = {}
    for _ in slurm.clock.polls(timeout_s, longest_s=_PAUSE_S):
        try:
            nodes = {node.name: node for node in slurm.nodes() if node.name not in others}
            found = by_standing(nodes[name] for name in names if name in nodes)
            for node in found[Standing.OUT]:
                if node.name not in resumed:  # once: what it takes out again has a cause that lasts
                    slurm.resume([node.name])
                    resumed[node.name] = slurms_words(node)
            wrong = dict(unusable(nodes.values()))
            wrong |= dict.fromkeys(set(names) - set(nodes), "Slurm does not know this node")
            wrong |= dict.fromkeys(set(nodes) - set(names), "Slurm still has a node that is gone")
        except (SlurmError, CommandError, UnreachableError) as exc:  # slurmctld may still be starting
            wrong = {inventory.controller.name: exc.why or exc.what}
        if not wrong:
            return Verification(
                verified=tuple(node.name for node in found[Standing.READY]),
                busy=tuple(node.name for node in found[Standing.BUSY]),
                drained={node.name: why_drained(node) for node in found[Standing.DRAINED]},
                resumed=resumed,
            )
    failures = [Failure("verify", why, host, "verify") for host, why in sorted(wrong.items())]
    fix = "look at `sudo journalctl -u slurmd` there (`clusterctl ssh --admin HOST`), then run `up` again"
    raise VerifyError.of_hosts(
        "the cluster did not become ready", failures, code="cluster-not-ready", fix=fix
    )


def is_right(result: Result, hosts: tuple[str, ...]) -> bool:
    """Whether as many ranks agreed as there are hosts."""
    try:
        answer = json.loads(result.stdout)
        return result.rc == 0 and answer["ok"] is True and answer["world_size"] == len(hosts)
    except (ValueError, KeyError, TypeError):
        return False


def verification_error(
    result: Result, hosts: tuple[str, ...], inventory: Inventory, to: Connect, scheduler: AdminClient
) -> VerifyError:
    """The hosts at fault and why; smaller jobs tell if the job itself does not."""
    said = _words(result)
    failures = _failures_by_job(result) or _failures_of_parts(hosts, inventory, to, scheduler)
    if not failures:
        failures = tuple(Failure("verify", said, host, "verify") for host in hosts)
    hosts_of = {failure.cause: str(failure.host) for failure in reversed(failures)}
    told = [cause if host in cause else f"{host}: {cause}" for cause, host in hosts_of.items()]
    more = [f"and as much of {len(told) - _MOST_NAMED} more"] if len(told) > _MOST_NAMED else []
    named = fold_nodes([str(failure.host) for failure in failures])
    fixes = "; ".join(dict.fromkeys(failure.fix for failure in failures if failure.fix))
    return VerifyError(
        f"the verification job failed on {named}",
        code="verification-failed",
        why="; ".join([*told[:_MOST_NAMED], *more]),  # the error's `failures` have them all
        fix=f"{fixes or 'correct the cause on these hosts'}, then run `clusterctl up` again",
        failures=failures,
    )


def _failures_by_job(result: Result) -> tuple[Failure, ...]:
    try:
        found = json.loads(result.stdout)["failures"]
        return tuple(Failure("verify", str(one["cause"]), str(one["host"]), "verify") for one in found)
    except (ValueError, KeyError, TypeError):
        return ()


def _failures_of_parts(
    hosts: tuple[str, ...], inventory: Inventory, to: Connect, scheduler: AdminClient
) -> tuple[Failure, ...]:
    """The hosts that TCP does not join; else those on which even a job of their own fails."""
    addresses = {host.name: host.address for host in inventory.hosts if host.name in hosts}
    if (found := unconnected(addresses, to)) or len(hosts) == 1:
        return found
    results = parallel_map(hosts, lambda host: scheduler.run_verification_job((host,)))
    return tuple(
        Failure("verify", _words(result), host, "verify")
        for host, result in zip(hosts, results, strict=True)
        if not is_right(result, (host,))
    )


def _words(result: Result) -> str:
    said = result.stderr.strip() or result.stdout.strip()
    said = (_ADVICE.sub("", f"{said}\n").strip() or said)[-2000:]
    if result.rc == TIMED_OUT:
        said = f"it did not end in time\n{said}".strip()
    return said or f"it ended with exit code {result.rc} and said nothing"


def checkup(
    spec: ClusterSpec, workspace: Workspace, provider: Provider, *, hosts: Collection[str] = ()
) -> DoctorReport:
    """What is wrong with the hosts, or with those of ``hosts``; nothing is changed."""
    hosts_known: tuple[Host, ...] = ()
    try:
        inventory = inventory_of(workspace)
    except NotUpError:
        report = provider.examine(spec, workspace, hosts=hosts)
        if report is None:
            raise
    else:
        with Connections(workspace.ssh_config) as connections:
            report = _of_cluster(spec, inventory, connections, hosts)
            unreached = _unreached(spec, inventory, connections, report)
            report = replace(report, findings=(*report.findings, *unreached))
        hosts_known = inventory.hosts
    facts = dict(report.facts)
    for host in hosts_known:
        if host.name in facts and (size := Size.of(host)):  # what jobs can have, as `status` shows it
            share = {"cpus": size.cpus, "memory_mib": size.memory_mib}
            system = facts[host.name].system.model_copy(update=share)
            facts[host.name] = facts[host.name].model_copy(update={"system": system})
    about = "the release of {} is pending"
    found = tuple(
        Finding(one.host.name, "warning", "pending-release", about.format(one.address), one.why, one.fix)
        for one in pending_releases(workspace)
        if not hosts or one.host.name in hosts
    )
    return replace(report, facts=facts, findings=(*report.findings, *found))


def _unreached(
    spec: ClusterSpec, inventory: Inventory, connections: Connections, report: DoctorReport
) -> tuple[Finding, ...]:
    """Ports of the cluster that hosts which answered do not reach of each other."""
    if spec.provider.shares_kernel:  # its hosts are on a bridge of this machine
        return ()
    is_nfs = inventory.shared_folder.kind == "nfs"
    peers = {
        host.name: Peer(host.address, needed_ports(spec, host, exports=is_nfs and host.is_controller))
        for host in inventory.hosts
        if host.name in report.facts
    }
    members = {host.name: host.address for host in inventory.hosts}
    return tuple(
        examine_ports(peers, members, report.facts, lambda host, argv: connections.to(host).converse(argv))
    )


def preflight(spec: ClusterSpec, workspace: Workspace, provider: Provider) -> DoctorReport:
    """Everything that stands in the way of `up`, found by looking alone: here, and where the hosts are."""
    report = provider.preflight(spec, workspace) or DoctorReport((), {})
    try:
        provider.check(spec)
    except (MachineError, UsageError) as exc:
        if all(finding.what != exc.what for finding in report.findings):  # a provider may look at it in both
            one = Finding("this machine", "error", exc.code, exc.what, exc.why or exc.where, exc.fix)
            return replace(report, findings=(one, *report.findings))
    return report


def driver_findings(spec: ClusterSpec, inventory: Inventory, connections: Connections) -> tuple[Finding, ...]:
    """What NVIDIA's driver still needs on nodes with GPUs, such as a reboot or a fabric manager."""
    if not spec.software.nvidia.has_driver and not any(partition.gpus for partition in spec.partitions):
        return ()
    report = _of_cluster(spec, inventory, connections, [host.name for host in inventory.compute])
    return tuple(finding for finding in report.findings if finding.code in _OF_DRIVER)


def _of_cluster(
    spec: ClusterSpec, inventory: Inventory, connections: Connections, hosts: Collection[str]
) -> DoctorReport:
    """Through the account that every host of a cluster has."""
    reject_unknown(hosts, [host.name for host in inventory.hosts], "the cluster has no host")

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return connections.to(host).run(("sudo", "-n", *argv), stdin=stdin, timeout_s=_TIMEOUT_S).stdout

    every = expected(spec, inventory.hosts, installed=inventory.names)
    request = host_facts_request(spec, inventory.hosts)
    return checks.examine(request, every, root, leader=inventory.controller.name, only=hosts)
