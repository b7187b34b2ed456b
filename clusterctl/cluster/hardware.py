"""Changes of the hosts' hardware since they were configured: GPUs, CPUs, memory.

Slurm cancels the jobs of a node if its number of GPUs or CPUs changes. So a node with jobs keeps
its configuration until they have ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha1
from pathlib import Path
from typing import Final

from ClusterShell.NodeSet import NodeSet

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.nodes import REASON, drain_usable
from clusterctl.errors import Failure, SchedulerError, TransportError, VerifyError
from clusterctl.hosts.checks import Finding, cgroup_finding
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import HostReport, NodeFacts
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.scheduler.base import Nodes
from clusterctl.scheduler.slurm.conf import format_gres, needs_facts
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.util import formatting
from clusterctl.util.assets import gpu_lock
from clusterctl.util.process import parallel_map, temporary_folder

# Relative difference of memory that is no change. The kernel reports some MiB more or less after
# each boot.
_SAME_MEMORY: Final = 0.01
# Codes of findings about GPUs that are visible but not usable.
NOT_LINKED: Final = "fabric-manager"
# Succeeds if a host has the wheels already, by their mark file, or reaches the package index.
_CAN_FETCH: Final = """\
[ -e "$1" ] && exit
ask() { curl -sS -o /dev/null --max-time 15 "$@"; }
ask -f https://pypi.org/simple/cuda-pathfinder/ && ask https://files.pythonhosted.org/
"""

Reports = Mapping[str, HostReport]
NodesAtWork = Callable[[Collection[str]], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class NodeHardware:
    """The hardware that a node is configured for.

    facts: CPUs and memory, unless the inventory sets the node's size. driver: GPUs that the driver
        shows.
    cards: number of GPUs on the PCI bus; 0 if clusterctl installs no software for GPUs.
    """

    facts: NodeFacts | None = None
    driver: Driver = field(default_factory=Driver)
    cards: int = 0


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The hardware to configure the nodes for, and its changes.

    reports: host -> its probe result, but with the old hardware if the change of hardware is
        postponed.
    changes: host -> the change of its hardware, in words. waiting: host -> why its change is
        postponed.
    recorded: host -> the hardware that the last `up` configured the host for.
    """

    reports: Reports
    changes: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, NodeHardware] = field(default_factory=dict)

    @property
    def unchanged(self) -> Reports:
        """The probe results, but with the recorded hardware for each host that changed hardware."""
        return as_recorded(self.reports, self.recorded, self.changes)

    @property
    def applied(self) -> dict[str, str]:
        return {host: words for host, words in self.changes.items() if host not in self.waiting}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"{host}: {self.changes[host]}: {reason}" for host, reason in self.waiting.items()
        )


def hardware(spec: ClusterSpec, inventory: Inventory, reports: Reports) -> dict[str, NodeHardware]:
    """Return node -> its hardware as probed, for all nodes in ``reports`` (host -> its answer)."""
    counts_cards = spec.software.nvidia.installs
    return {
        host.name: NodeHardware(
            replace(report.facts, mpi=(), cgroups=True)
            if report.facts and needs_facts(inventory, host)
            else None,
            replace(report.driver, fault=""),
            report.cards if counts_cards else 0,
        )
        for host in inventory.compute
        if (report := reports.get(host.name))
    }


def cgroup_notes(inventory: Inventory, reports: Reports) -> tuple[str, ...]:
    """Return a note that names the nodes without Slurm's cgroup plugin. Empty: all have it."""
    names = (host.name for host in inventory.compute if needs_facts(inventory, host))
    lacking = _without_plugin(reports).intersection(names)
    return (str(cgroup_finding(str(NodeSet.fromlist(sorted(lacking))))),) if lacking else ()


def without_missing_cgroups(inventory: Inventory, reports: Reports) -> Inventory:
    """Return the inventory with control groups off on nodes without Slurm's cgroup plugin."""
    lacking = _without_plugin(reports)
    hosts = (
        replace(host, cgroups=False) if host.name in lacking else host for host in inventory.hosts
    )
    return replace(inventory, hosts=tuple(hosts))


def _without_plugin(reports: Reports) -> set[str]:
    return {host for host, report in reports.items() if report.facts and not report.facts.cgroups}


def node_config(
    spec: ClusterSpec,
    inventory: Inventory,
    reports: Reports,
    recorded: Mapping[str, NodeHardware],
    nodes_at_work: NodesAtWork,
    *,
    concerned: Collection[str],
) -> NodeConfig:
    """Decide which hardware to configure the nodes for.

    nodes_at_work: called with nodes that would lose jobs. Returns node -> why the change must wait.
    recorded: node -> the hardware that the last `up` configured the node for.
    concerned: the nodes to configure. Nodes that are not listed keep the recorded hardware.
    """
    reports = with_recorded_memory(reports, recorded)
    current = hardware(spec, inventory, reports)
    changes = {
        host: _describe_change(recorded[host], new)
        for host, new in current.items()
        if host in recorded and new != recorded[host]
    }
    if not changes:
        return NodeConfig(reports)
    # If the GPUs are on the PCI bus and only the driver fails, the node keeps its GPUs until it
    # answers.
    silent = [
        host
        for host in changes
        if reports[host].driver.fault and reports[host].cards and recorded[host].driver.cards
    ]
    changes |= dict.fromkeys(silent, "its driver does not answer")
    waiting = {
        host: f"stays unchanged; nvidia-smi says: {reports[host].driver.fault}" for host in silent
    }
    left_out = [host for host in changes if host not in concerned]
    waiting |= dict.fromkeys(left_out, "stays unchanged")
    ending = {
        host
        for host in changes
        if host not in waiting and _ends_jobs(recorded[host], current[host])
    }
    if ending:
        waiting |= nodes_at_work(ending)
    return NodeConfig(as_recorded(reports, recorded, waiting), changes, waiting, recorded)


def with_recorded_memory(reports: Reports, recorded: Mapping[str, NodeHardware]) -> Reports:
    """Return host -> probe result, but with the recorded memory if the new value differs by 1 % at
    most.
    """
    result = dict(reports)
    for host, report in reports.items():
        before = recorded.get(host, NodeHardware()).facts
        facts = report.facts
        if (
            before
            and facts
            and abs(facts.memory_mib - before.memory_mib) <= _SAME_MEMORY * before.memory_mib
        ):
            result[host] = replace(report, facts=replace(facts, memory_mib=before.memory_mib))
    return result


def as_recorded(
    reports: Reports, recorded: Mapping[str, NodeHardware], hosts: Collection[str]
) -> Reports:
    """Return the probe results, with the recorded instead of the current hardware for ``hosts``."""
    result = dict(reports)
    for host in hosts:
        old = recorded[host]
        facts = reports[host].facts
        if old.facts:
            facts = replace(old.facts, mpi=facts.mpi, cgroups=facts.cgroups) if facts else old.facts
        elif facts:
            facts = replace(facts, gpus=old.driver.gpus)
        result[host] = replace(reports[host], facts=facts, driver=old.driver, cards=old.cards)
    return result


def _ends_jobs(old: NodeHardware, new: NodeHardware) -> bool:
    """Return whether the change from ``old`` makes Slurm cancel the node's jobs, or cuts memory."""
    if format_gres(old.driver.gpus) != format_gres(new.driver.gpus):
        return True
    if old.facts is None or new.facts is None:
        return False
    return _cores(old.facts) != _cores(new.facts) or new.facts.memory_mib < old.facts.memory_mib


def _describe_change(old: NodeHardware, new: NodeHardware) -> str:
    figures = [
        ("gres", format_gres(old.driver.gpus) or "none", format_gres(new.driver.gpus) or "none"),
        ("cards", old.cards or old.driver.cards, new.cards or new.driver.cards),
    ]
    if old.facts and new.facts:
        memory = (
            formatting.size(old.facts.memory_mib << 20),
            formatting.size(new.facts.memory_mib << 20),
        )
        figures += [("CPUs", old.facts.cpus, new.facts.cpus), ("memory", *memory)]
    changed = [
        f"{name}: {after} (was {before})" for name, before, after in figures if before != after
    ]
    return "; ".join(changed) or "the topology of its CPUs or GPUs has changed"


def _cores(facts: NodeFacts) -> tuple[int, ...]:
    return (facts.cpus, facts.boards, facts.sockets, facts.cores_per_socket, facts.threads_per_core)


def gpus_file(spec: ClusterSpec, inventory: Inventory, reports: Reports) -> str:
    """Return JSON: node -> cupy: whether to install it; uuids: GPUs in Slurm's order, if CUDA's
    differs.
    """
    cupy = spec.software.cupy
    drivers = {
        host.name: reports[host.name].driver for host in inventory.compute if host.name in reports
    }
    nodes = {
        name: {"cupy": cupy and gpus.cards > 0, "uuids": gpus.uuids}
        for name, gpus in drivers.items()
    }
    return json.dumps(nodes, indent=1, sort_keys=True) + "\n"


def fetch_gpu_wheels(cluster: ClusterContext, inventory: Inventory, reports: Reports) -> None:
    """Download CuPy here for hosts with GPUs that can't download it.

    Raises:
        MachineError: CuPy can't be downloaded.
        TransportError: a cloud host does not answer whether it reaches the package index.
    """
    spec = cluster.spec
    workspace = cluster.workspace
    hosts = [
        host.name
        for host in inventory.compute
        if host.name in reports and reports[host.name].driver.cards
    ]
    if not hosts or not spec.software.cupy:
        return
    if spec.provider.is_cloud:
        # Cloud hosts may reach the package index through NAT.
        argv = ["sh", "-c", _CAN_FETCH, "sh", f"{inventory.root}/env/{mark_of_wheels(gpu_lock())}"]
        lacking = parallel_map(
            hosts, lambda h: cluster.connections.to(h).run(argv, check=False).rc != 0
        )
        if not (needy := [host for host, lacks in zip(hosts, lacking, strict=True) if lacks]):
            # Without this link, the role job_env lets the hosts download the wheels.
            workspace.gpu_wheels.unlink(missing_ok=True)
            return
        cluster.reporter.progress(
            "sending CuPy and CUDA's libraries by SSH, 2.1 GB per node, which is slow: "
            f"{', '.join(needy)} can't download them from pypi.org"
        )
    cluster.reporter.progress("downloading CuPy and CUDA's libraries")
    link_wheels(gpu_lock(), workspace.gpu_wheels, inventory.distribution)


def mark_of_wheels(lock: Path) -> str:
    """Return the name of the file that shows that an environment has all wheels of this lock."""
    return f"installed-{sha1(lock.read_bytes().rstrip(), usedforsecurity=False).hexdigest()}"


def link_wheels(lock: Path, link: Path, distribution: Distribution) -> None:
    """Download the wheels of a lock file, and make ``link`` a symbolic link to their folder."""
    wheels = wheelhouse(lock, NodePlatform.of(distribution))
    # The new link replaces the old link atomically.
    with temporary_folder(link.parent) as folder:
        new_link = folder / link.name
        new_link.symlink_to(wheels)
        new_link.replace(link)


def reject_missing_gpus(
    spec: ClusterSpec,
    inventory: Inventory,
    reports: Reports,
    concerned: Collection[str],
    *,
    needs: Sequence[Finding] = (),
) -> None:
    """Raise VerifyError with a failure for each node with unusable or missing GPUs.

    concerned: nodes to check. needs: findings about NVIDIA's driver, to show instead of
        nvidia-smi's text.
    """
    required = {partition.name: partition.gpus for partition in spec.partitions}
    failures = []
    for host in inventory.compute:
        gpus = required.get(host.partition or "")
        if gpus is None or host.name not in reports or host.name not in concerned:
            continue
        driver = reports[host.name].driver
        missing = driver.cards < gpus.count
        matching = (f for f in needs if f.host == host.name and (f.code == NOT_LINKED) != missing)
        need = next(matching, None)
        if not (missing or need):
            continue
        about = need.code if need and not missing else "gpus"
        reason = (
            f"nvidia-smi says: {driver.fault}"
            if driver.fault
            else f"nvidia-smi shows {driver.cards}"
        )
        fix = (
            "check NVIDIA's driver on the host (`clusterctl ssh HOST -- nvidia-smi`), or "
            "correct the spec"
        )
        if need:
            reason = need.why
            fix = need.fix
        cause = (
            f"in the spec, partition {host.partition} has {gpus.count} x {gpus.type}, but {reason}"
        )
        failures.append(Failure("host-unfit", cause, host.name, "verify", fix, about=about))
    if failures:
        state = "missing" if any(failure.about == "gpus" for failure in failures) else "not usable"
        message = f"GPUs are {state} on {{hosts}}"
        raise VerifyError.of_hosts(
            message,
            failures,
            code="host-unfit",
            about="hardware",
            then="the other nodes are in service",
        )


def nodes_with_jobs(scheduler: Nodes, hosts: Collection[str], *, drain: bool) -> dict[str, str]:
    """Return host -> why its new hardware can't be configured yet: it runs jobs, or Slurm did not
    answer.

    drain: drain the hosts without jobs, so that they start no job. The verification of `up` resumes
        them.
    """
    if not scheduler.drains_nodes:
        return {}
    try:
        snapshot = drain_usable(scheduler, hosts if drain else (), REASON)
    except (SchedulerError, TransportError) as exc:
        reason = (
            "the jobs on this node are unknown, because Slurm does not answer "
            f"({exc.why or exc.what})"
        )
        return dict.fromkeys(hosts, f"{reason}; run `clusterctl up` again when it answers")
    jobs = {host: [job.id for job in snapshot.jobs if host in job.nodes] for host in sorted(hosts)}
    if still_used := [host for host in snapshot.drained if jobs[host]]:
        # If this fails, the verification resumes the nodes.
        with suppress(TransportError):
            scheduler.resume(still_used)
    return {
        host: f"postponed; run `clusterctl up` again when job{'s' if len(ids) > 1 else ''} "
        f"{', '.join(ids)} {'have' if len(ids) > 1 else 'has'} ended"
        for host, ids in jobs.items()
        if ids
    }
