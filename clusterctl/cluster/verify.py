"""Verification of a cluster: the states of its nodes, then an MPI job across all idle nodes.

The job runs in a hidden partition, so it never waits behind users' jobs. Nodes that are busy, or
were drained by an administrator, do not take part and are listed.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.converge import UNFINISHED, wanted_of
from clusterctl.cluster.drift import drift_of_host
from clusterctl.cluster.hardware import NOT_LINKED, reject_missing_gpus
from clusterctl.cluster.nodes import REASON
from clusterctl.cluster.phases import Drift, PhaseResult
from clusterctl.cluster.trial import has_passed, prove_job_user, record_trial, run_trial
from clusterctl.errors import (
    CommandError,
    Failure,
    MachineError,
    Notice,
    NotUpError,
    SlurmAwayError,
    SlurmError,
    TransportError,
    UnreachableError,
    UsageError,
    VerifyError,
)
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding, findings_as_failures
from clusterctl.hosts.needs import UnmetNeed, lacks_of, text_of
from clusterctl.hosts.pairs import examine_pairs, targets_of
from clusterctl.hosts.probe import HostReport, ProbeRequest
from clusterctl.hosts.roles import host_facts_request, probe_requests, requirements_of_hosts
from clusterctl.providers.base import HostSize, Provider, pending_releases
from clusterctl.scheduler.admin import scheduler_of
from clusterctl.scheduler.base import JobState, NodeInfo, Nodes
from clusterctl.scheduler.session import SHORT_PATIENCE_S, session_of, site_of
from clusterctl.scheduler.slurm.availability import (
    HEALTH_REASON,
    Availability,
    drain_reason,
    find_unusable_nodes,
    group_by_availability,
    is_reserved,
    slurm_state_text,
)
from clusterctl.scheduler.slurm.values import fold_nodes
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.state.inventory import HEALTH_PROGRAM, Host, Inventory, inventory_of
from clusterctl.state.removal import leaving_error
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect, Transport
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import Result, parallel_map

# slurmctld takes a minute to contact an unreachable node again.
READY_TIMEOUT_S = 120.0
HEALTH_S = 60
# The error of srun when the time of --immediate has passed.
_BUSY = "Requested nodes are busy"
_LATE = "Job credential expired"
_PAUSE_S = 0.2
# Ages in whole seconds may differ so much.
_ROUNDING_S = 1
# Slurm's state of a node that slurmctld contacts only every few minutes.
_GIVEN_UP: Final = frozenset({"DOWN", "NOT_RESPONDING"})
_SLURMCTLD_LOG: Final = "/var/log/slurm/slurmctld.log"
_STATE_FOLDER: Final = "/var/lib/slurm/slurmctld"
_NORMAL_RESTARTS = 5
# Prints unmunge's first line about each argument. Its errors begin with "unmunge: Error:".
_DECODE: Final = 'for one; do printf %s "$one" | unmunge 2>&1 | head -n 1; done'
_OK: Final = "Success (0)"
# Munge's words for a credential from the past or the future: munge_strerror in libmunge/strerror.c.
_OTHER_TIME: Final = re.compile("(Expired|Rewound) credential")
# Slurm's words for a file of slurmctld's state that ends too early: load_all_job_state,
# load_all_node_state and load_all_part_state in src/slurmctld.
_DAMAGED_STATE: Final = re.compile(r"^Incomplete (job|node|part)")
TIMED_OUT = 124  # timeout(1)'s exit code
# A block of Open MPI's advice about possible causes.
_ADVICE_BLOCK: Final = re.compile(r"^-{40,}\n.*?^-{40,}$\n?", re.MULTILINE | re.DOTALL)
# Causes listed in the text of an error; the error's `failures` have all of them.
_MAX_NAMED = 8
_TIMEOUT_S = 60.0
_OF_DRIVER = frozenset(
    {"no-driver", "reboot-needed", "secure-boot", "gpu-lost", "no-devices", NOT_LINKED}
)


@dataclass(frozen=True, slots=True)
class FabricLink:
    """The bandwidth of MPI between two nodes with ports of InfiniBand or RoCE that are up.

    port: the port that sent the bytes, with its kind. "": none of them did.
    """

    hosts: tuple[str, str]
    gb_per_s: float
    port: str

    def __str__(self) -> str:
        way = self.port or "TCP, not InfiniBand or RoCE"
        return f"{self.gb_per_s:g} GB/s from {self.hosts[0]} to {self.hosts[1]} by {way}"

    @property
    def notice(self) -> Notice | None:
        if self.port:
            return None
        fix = (
            "on these hosts, `ucx_info -d` lists the devices of UCX, `ibstat` the ports; on Rocky "
        )
        fix += "Linux UCX reaches them only with the packages ucx-ib, ucx-rdmacm and ucx-cma"
        return Notice("fabric-unused", f"MPI used {self}: {fix}")


@dataclass(frozen=True, slots=True)
class Verification:
    """The nodes of a verification, by how they took part.

    verified: nodes that ran the MPI job together.
    busy: nodes that were skipped because they run users' jobs.
    drained: node -> the reason why it is out of service. These nodes were skipped.
    resumed: node -> the state from which it was resumed before the job.
    link: the bandwidth of MPI between two of the nodes. None: they have no fast network.
    """

    verified: tuple[str, ...]
    busy: tuple[str, ...] = ()
    drained: Mapping[str, str] = field(default_factory=dict)
    resumed: Mapping[str, str] = field(default_factory=dict)
    link: FabricLink | None = None


def verify(
    cluster: ClusterContext,
    inventory: Inventory,
    reports: Mapping[str, HostReport],
    limit: Collection[str] | None = None,
) -> PhaseResult[Verification]:
    """Run an MPI job across the nodes, release jobs held after a failed launch, and check all GPUs.

    limit: verify only these nodes and the controller. None: all nodes.
    """
    host_names = inventory.names if limit is None else limit
    nodes = [
        host.name for host in inventory.compute if host.is_controller or host.name in host_names
    ]
    to = cluster.connections.to
    prove = proof_of_user(inventory, cluster.workspace, cluster.connections)
    asked = {*host_names, inventory.controller.name} & reports.keys()

    def reject_unreached() -> None:
        _reject_unreached(cluster.spec, inventory, asked, to)

    # Local nodes are connected by a bridge of this machine.
    if not cluster.spec.provider.shares_kernel:
        reject_unreached()
    controller = to(inventory.controller.name)
    try:
        verification = run_verification(inventory, to, nodes, prove, reject_unreached)
    except VerifyError as exc:
        record_trial(controller, nodes, _causes(exc))
        raise
    record_trial(controller, verification.verified, {})
    resumed = ((host, state) for host, state in verification.resumed.items() if REASON not in state)
    cluster.report_repairs(Drift(host, f"was {state}", "resumed") for host, state in resumed)
    scheduler = cluster.scheduler(inventory)
    jobs = scheduler.release_held_jobs()
    cluster.report_repairs(
        Drift(f"job {job}", "was held after a failed launch", "released") for job in jobs
    )
    notes = (
        [f"not verified, busy with jobs: {', '.join(verification.busy)}"]
        if verification.busy
        else []
    )
    notes += [
        f"not verified, stays drained: {host}: {text}"
        for host, text in verification.drained.items()
    ]
    findings = driver_findings(cluster.spec, inventory, cluster.connections)
    notes += [note for note in map(str, findings) if note not in cluster.notes]
    reject_missing_gpus(cluster.spec, inventory, reports, host_names, needs=findings)
    reject_unfit_nodes(verification.drained, to)
    summary = f"MPI across {len(verification.verified)} of {len(inventory.compute)} nodes"
    if verification.link:
        summary += f", {verification.link}"
        notes += [notice] if (notice := verification.link.notice) else []
    return PhaseResult(verification, summary, tuple(notes))


def _causes(error: VerifyError) -> dict[str, str]:
    return {failure.host: failure.cause for failure in error.failures if failure.host}


def proof_of_user(
    inventory: Inventory, workspace: Workspace, connections: Connections
) -> Callable[[Sequence[str]], None]:
    """Return the function that proves on nodes that jobs of the job user work."""

    def prove(hosts: Sequence[str]) -> None:
        if inventory.job_user:
            session = session_of(site_of(inventory), workspace, connections)
            prove_job_user(session, connections.to, hosts)

    return prove


def run_verification(
    inventory: Inventory,
    to: Connect,
    nodes: Sequence[str],
    prove: Callable[[Sequence[str]], None],
    reject_unreached: Callable[[], None],
    *,
    timeout_s: float = READY_TIMEOUT_S,
) -> Verification:
    """Verify these nodes through the controller. ``to`` connects to a host by its name.

    prove: called with the nodes while the MPI job runs on them. It may raise VerifyError.
    reject_unreached: called if the MPI job fails without a cause. It raises VerifyError if nodes
        can't reach each other.

    Raise VerifyError, with hosts and causes, if nodes are missing or out of service, or the job
    fails.
    """
    # ``wait_until_ready`` itself waits for slurmctld, and looks why it does not answer.
    scheduler = scheduler_of(inventory, to, patience_s=SHORT_PATIENCE_S)
    for _ in range(2):
        verification = _ready_nodes(inventory, nodes, scheduler, to, timeout_s=timeout_s)
        hosts = verification.verified
        if not hosts:
            return verification
        result = run_trial(scheduler, hosts, prove)
        if not _lost_its_place(result):
            break
    if not has_passed(result, hosts):
        raise verification_error(result, hosts, scheduler, reject_unreached)
    return replace(verification, link=measured_link(result))


def _lost_its_place(result: Result) -> bool:
    """Return whether a user's job has started first, or a busy node its part after `cred_expire`."""
    return result.rc != 0 and any(text in result.stderr for text in (_BUSY, _LATE))


def _ready_nodes(
    inventory: Inventory, nodes: Sequence[str], scheduler: Nodes, to: Connect, *, timeout_s: float
) -> Verification:
    if not scheduler.drains_nodes:
        at_work = {node for job in scheduler.own_jobs() if not job.ended for node in job.nodes}
        idle = tuple(node for node in nodes if node not in at_work)
        return Verification(idle, tuple(node for node in nodes if node in at_work))
    verification = wait_until_ready(inventory, nodes, scheduler, to, timeout_s=timeout_s)
    if verification.busy and (lost := _nodes_with_lost_jobs(verification.busy, scheduler, to)):
        # The wait resumes the nodes, unless they have registered again by then.
        scheduler.set_down([*lost], "clusterctl: rebooted while jobs ran")
        verification = wait_until_ready(inventory, nodes, scheduler, to, timeout_s=timeout_s)
        verification = replace(verification, resumed={**verification.resumed, **lost})
    unhealthy = [host for host, text in verification.drained.items() if HEALTH_REASON in text]
    healthy = _healthy_nodes([*verification.verified, *unhealthy], to)
    if healthy != {*verification.verified}:
        verification = wait_until_ready(inventory, nodes, scheduler, to, timeout_s=timeout_s)
    return verification


def _healthy_nodes(hosts: Sequence[str], to: Connect) -> set[str]:
    """Run the health program on nodes, and return the healthy ones.

    It drains nodes with an unmet need of jobs, and resumes nodes that it drained earlier and that
    are healthy again.
    """

    def is_healthy(host: str) -> bool:
        argv = ["sudo", "-n", HEALTH_PROGRAM]
        with suppress(TransportError):
            return to(host).run(argv, timeout_s=HEALTH_S, check=False).rc == 0
        # The verification job names the problem.
        return True

    answers = parallel_map(hosts, is_healthy)
    return {host for host, healthy in zip(hosts, answers, strict=True) if healthy}


def reject_unfit_nodes(drained: Mapping[str, str], to: Connect) -> None:
    """Raise VerifyError with the unmet needs of each node that its health check has drained.

    drained: node -> why it is out of service.
    """
    unfit = {host: text for host, text in drained.items() if HEALTH_REASON in text}
    if not unfit:
        return
    lacks = lacks_of(unfit, to, within_s=HEALTH_S)
    failures = [
        Failure("host-unfit", lack.why, host, "verify", lack.fix, about=lack.code)
        for host, text in unfit.items()
        for lack in lacks.get(host) or [UnmetNeed("node-unfit", "", text, "")]
    ]
    raise VerifyError.of_hosts(
        "{hosts} can't run jobs",
        failures,
        about="nodes",
        then=(
            "nodes return to service by themselves once this is corrected; the other nodes are in "
            "service"
        ),
    )


def _nodes_with_lost_jobs(names: Collection[str], slurm: Nodes, to: Connect) -> dict[str, str]:
    """Return node -> words that name jobs of the node that started before the node's last boot.

    Slurm shows these jobs as running if the node was back before slurmctld had noticed its absence.
    Ages are compared, because the clocks of a node and of slurmctld may differ.
    """
    jobs: dict[str, dict[str, int]] = defaultdict(dict)
    for job in slurm.all_jobs():
        if job.state is JobState.RUNNING and job.start_time is not None:
            for node in set(names).intersection(job.nodes):
                jobs[node][job.id] = job.start_time
    if not jobs:
        return {}
    # The time is read first, so that a slow host makes no job look older than its node's boot.
    now = int(slurm.transport.run(["date", "+%s"]).stdout)
    up_s = parallel_map([*jobs], lambda node: _seconds_since_boot(to(node)))
    return {
        node: f"in use by job {', '.join(starts)}, which ended when the node went off"
        for (node, starts), node_s in zip(jobs.items(), up_s, strict=True)
        # A node that runs newer jobs as well must not be set down.
        if now - max(starts.values()) > node_s + _ROUNDING_S
    }


def _seconds_since_boot(host: Transport) -> float:
    """Return the age of a host's first process, infinity if it is unknown. A local node has the
    kernel of its host, but not its init.
    """
    with suppress(CommandError, TransportError, ValueError):
        return int(host.run(["ps", "-o", "etimes=", "-p", "1"]).stdout)
    return math.inf


def _restart_slurmd(hosts: Collection[str], to: Connect) -> None:
    """Restart slurmd on hosts that Slurm has given up, so that they register unasked.

    Slurm has ended the jobs of these hosts already.
    """

    def restart(host: str) -> None:
        with suppress(TransportError):
            to(host).run(
                ["sudo", "-n", "systemctl", "--no-block", "restart", "slurmd"], check=False
            )

    parallel_map([*hosts], restart)


def wait_until_ready(
    inventory: Inventory, names: Sequence[str], slurm: Nodes, to: Connect, *, timeout_s: float
) -> Verification:
    """Wait until nodes are idle, busy or drained by an administrator. Resume those Slurm drained.

    Raise VerifyError, with hosts and reasons, if nodes are not ready in time, or Slurm lists
    removed nodes.
    """
    other_names = {host.name for host in inventory.compute}.difference(names)
    resumed: dict[str, str] = {}
    restarted: dict[str, str] = {}
    for _ in slurm.clock.polls(timeout_s, longest_s=_PAUSE_S):
        try:
            nodes = {node.name: node for node in slurm.nodes() if node.name not in other_names}
            by_state = group_by_availability(nodes[name] for name in names if name in nodes)
            given_up = {
                node.name: slurm_state_text(node)
                for node in by_state[Availability.FAILED]
                if {node.state, *node.flags} >= _GIVEN_UP
            }
            _restart_slurmd(given_up.keys() - restarted, to)
            restarted |= given_up
            for node in by_state[Availability.OUT]:
                # Only once: if Slurm drains a node again, the cause persists.
                if node.name not in resumed:
                    slurm.resume([node.name])
                    resumed[node.name] = slurm_state_text(node)
            problems = dict(find_unusable_nodes(nodes.values()))
            problems |= dict.fromkeys(set(names) - set(nodes), "Slurm does not know this node")
            problems |= dict.fromkeys(
                set(nodes) - set(names), "Slurm still lists this removed node"
            )
        except (SlurmError, CommandError, UnreachableError) as exc:
            problems = {inventory.controller.name: exc.why or exc.what}
            # slurmctld may still be starting.
            is_away = isinstance(exc, SlurmAwayError)
            if is_away and (fatal := _last_fatal_of_slurmctld(to(inventory.controller.name))):
                raise _slurmctld_ended(inventory.controller.name, fatal) from exc
        if not problems:
            return Verification(
                verified=tuple(node.name for node in by_state[Availability.READY]),
                busy=tuple(node.name for node in by_state[Availability.BUSY]),
                drained={node.name: drain_reason(node) for node in by_state[Availability.DRAINED]},
                resumed={**restarted, **resumed},
            )
    own = {*names, inventory.controller.name}
    lacks = lacks_of(problems.keys() & own, to, within_s=HEALTH_S)
    failures = [
        Failure(
            "not-ready",
            f"{reason}: {text_of(lacks[host])}" if host in lacks else reason,
            host,
            "verify",
            lacks[host][0].fix if host in lacks else "",
            about="verify",
        )
        for host, reason in sorted(problems.items())
    ]
    host = min(problems)
    journal = f"sudo journalctl -u {'slurmd' if host in names else 'slurmctld'}"
    raise VerifyError.of_hosts(
        "the cluster did not become ready",
        failures,
        about="cluster",
        fix=f"read `clusterctl ssh --admin {host} -- {journal}`, then run `clusterctl up` again",
    )


def _last_fatal_of_slurmctld(controller: Transport) -> str:
    """Return why slurmctld keeps ending: its log's last fatal error. "": it runs, or may start.

    slurmctld also ends if slurmdbd is not up yet, so some restarts are normal.
    """
    show = ["systemctl", "show", "slurmctld", "--property=ActiveState,NRestarts"]
    try:
        lines = controller.run(show).stdout.splitlines()
        values = dict(line.partition("=")[::2] for line in lines)
        if values["ActiveState"] == "active" or int(values["NRestarts"]) < _NORMAL_RESTARTS:
            return ""
        log = controller.run(["sudo", "-n", "tail", "-n", "200", _SLURMCTLD_LOG]).stdout
    except (CommandError, TransportError, LookupError, ValueError):
        return ""
    fatals = [line.partition("fatal: ")[2] for line in log.splitlines() if "] fatal: " in line]
    return fatals[-1].strip() if fatals else ""


def _slurmctld_ended(host: str, fatal: str) -> VerifyError:
    """Return the error for a slurmctld that ends with a fatal error at each start."""
    state = _DAMAGED_STATE.search(fatal)
    if state is None:
        fix = (
            f"correct the problem that it names; {_SLURMCTLD_LOG} on {host} has more (`clusterctl ssh "
            f"--admin {host}`)"
        )
    else:
        file = f"{_STATE_FOLDER}/{state[1]}_state"
        copy = f"clusterctl ssh --admin {host} -- sudo cp -p {file}.old {file}"
        fix = (
            f"`{copy}` restores the file as slurmctld saved it the time before; then run "
            "`clusterctl up`"
        )
    return VerifyError.of_hosts(
        "slurmctld ends at each start",
        [Failure("not-ready", fatal, host, "verify", about="verify")],
        about="slurmctld",
        fix=fix,
    )


def measured_link(result: Result) -> FabricLink | None:
    """Return the bandwidth that a verification job measured. None: it measured no bandwidth."""
    with suppress(ValueError, KeyError, TypeError):
        link = json.loads(result.stdout)["link"]
        first, second = link["hosts"]
        return FabricLink((first, second), link["gb_per_s"], link["port"])
    return None


def verification_error(
    result: Result,
    hosts: tuple[str, ...],
    scheduler: Nodes,
    reject_unreached: Callable[[], None] = lambda: None,
) -> VerifyError:
    """Return the error for a failed MPI job on ``hosts``. If ``result`` names no host, test each
    host.
    """
    message = _error_text(result)
    failures = _failures_by_job(result)
    if not failures:
        try:
            reject_unreached()
        except VerifyError as error:
            return error
        failures = _failures_of_parts(hosts, scheduler)
    if not failures:
        failures = tuple(
            Failure("not-ready", message, host, "verify", about="verify") for host in hosts
        )
    hosts_of = {failure.cause: str(failure.host) for failure in reversed(failures)}
    causes = [cause if host in cause else f"{host}: {cause}" for cause, host in hosts_of.items()]
    omitted = [f"and {len(causes) - _MAX_NAMED} more causes"] if len(causes) > _MAX_NAMED else []
    nodes = fold_nodes([str(failure.host) for failure in failures])
    fixes = "; ".join(dict.fromkeys(failure.fix for failure in failures if failure.fix))
    return VerifyError(
        f"the verification job failed on {nodes}",
        about="verification",
        why="; ".join([*causes[:_MAX_NAMED], *omitted]),
        fix=f"{fixes or 'correct the cause on these hosts'}, then run `clusterctl up` again",
        failures=failures,
    )


def _failures_by_job(result: Result) -> tuple[Failure, ...]:
    try:
        failures = json.loads(result.stdout)["failures"]
        return tuple(
            Failure("not-ready", str(f["cause"]), str(f["host"]), "verify", about="verify")
            for f in failures
        )
    except (ValueError, KeyError, TypeError):
        return ()


def _failures_of_parts(hosts: tuple[str, ...], scheduler: Nodes) -> tuple[Failure, ...]:
    """Return a failure for each host on which a job of its own fails."""
    if len(hosts) == 1:
        return ()
    results = parallel_map(hosts, lambda host: scheduler.run_verification_job((host,)))
    return tuple(
        Failure("not-ready", _error_text(result), host, "verify", about="verify")
        for host, result in zip(hosts, results, strict=True)
        if not has_passed(result, (host,))
    )


def _error_text(result: Result) -> str:
    output = result.stderr.strip() or result.stdout.strip()
    output = (_ADVICE_BLOCK.sub("", f"{output}\n").strip() or output)[-2000:]
    if result.rc == TIMED_OUT:
        output = f"the job did not finish in time\n{output}".strip()
    return output or f"the job failed with exit code {result.rc} and without output"


def examine_cluster(
    spec: ClusterSpec, workspace: Workspace, provider: Provider, *, hosts: Collection[str] = ()
) -> DoctorReport:
    """Report problems of hosts, without changes. ``hosts``: examine only these. Empty: all.

    Raise NotUpError if a `down` did not finish: the cluster's hosts are half removed then.
    """
    if (leaving := leaving_error(workspace)) is not None:
        raise leaving
    hosts_known: tuple[Host, ...] = ()
    try:
        inventory = inventory_of(workspace)
    except NotUpError:
        # Machines of an owner exist before the first `up`.
        adopts = spec.provider.adopts_hosts
        report = provider.preflight(spec, workspace) if adopts else None
        if report is None:
            raise
        known = {*report.facts, *(finding.host for finding in report.findings)}
        reject_unknown(hosts, known, "the cluster has no host")
        chosen = set(hosts) or known
        report = replace(
            report,
            findings=tuple(finding for finding in report.findings if finding.host in chosen),
            facts={host: facts for host, facts in report.facts.items() if host in chosen},
        )
    else:
        marks = probe_requests(spec, inventory, workspace)
        with Connections(workspace.ssh_config, fans_out=True) as connections:
            report = _examine(spec, inventory, connections, hosts, marks)
            report = report.and_also(drift_findings(inventory, workspace, report))
            # Local nodes are connected by a bridge of this machine.
            if not spec.provider.shares_kernel:
                to = connections.to
                report = report.and_also(_find_unreached(spec, inventory, report.facts.keys(), to))
            report = report.and_also(credential_findings(inventory, connections.to, report))
            report = report.and_also(slurm_findings(inventory, connections.to, report))
            prove = proof_of_user(inventory, workspace, connections)
            tried = trial_findings(inventory, connections.to, report, prove)
            report = report.and_also(tried)
        hosts_known = inventory.hosts
    facts = dict(report.facts)
    for host in hosts_known:
        if host.name in facts and (size := HostSize.of(host)):
            usable = {"cpus": size.cpus, "memory_mib": size.memory_mib}
            system = facts[host.name].system.model_copy(update=usable)
            facts[host.name] = facts[host.name].model_copy(update={"system": system})
    message = "the release of {} is pending"
    pending = tuple(
        Finding(
            release.host.name,
            "warning",
            "pending-release",
            message.format(release.address),
            release.why,
            release.fix,
        )
        for release in pending_releases(workspace)
        if not hosts or release.host.name in hosts
    )
    return replace(report, facts=facts).and_also(pending)


def drift_findings(
    inventory: Inventory, workspace: Workspace, report: DoctorReport
) -> Iterator[Finding]:
    """Yield how each examined host differs from what `clusterctl up` wants there."""
    controller = inventory.controller.name
    wanted = wanted_of(inventory, report.reports)
    if worker := workspace.lock_holder():
        what = "the hosts were not compared with what `clusterctl up` wants there"
        yield Finding(controller, "warning", "not-looked-at", what, str(worker), "run it again")
        return
    if controller in report.reports and not wanted.cluster.inputs:
        fix = "run `clusterctl up`, which continues"
        why = "so it is not known how it left the hosts"
        yield Finding(controller, "error", UNFINISHED.code, str(UNFINISHED), why, fix)
        return
    if wanted.cluster.inputs not in {"", workspace.configured_inputs()}:
        what = "another `clusterctl up` than this folder's last has configured the hosts"
        fix = (
            "`clusterctl plan` shows what this folder's spec would change; ask for the other's spec"
        )
        yield Finding(controller, "warning", "another-up", what, f"by {wanted.cluster.by}", fix)
    for host, answer in report.reports.items():
        if host not in wanted.marks:
            fix = "run `clusterctl up`, which configures it"
            yield Finding(
                host, "error", "not-configured", "the host is not configured yet", "it is new", fix
            )
        elif changes := [
            drift.what for drift in drift_of_host(host, wanted.marks[host], answer.checksums)
        ]:
            what = "the host is not as `clusterctl up` wants it"
            fix = "`clusterctl up` restores it, or tells what stands in the way"
            yield Finding(host, "error", "drifted", what, "; ".join(changes), fix)


def credential_findings(
    inventory: Inventory, to: Connect, report: DoctorReport
) -> tuple[Finding, ...]:
    """Return the examined hosts whose munge credentials the controller can't decode, so that Slurm's
    daemons refuse each other: another key, or a clock that is minutes off.

    A host whose credential could not be tested has a warning.

    report: the findings so far. A node with an error there gets no further finding.
    """
    controller = inventory.controller.name
    if not inventory.scheduler_needs.has_daemons or controller not in report.facts:
        return ()
    credentials = {host: facts.credential for host, facts in report.facts.items()}
    untested = {
        host: text or "munge does not answer"
        for host, text in credentials.items()
        if not text.startswith("MUNGE:")
    }
    # A controller that makes none decodes no other's, either.
    made = {h: c for h, c in credentials.items() if not {h, controller} & untested.keys()}
    lines: list[str] = []
    with suppress(TransportError):
        decode = ("sh", "-c", _DECODE, "sh", *made.values())
        lines = to(controller).run(decode, check=False).stdout.splitlines()
    if len(lines) != len(made):
        untested |= dict.fromkeys(made, f"{controller} did not decode the credentials")
        lines = []
    refused = {host: said for host, said in zip(made, lines, strict=False) if _OK not in said}
    faulty = {finding.host for finding in report.errors}
    fix = "run it again; `clusterctl up` restores munge"
    return tuple(
        _refused_credential(host, said, controller)
        for host, said in refused.items()
        if host not in faulty
    ) + tuple(
        Finding(host, "warning", "not-looked-at", "munge was not tested", why, fix)
        for host, why in untested.items()
        if host not in faulty
    )


def _refused_credential(host: str, said: str, controller: str) -> Finding:
    return Finding(
        host,
        "error",
        "munge-refused",
        "Slurm's daemons refuse each other",
        f"on {controller}, munge says of a credential of this host: {said}",
        "correct the host's clock with `chronyc makestep`"
        if _OTHER_TIME.search(said)
        else "run `clusterctl up`, which restores the cluster's munge key",
    )


def slurm_findings(inventory: Inventory, to: Connect, report: DoctorReport) -> tuple[Finding, ...]:
    """Return what Slurm reports of the examined nodes: that it starts no jobs on a node, or shows a job
    as running that started before the node's last boot, as after a power cut of all hosts.

    report: the findings so far. A node with an error there gets no further finding.
    """
    controller = inventory.controller.name
    faulty = {finding.host for finding in report.errors}
    if not inventory.scheduler_needs.has_daemons or controller in faulty - report.facts.keys():
        return ()
    names = {host.name for host in inventory.compute} & report.facts.keys()
    try:
        scheduler = scheduler_of(inventory, to, patience_s=SHORT_PATIENCE_S)
        nodes = [node for node in scheduler.nodes() if node.name in names - faulty]
        lost = _nodes_with_lost_jobs(names, scheduler, to)
    except (SlurmError, CommandError, TransportError) as exc:
        is_explained = controller in faulty
        silent = Finding(
            controller, "error", exc.about or exc.code, exc.what, exc.why, exc.fix, exc.code
        )
        return () if is_explained else (silent,)
    return (*_lost_jobs(lost), *_idle_for_a_reason(nodes))


def _lost_jobs(lost: Mapping[str, str]) -> Iterator[Finding]:
    """lost: node -> words that name its jobs."""
    what = "Slurm shows a job that has ended as running"
    fix = "run `clusterctl up`, which has Slurm requeue the job"
    for host, why in lost.items():
        yield Finding(host, "error", "job-lost", what, why, fix)


def _idle_for_a_reason(nodes: Sequence[NodeInfo]) -> Iterator[Finding]:
    """Yield an error for each node that Slurm does not use, and a warning for each that a person has
    drained.
    """
    what = "Slurm starts no jobs on the node"
    for host, why in find_unusable_nodes(nodes):
        fix = "run `clusterctl up`, which returns the node to service or tells what keeps it out"
        yield Finding(host, "error", "node-out", what, why, fix)
    for node in group_by_availability(nodes)[Availability.DRAINED]:
        if not is_reserved(node):
            fix = f"`clusterctl node resume {node.name}`, once the node may be used again"
            yield Finding(node.name, "warning", "node-drained", what, drain_reason(node), fix)


def trial_findings(
    inventory: Inventory,
    to: Connect,
    report: DoctorReport,
    prove: Callable[[Sequence[str]], None],
) -> tuple[Finding, ...]:
    """Run the trial of `up` on the examined nodes that are idle, and return what fails. A node on which
    nothing was tried has a warning.

    report: the findings so far. A node with an error there is not tried. prove: see ``run_trial``.
    """
    faulty = {finding.host for finding in report.errors}
    if inventory.controller.name in faulty:
        return ()
    asked = [h.name for h in inventory.compute if h.name in report.facts.keys() - faulty]
    scheduler = scheduler_of(inventory, to, patience_s=SHORT_PATIENCE_S)
    try:
        idle = _idle_nodes(scheduler, asked)
        result = run_trial(scheduler, idle, prove) if idle else None
        if result is not None and _lost_its_place(result):
            result, idle = None, ()
        error = (
            verification_error(result, idle, scheduler)
            if result is not None and not has_passed(result, idle)
            else None
        )
    except VerifyError as exc:
        error = exc
    except (SlurmError, CommandError, TransportError) as exc:
        return tuple(_untried(asked, exc.cause))
    drained = {finding.host for finding in report.findings if finding.code == "node-drained"}
    others = [host for host in asked if host not in {*idle, *drained}]
    untried = tuple(_untried(others, "it is not idle"))
    if idle:
        record_trial(scheduler.transport, idle, _causes(error) if error else {})
    return (*_failed_trial(error, idle), *untried) if error else untried


def _idle_nodes(scheduler: Nodes, names: Sequence[str]) -> tuple[str, ...]:
    if not scheduler.drains_nodes:
        at_work = {node for job in scheduler.own_jobs() if not job.ended for node in job.nodes}
        return tuple(name for name in names if name not in at_work)
    nodes = (node for node in scheduler.nodes() if node.name in names)
    return tuple(node.name for node in group_by_availability(nodes)[Availability.READY])


def _failed_trial(error: VerifyError, hosts: Sequence[str]) -> Iterator[Finding]:
    what = "a job that does what jobs need fails on the node"
    for failure in error.failures or [Failure(error.code, error.cause, host) for host in hosts]:
        host = failure.host or hosts[0]
        fix = failure.fix or error.fix
        yield Finding(host, "error", "trial-failed", what, failure.cause, fix, failure.code)


def _untried(hosts: Sequence[str], why: str) -> Iterator[Finding]:
    what = "no job was tried on the node"
    for host in hosts:
        yield Finding(host, "warning", "not-looked-at", what, why, "run it again once it is idle")


def _find_unreached(
    spec: ClusterSpec, inventory: Inventory, hosts: Collection[str], to: Connect
) -> tuple[Finding, ...]:
    """Return a finding for each host that other hosts can't reach, and for each host that can't reach
    the file server.
    """
    near = [host.name for host in inventory.hosts if host.name in hosts]
    targets = targets_of(spec, inventory, near)
    return tuple(examine_pairs(targets, near, lambda host, argv: to(host).run(argv).stdout))


def _reject_unreached(
    spec: ClusterSpec, inventory: Inventory, hosts: Collection[str], to: Connect
) -> None:
    """Raise a VerifyError that names the hosts that can't connect. Slurm itself would only say that
    nodes do not respond.
    """
    findings = _find_unreached(spec, inventory, hosts, to)
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise VerifyError.of_hosts(
            "connections that the cluster needs fail: {hosts}",
            findings_as_failures(errors, phase="verify"),
            code="host-unfit",
            about="network",
            then="then run `clusterctl up` again",
        )


def find_obstacles(spec: ClusterSpec, workspace: Workspace, provider: Provider) -> DoctorReport:
    """Report all that would stop `up`, here and at the provider. Nothing is changed."""
    report = provider.preflight(spec, workspace) or DoctorReport((), {})
    try:
        provider.check(spec)
    except (MachineError, UsageError) as exc:
        # Some providers check the same condition in both calls.
        if all(finding.what != exc.what for finding in report.findings):
            refusal = Finding(
                "this machine",
                "error",
                exc.about or exc.code,
                exc.what,
                exc.why or exc.where,
                exc.fix,
                exc.code,
            )
            return replace(report, findings=(refusal, *report.findings))
    return report


def driver_findings(
    spec: ClusterSpec, inventory: Inventory, connections: Connections
) -> tuple[Finding, ...]:
    """Return the findings about NVIDIA's driver on nodes with GPUs, such as a needed reboot."""
    if not spec.software.nvidia.has_driver and not any(
        partition.gpus for partition in spec.partitions
    ):
        return ()
    report = _examine(spec, inventory, connections, [host.name for host in inventory.compute], {})
    return tuple(finding for finding in report.findings if finding.code in _OF_DRIVER)


def doctor_request(facts: ProbeRequest, marks: ProbeRequest) -> ProbeRequest:
    """Return a request for the facts of a host, and for the checksums that doctor compares.

    People may add accounts, which Slurm's accounting and /etc/passwd have: no fault of a host.
    """
    return replace(
        marks,
        host=facts.host,
        hardware="none",
        accounting=(),
        units=dict.fromkeys(marks.units, ()),
    )


def _examine(
    spec: ClusterSpec,
    inventory: Inventory,
    connections: Connections,
    hosts: Collection[str],
    marks: Mapping[str, ProbeRequest],
) -> DoctorReport:
    """Probe each host once, and check its facts. marks: host -> the request for its checksums."""
    reject_unknown(hosts, [host.name for host in inventory.hosts], "the cluster has no host")

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return (
            connections.to(host)
            .run(("sudo", "-n", *argv), stdin=stdin, timeout_s=_TIMEOUT_S)
            .stdout
        )

    every = requirements_of_hosts(spec, inventory.hosts, installed=inventory.names)
    facts = host_facts_request(spec, inventory.hosts)
    requests = {
        host: doctor_request(facts, marks[host]) if host in marks else facts
        for host in (hosts or every)
    }
    return checks.examine(requests, every, root, leader=inventory.controller.name)
