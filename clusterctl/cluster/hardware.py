"""What came or went of the hosts' hardware since they were configured: cards, CPUs, memory.

Slurm ends the jobs of a node whose GPUs or CPUs change in number. A node with jobs keeps its configuration
until they have ended; so does one that is not to be changed.
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
from clusterctl.errors import Failure, Notice, SchedulerError, TransportError, VerifyError
from clusterctl.hosts.checks import Finding, no_cgroups
from clusterctl.hosts.gpus import Driver
from clusterctl.hosts.probe import HostReport, NodeFacts
from clusterctl.packages.wheelhouse import NodePlatform, has_wheelhouse, wheelhouse
from clusterctl.scheduler.base import Jobs, Nodes
from clusterctl.scheduler.slurm_conf import gres, needs_facts
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import shown_memory
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.assets import gpu_lock
from clusterctl.util.process import parallel_map, temporary_folder

_SAME_MEMORY: Final = 0.01  # the kernel's figure moves by some MiB from boot to boot
# Findings of cards that show, and don't work.
NOT_LINKED: Final = frozenset({"fabric-manager", "fabric-not-ready"})
# Whether a host has the wheels, by their mark, or reaches the package index.
_DOES_WITHOUT: Final = """\
[ -e "$1" ] && exit
ask() { curl -sS -o /dev/null --max-time 15 "$@"; }
ask -f https://pypi.org/simple/cuda-pathfinder/ && ask https://files.pythonhosted.org/
"""

Reports = Mapping[str, HostReport]
NodesAtWork = Callable[[Collection[str]], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a node is configured for.

    ``facts`` is None where the inventory says its size. ``cards`` are those on the PCI bus, where something
    is installed for them.
    """

    facts: NodeFacts | None = None
    driver: Driver = field(default_factory=Driver)
    cards: int = 0


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The nodes as they are to be configured: ``reports`` are what they show, but for those that wait.

    ``changes`` says in words what came or went of a host since it was ``recorded``, ``waiting`` why a
    host must wait for it.
    """

    reports: Reports
    changes: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    recorded: Mapping[str, Hardware] = field(default_factory=dict)

    @property
    def unchanged(self) -> Reports:
        """The reports as if none of the hardware had changed."""
        return as_recorded(self.reports, self.recorded, self.changes)

    @property
    def taken_up(self) -> dict[str, str]:
        return {host: words for host, words in self.changes.items() if host not in self.waiting}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of those that wait."""
        return tuple(f"{host}: {self.changes[host]}: {why}" for host, why in self.waiting.items())


def hardware(spec: ClusterSpec, inventory: Inventory, reports: Reports) -> dict[str, Hardware]:
    """Node -> what it is configured for."""
    counted = spec.software.nvidia.installs
    return {
        host.name: Hardware(
            replace(seen.facts, mpi=(), cgroups=True)
            if seen.facts and needs_facts(inventory, host)
            else None,
            replace(seen.driver, fault=""),
            seen.cards if counted else 0,
        )
        for host in inventory.compute
        if (seen := reports.get(host.name))
    }


def without_cgroups(inventory: Inventory, reports: Reports) -> tuple[str, ...]:
    """What is to be said of nodes for which Slurm uses no control groups on any."""
    whole = (host.name for host in inventory.compute if needs_facts(inventory, host))
    lacking = _without_plugin(reports).intersection(whole)
    return (str(no_cgroups(str(NodeSet.fromlist(sorted(lacking))))),) if lacking else ()


def with_plugins(inventory: Inventory, reports: Reports) -> Inventory:
    """The inventory, without control groups on nodes whose Slurm lacks the plugin for them."""
    lacking = _without_plugin(reports)
    hosts = (
        host.model_copy(update={"cgroups": False}) if host.name in lacking else host
        for host in inventory.hosts
    )
    return inventory.model_copy(update={"hosts": tuple(hosts)})


def _without_plugin(reports: Reports) -> set[str]:
    return {host for host, seen in reports.items() if seen.facts and not seen.facts.cgroups}


def node_config(
    spec: ClusterSpec,
    inventory: Inventory,
    reports: Reports,
    recorded: Mapping[str, Hardware],
    nodes_at_work: NodesAtWork,
    *,
    concerned: Collection[str],
) -> NodeConfig:
    """Return how the nodes are to be configured.

    recorded: the hardware that they were configured for.
    nodes_at_work: called with the nodes whose jobs Slurm would end. Returns those that wait, and why.
    concerned: the nodes that are configured. Other nodes stay as recorded.
    """
    reports = without_jitter(reports, recorded)
    now = hardware(spec, inventory, reports)
    changes = {
        host: _words(recorded[host], has)
        for host, has in now.items()
        if host in recorded and has != recorded[host]
    }
    if not changes:
        return NodeConfig(reports)
    # Cards on the bus whose driver fails have not gone: the node keeps its GPUs until it answers again.
    mute = [
        host
        for host in changes
        if reports[host].driver.fault and reports[host].cards and recorded[host].driver.cards
    ]
    changes |= dict.fromkeys(mute, "its driver does not answer")
    waiting = {host: f"it stays as it was; nvidia-smi says: {reports[host].driver.fault}" for host in mute}
    beyond = [host for host in changes if host not in concerned]
    waiting |= dict.fromkeys(beyond, "it is left as it was")
    ending = {host for host in changes if host not in waiting and _ends_jobs(recorded[host], now[host])}
    if ending:
        waiting |= nodes_at_work(ending)
    return NodeConfig(as_recorded(reports, recorded, waiting), changes, waiting, recorded)


def without_jitter(reports: Reports, recorded: Mapping[str, Hardware]) -> Reports:
    """The reports, with memory as it was recorded where it is the same but for what the kernel takes."""
    found = dict(reports)
    for host, seen in reports.items():
        had, facts = recorded.get(host, Hardware()).facts, seen.facts
        if had and facts and abs(facts.memory_mib - had.memory_mib) <= _SAME_MEMORY * had.memory_mib:
            found[host] = replace(seen, facts=replace(facts, memory_mib=had.memory_mib))
    return found


def as_recorded(reports: Reports, recorded: Mapping[str, Hardware], hosts: Collection[str]) -> Reports:
    """The reports, with the hardware of these hosts as it was recorded."""
    found = dict(reports)
    for host in hosts:
        had, facts = recorded[host], reports[host].facts
        if had.facts:
            facts = replace(had.facts, mpi=facts.mpi, cgroups=facts.cgroups) if facts else had.facts
        elif facts:
            facts = replace(facts, gpus=had.driver.gpus)
        found[host] = replace(reports[host], facts=facts, driver=had.driver, cards=had.cards)
    return found


def _ends_jobs(had: Hardware, has: Hardware) -> bool:
    """Whether Slurm would end jobs there, or could not keep what they were given."""
    if gres(had.driver.gpus) != gres(has.driver.gpus):
        return True
    if had.facts is None or has.facts is None:
        return False
    return _cores(had.facts) != _cores(has.facts) or has.facts.memory_mib < had.facts.memory_mib


def _words(had: Hardware, has: Hardware) -> str:
    figures = [
        ("gres", gres(had.driver.gpus) or "none", gres(has.driver.gpus) or "none"),
        ("cards", had.cards or had.driver.cards, has.cards or has.driver.cards),
    ]
    if had.facts and has.facts:
        memory = shown_memory(had.facts.memory_mib), shown_memory(has.facts.memory_mib)
        figures += [("CPUs", had.facts.cpus, has.facts.cpus), ("memory", *memory)]
    changed = [f"{name}: {after} (was {before})" for name, before, after in figures if before != after]
    return "; ".join(changed) or "its CPUs or GPUs are connected otherwise"


def _cores(facts: NodeFacts) -> tuple[int, ...]:
    return (facts.cpus, facts.boards, facts.sockets, facts.cores_per_socket, facts.threads_per_core)


def gpus_file(spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Reports) -> str:
    """JSON: compute host -> whether it gets CuPy; the UUIDs of GPUs that Slurm and CUDA count differently."""
    cupy = spec.software.cupy and _can_bring(inventory, workspace)
    drivers = {host.name: reports[host.name].driver for host in inventory.compute if host.name in reports}
    of_each = {name: {"cupy": cupy and had.cards > 0, "uuids": had.uuids} for name, had in drivers.items()}
    return json.dumps(of_each, indent=1, sort_keys=True) + "\n"


def fetch_gpu_wheels(cluster: ClusterContext, inventory: Inventory, reports: Reports) -> tuple[str, ...]:
    """Have CuPy here for hosts that show GPUs, unless they fetch it. Return notes on hosts without it.

    Raises:
        MachineError: it can't be downloaded.
        TransportError: a rented host can't be asked whether it reaches the package index.
    """
    spec, workspace = cluster.spec, cluster.workspace
    hosts = [
        host.name for host in inventory.compute if host.name in reports and reports[host.name].driver.cards
    ]
    if not hosts or not spec.software.cupy:
        return ()
    if not _can_bring(inventory, workspace):
        why = "the bundle has no CuPy: say `gpus` in the partition, and make it anew"
        text = f"without CuPy, though they have GPUs: {', '.join(hosts)}; {why}"
        return (Notice("gpus-without-cupy", text),)
    if spec.provider.is_cloud and not workspace.bundle.exists():
        # Rented hosts reach it through NAT.
        argv = ["sh", "-c", _DOES_WITHOUT, "sh", f"{inventory.root}/env/{mark_of_wheels(gpu_lock())}"]
        needs = parallel_map(hosts, lambda host: cluster.connections.to(host).run(argv, check=False).rc != 0)
        if not (lacking := [host for host, needed in zip(hosts, needs, strict=True) if needed]):
            workspace.gpu_wheels.unlink(missing_ok=True)  # without it, the role job_env lets hosts fetch them
            return ()
        cluster.reporter.progress(
            "CuPy and CUDA's libraries, 2.1 GB a node, are sent by SSH, which is slow: "
            f"{', '.join(lacking)} can't fetch them from pypi.org"
        )
    cluster.reporter.progress("downloading CuPy and CUDA's libraries")
    link_wheels(gpu_lock(), workspace.gpu_wheels, inventory.distribution)
    return ()


def mark_of_wheels(lock: Path) -> str:
    """Return the file beside the environment of jobs that tells that the wheels of this lock are in it."""
    return f"installed-{sha1(lock.read_bytes().rstrip(), usedforsecurity=False).hexdigest()}"


def link_wheels(lock: Path, link: Path, distribution: Distribution) -> None:
    wheels = wheelhouse(lock, NodePlatform.of(distribution))
    with temporary_folder(link.parent) as folder:  # so that there is one at any time
        new = folder / link.name
        new.symlink_to(wheels)
        new.replace(link)


def _can_bring(inventory: Inventory, workspace: Workspace) -> bool:
    """A bundle may have none, and then no index can be reached."""
    return not workspace.bundle.exists() or has_wheelhouse(
        gpu_lock(), NodePlatform.of(inventory.distribution)
    )


def reject_missing_gpus(
    spec: ClusterSpec,
    inventory: Inventory,
    reports: Reports,
    concerned: Collection[str],
    *,
    needs: Sequence[Finding] = (),
) -> None:
    """The last word of `up`: nodes whose partition has GPUs must show them, and have them linked.

    ``needs``: what drivers are known to lack, such as a reboot; said in place of what nvidia-smi says.

    Raises:
        VerifyError: some don't; one failure a host. All else was done, and the others are at work.
    """
    wanted = {partition.name: partition.gpus for partition in spec.partitions}
    failures = []
    for host in inventory.compute:
        gpus = wanted.get(host.partition or "")
        if gpus is None or host.name not in reports or host.name not in concerned:
            continue
        driver = reports[host.name].driver
        missing = driver.cards < gpus.count
        found = (one for one in needs if one.host == host.name and (one.code in NOT_LINKED) != missing)
        need = next(found, None)
        if not (missing or need):
            continue
        code = need.code if need and not missing else "gpus-missing"
        why = f"nvidia-smi says: {driver.fault}" if driver.fault else f"nvidia-smi shows {driver.cards}"
        fix = "see that NVIDIA's driver runs there (`clusterctl ssh HOST -- nvidia-smi`), or correct the spec"
        if need:
            why, fix = need.why, need.fix
        cause = f"partition {host.partition} has gpus: {gpus.count} x {gpus.type}, and {why}"
        failures.append(Failure(code, cause, host.name, "verify", fix))
    if failures:
        missing = any(one.code == "gpus-missing" for one in failures)
        what = f"GPUs {'are missing' if missing else 'can not be used'} on {{hosts}}"
        raise VerifyError.of_hosts(
            what, failures, code="nodes-changed-hardware", then="the other nodes are at work"
        )


def nodes_with_jobs(scheduler: Jobs, hosts: Collection[str], *, drain: bool) -> dict[str, str]:
    """Return the hosts on which jobs are at work that a change would end, or may be, with the reason to wait.

    drain: drain the other hosts, until `up` resumes them to verify them.
    """
    if not isinstance(scheduler, Nodes):
        return {}
    try:
        found = drain_usable(scheduler, hosts if drain else (), REASON)
    except (SchedulerError, TransportError) as exc:
        why = f"Slurm does not say which jobs are at work there ({exc.why or exc.what})"
        return dict.fromkeys(hosts, f"{why}; run `clusterctl up` again once it does")
    jobs = {host: [job.id for job in found.jobs if host in job.nodes] for host in sorted(hosts)}
    if back := [host for host in found.drained if jobs[host]]:
        with suppress(TransportError):  # verifying them will do it
            scheduler.resume(back)
    then = "at work there, which Slurm would end; run `clusterctl up` again afterwards"
    return {
        host: f"job{'s' * (len(ids) > 1)} {', '.join(ids)} {'are' if len(ids) > 1 else 'is'} {then}"
        for host, ids in jobs.items()
        if ids
    }
