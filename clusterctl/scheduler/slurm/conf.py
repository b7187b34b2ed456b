"""Slurm's configuration files, made from the cluster's spec, its hosts, and the hosts' hardware."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from clusterctl.errors import SlurmError
from clusterctl.hosts.gpus import Driver, Gpu, by_type, faults, flags
from clusterctl.hosts.probe import NodeFacts
from clusterctl.hosts.roles import node_needs
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import (
    MAX_ARRAY_SIZE,
    MAX_JOB_COUNT,
    PROOF_ACCOUNT,
    PROOF_MEMORY_MIB,
    PROOF_PARTITION,
    SLURMCTLD_PORT,
    SLURMD_PORT,
    SLURMDBD_PORT,
)
from clusterctl.spec.slurm_lines import SlurmLine
from clusterctl.state.inventory import HEALTH_PROGRAM, SRUN_PORTS, Host, Inventory
from clusterctl.util.assets import digest, render

TASK_PROLOG = "/opt/clusterctl/task-prolog"
PROLOG = "/opt/clusterctl/prolog"
FENCE = "/opt/clusterctl/fence"

# The memory that the kernel reports varies by some MiB between boots, and Slurm drains a node with
# less memory than configured.
_MEMORY_PROMISED = 0.98
# The first release with `CgroupPlugin=disabled`.
_DISABLES_CGROUPS = "24.11"
# From 23.11, `scontrol reconfigure` makes the daemons re-execute themselves: scontrol(1). Before
# 23.11.8 that could lose credentials and crash slurmctld (Slurm's CHANGELOG/slurm-23.11.md), and
# Ubuntu 24.04 has 23.11.4.
_RECONFIGURES = "24.05"
_TREE_WIDTH = 128  # nodes
_PROOF_PRIORITY_TIER = 1000
_PROOF_MAX_MINUTES = 10

Settings = dict[str, str]


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node in slurm.conf. topology: boards, sockets, cores, threads; () if it is a part of a
    machine.
    """

    host: Host
    cpus: int
    memory_mib: int
    topology: tuple[tuple[str, int], ...]
    gpus: tuple[Gpu, ...]


def render_files(
    spec: ClusterSpec, inventory: Inventory, facts: Mapping[str, NodeFacts]
) -> dict[str, str]:
    """Return Slurm's configuration files: file name -> text. Empty for a cluster without Slurm.

    facts: hardware by host name, for hosts without cpus and memory in the inventory. SlurmError is
        raised if the facts of such a host are missing.
    """
    if not inventory.scheduler_needs.has_daemons:
        return {}
    nodes = tuple(_node(host, facts) for host in inventory.compute)
    limits_shares = has_limited_shares(inventory)
    uses_cgroups = limits_shares or (inventory.cgroups and all(node.topology for node in nodes))
    knows_disabled = _release(inventory) >= _DISABLES_CGROUPS
    gpus = [_line(settings) for node in nodes for settings in _gres_settings(node)]
    switches = [
        f"SwitchName={name} "
        + (f"Nodes={switch.hosts}" if switch.hosts else f"Switches={switch.switches}")
        for name, switch in spec.provider.switches.items()
    ]
    return {
        "slurm.conf": _with_settings(_slurm_conf(spec, inventory, nodes), spec.slurm.lines),
        "gres.conf": render("gres.conf.j2", lines=gpus),
        "cgroup.conf": render(
            "cgroup.conf.j2",
            constrains_devices=inventory.constrains_devices,
            limits_shares=limits_shares,
            disabled=knows_disabled and not uses_cgroups,
        ),
        # Slurm ignores the file if there are no switches.
        "topology.conf": render("topology.conf.j2", lines=switches),
        "slurmdbd.conf": render(
            "slurmdbd.conf.j2", host=inventory.controller.own_name, port=SLURMDBD_PORT
        ),
    }


def accounting_files(cluster: str, port: int) -> dict[str, str]:
    """Return Slurm's files for a host that runs only slurmdbd for a cluster: file name -> text."""
    settings = {"ClusterName": cluster, "SlurmctldHost": "localhost", "SlurmUser": "slurm"}
    accounting = {"Type": "accounting_storage/slurmdbd", "Host": "localhost", "Port": str(port)}
    lines = settings | {f"AccountingStorage{key}": value for key, value in accounting.items()}
    return {
        **dict.fromkeys(("gres.conf", "cgroup.conf", "topology.conf"), ""),
        "slurm.conf": _line(lines, "\n") + "\n",
        "slurmdbd.conf": render("slurmdbd.conf.j2", host="localhost", port=port),
    }


def takes_nodes_by_reconfigure(inventory: Inventory) -> bool:
    """Return whether Slurm learns about new nodes by `scontrol reconfigure`, without restarts of
    daemons.
    """
    return _release(inventory) >= _RECONFIGURES


def has_limited_shares(inventory: Inventory) -> bool:
    """Return whether several nodes share a machine, and the kernel limits the memory of their
    jobs.
    """
    shares = any(host.cpus is not None for host in inventory.compute)
    return shares and inventory.cgroups and _release(inventory) >= _DISABLES_CGROUPS


def needs_facts(inventory: Inventory, host: Host) -> bool:
    """Return whether a node's line in slurm.conf needs the output of `slurmd -C` from that node."""
    return inventory.scheduler_needs.has_daemons and host.cpus is None


def fault_timeouts(nodes: int) -> Settings:
    """Return settings that decide how soon a fault is noticed and a requeued job restarts.

    Slurm's defaults are for thousands of nodes: a lost node is noticed after five minutes, and a
    requeued job waits until credentials expire (120 s). These settings are shorter, and grow with
    the number of nodes. But they allow a busy node half a minute without an answer, because a node
    marked DOWN loses its jobs. The watcher on the controller finds lost nodes of jobs with
    --requeue sooner.
    """
    extra_s = nodes // 8
    return {
        "SlurmdTimeout": str(min(60 + extra_s, 300)),
        "SlurmctldTimeout": str(min(60 + extra_s, 120)),
        "MessageTimeout": str(min(15 + extra_s, 60)),
        "BatchStartTimeout": "60",  # includes the prologue
        # A launch must not take longer, even on busy nodes.
        "AuthInfo": f"cred_expire={min(30 + extra_s, 120)}",
        # Slurm's default, for programs that save their work on SIGTERM.
        "KillWait": "30",
        # The last parameter: a job that a node could not start runs elsewhere, and is not held.
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=5,bf_interval=5,nohold_on_prolog_fail",
        "TreeWidth": str(max(2, min(nodes, _TREE_WIDTH))),
    }


def format_gres(gpus: Iterable[Gpu]) -> str:
    """Return a node's GPUs in the format of slurm.conf: ``gpu:a100:1,gpu:t4:2``."""
    groups = groupby(by_type(gpus), key=lambda gpu: gpu.type)
    return ",".join(f"gpu:{kind}:{len([*group])}" for kind, group in groups)


def _release(inventory: Inventory) -> str:
    return inventory.distribution.slurm or ""


def _node(host: Host, facts: Mapping[str, NodeFacts]) -> SlurmNode:
    if host.cpus is not None and host.memory_mib is not None:
        gpus = facts[host.name].gpus if host.name in facts else ()
        return SlurmNode(host, host.cpus, host.memory_mib, (), gpus)
    if host.name not in facts:
        raise SlurmError(
            "slurm.conf can't be written, because the hardware of the host is unknown",
            code="not-ready",
            about="host-facts",
            host=host.name,
        )
    host_facts = facts[host.name]
    topology = (
        ("Boards", host_facts.boards),
        ("SocketsPerBoard", host_facts.sockets),
        ("CoresPerSocket", host_facts.cores_per_socket),
        ("ThreadsPerCore", host_facts.threads_per_core),
    )
    memory_mib = int(host_facts.memory_mib * _MEMORY_PROMISED)
    return SlurmNode(host, host_facts.cpus, memory_mib, topology, host_facts.gpus)


def _slurm_conf(spec: ClusterSpec, inventory: Inventory, nodes: tuple[SlurmNode, ...]) -> str:
    has_shares = any(not node.topology for node in nodes)
    cgroups = has_limited_shares(inventory) if has_shares else inventory.cgroups
    counted_otherwise = any(
        Driver(len({gpu.index for gpu in node.gpus}), node.gpus).uuids for node in nodes
    )
    return render(
        "slurm.conf.j2",
        cluster=spec.name,
        controller=inventory.controller,
        slurmctld_port=SLURMCTLD_PORT,
        slurmd_port=SLURMD_PORT,
        slurmdbd_port=SLURMDBD_PORT,
        srun_ports=SRUN_PORTS,
        switches=spec.provider.switches,
        tasks=_line(_tasks(has_shares=has_shares, cgroups=cgroups), "\n"),
        # Sets the host's variables and CUDA_VISIBLE_DEVICES.
        task_prolog=TASK_PROLOG if inventory.has_task_prolog or counted_otherwise else None,
        max_array=MAX_ARRAY_SIZE,
        max_jobs=MAX_JOB_COUNT,
        timeouts=_line(fault_timeouts(len(nodes)), "\n"),
        health=HEALTH_PROGRAM,
        health_interval=spec.monitoring.health.interval,
        # If cgroups enforce the memory limit, Slurm rejects OverMemoryKill.
        gather="UsePss" if cgroups else "OverMemoryKill,UsePss",
        gpus=any(node.gpus for node in nodes),
        nodes="\n".join(_line(_node_settings(node)) for node in nodes),
        node_sets="\n".join(
            _line({line.key: line.value, **dict(line.settings)})
            for line in spec.slurm.lines
            if line.defines == "nodeset"
        ),
        partitions="\n".join(_line(settings) for settings in _partitions(spec, nodes)),
    )


def _with_settings(text: str, lines: tuple[SlurmLine, ...]) -> str:
    """Append the user's settings, and remove generated lines of ``text`` that set the same keys."""
    settings = [line for line in lines if not line.defines]
    if not settings:
        return text
    user_keys = {line.key.lower() for line in settings}
    ours = (line for line in text.splitlines() if line.partition("=")[0].lower() not in user_keys)
    theirs = (f"{line.key}={line.value}" for line in settings)
    return "\n".join([*ours, "", "# slurm.extra of the spec", *theirs, ""])


def _tasks(*, has_shares: bool, cgroups: bool) -> Settings:
    if has_shares:
        # The machine binds its parts to cores, and Slurm must not change that. Where the kernel
        # can't limit a job's memory, Slurm counts it itself.
        parameters = {"SlurmdParameters": "config_overrides"}
        tracks = "linuxproc"
        binds = "task/cgroup" if cgroups else "task/none"
    elif cgroups:
        parameters = {}
        tracks = "cgroup"
        binds = "task/cgroup,task/affinity"
    else:
        parameters = {}
        tracks = "linuxproc"
        binds = "task/affinity"
    # It kills daemons, which linuxproc does not find because their parent is process 1, and removes
    # the files that a job leaves in memory.
    # The prolog returns a job to the queue if its node lacks what jobs need.
    around = {"Prolog": PROLOG, "Epilog": FENCE}
    return {**parameters, "ProctrackType": f"proctrack/{tracks}", "TaskPlugin": binds, **around}


def _node_settings(node: SlurmNode) -> Settings:
    settings = {"NodeName": node.host.name, "NodeAddr": node.host.address}
    if node.host.hostname:
        settings["NodeHostname"] = node.host.hostname
    settings |= {"CPUs": str(node.cpus)}
    settings |= {key: str(value) for key, value in node.topology}
    settings["RealMemory"] = str(node.memory_mib)
    if node.gpus:
        settings["Gres"] = format_gres(node.gpus)
    settings |= {"Feature": str(node.host.partition), "State": "UNKNOWN"}
    return settings


def _partitions(spec: ClusterSpec, nodes: tuple[SlurmNode, ...]) -> Iterable[Settings]:
    lines = {line.value: line for line in spec.slurm.lines if line.defines == "partitionname"}
    for i, partition in enumerate(spec.partitions):
        members = [node for node in nodes if node.host.partition == partition.name]
        if not members:  # `plan` on a cluster that still lacks the partition's machines
            continue
        # Slurm's unit, rounded up so that no job gets less time.
        minutes = math.ceil(partition.max_time / 60) if partition.max_time else None
        settings = {
            "PartitionName": partition.name,
            "Nodes": ",".join(node.host.name for node in members),
            "Default": "YES" if i == 0 else "NO",
            "MaxTime": str(minutes) if minutes else "UNLIMITED",
            "DefMemPerCPU": _memory_of_a_cpu(members),
            "State": "UP",
        }
        yield _amended(settings, lines.get(partition.name))
    for line, names in spec.more_partitions.items():
        if members := [node for node in nodes if node.host.name in names]:
            ours = {"PartitionName": line.value, "DefMemPerCPU": _memory_of_a_cpu(members)}
            yield _amended(ours, line)
    yield {
        "PartitionName": PROOF_PARTITION,
        "Nodes": "ALL",
        "Hidden": "YES",
        "AllowAccounts": PROOF_ACCOUNT,
        "PriorityTier": str(_PROOF_PRIORITY_TIER),
        "MaxTime": str(_PROOF_MAX_MINUTES),
        # The account has a user, whose jobs must not overtake others here.
        "MaxMemPerNode": str(PROOF_MEMORY_MIB),
        "State": "UP",
    }


def _memory_of_a_cpu(nodes: Sequence[SlurmNode]) -> str:
    """Return DefMemPerCPU in MiB. Without it, a job that does not ask for memory gets all of its
    nodes'.
    """
    return str(min(node.memory_mib // node.cpus for node in nodes))


def _amended(settings: Settings, line: SlurmLine | None) -> Settings:
    """Return the settings of a partition with those of the user's line in their place."""
    if line is None:
        return settings
    keys = {key.lower() for key, _ in line.settings}
    if "defmempernode" in keys:
        # Slurm accepts only one of the two.
        keys.add("defmempercpu")
    ours = {key: value for key, value in settings.items() if key.lower() not in keys}
    return {**ours, **dict(line.settings)}


def _gres_settings(node: SlurmNode) -> Iterable[Settings]:
    # Files are listed, because not every distribution's Slurm can query the driver.
    for gpu in node.gpus:
        files = {"MultipleFiles" if gpu.caps else "File": ",".join(gpu.files)}
        near = {"Cores": gpu.cores} if gpu.cores and node.topology else {}
        links = {"Links": gpu.links} if gpu.links else {}
        yield {
            "NodeName": node.host.name,
            "Name": "gpu",
            "Type": gpu.type,
            **files,
            **near,
            **links,
        }


def _line(settings: Settings, separator: str = " ") -> str:
    return separator.join(f"{key}={value}" for key, value in settings.items())


_DISKS: Final = (
    "/",
    "/tmp",  # noqa: S108
    "/dev/shm",  # noqa: S108
    "/var",
    "/var/tmp",  # noqa: S108
    "/var/spool/clusterctl-slurmd",
    "/run",
    "/var/log",
)
# Of Slurm's state and of its accounting.
_CONTROLLER_DISKS: Final = ("/var/lib/slurm/slurmctld", "/var/lib/mysql")
# XIDs of hardware faults, for which NVIDIA's "XID Errors" recommends to reset or report the GPU.
_GRAVE_XIDS: Final = (
    48,
    61,
    62,
    63,
    64,
    74,
    79,
    92,
    94,
    95,
    109,
    110,
    119,
    120,
    136,
    140,
    143,
    154,
    155,
    156,
    158,
)


def health_settings(
    spec: ClusterSpec, inventory: Inventory, drivers: Mapping[str, Driver]
) -> dict[str, dict[str, Any]]:
    """Return host -> settings of its health check. A host that is not in ``drivers`` has no
    GPUs. Only nodes are drained and resumed; of other hosts the check only reports.
    """
    limits = spec.monitoring.health
    settings = {}
    for host in inventory.hosts:
        driver = drivers.get(host.name, Driver())
        settings[host.name] = {
            "node": host.name,
            "needs": node_needs(spec, inventory, host),
            "accounts": {user.name: user.uid for user in spec.users},
            "gpus": {
                "cards": driver.cards,
                "parts": sum(bool(gpu.caps) for gpu in driver.gpus),
                "files": sorted({file for gpu in driver.gpus for file in gpu.files}),
            },
            "gpu_temperature_c": limits.gpu_temperature,
            "faults": {
                fault.says: f"{fault.means}: {fault.fix.partition(';')[0]}" for fault in faults()
            },
            "flags": {
                flag.field: f"{flag.means}: {flag.fix or 'boot the node'}" for flag in flags()
            },
            "xids": _GRAVE_XIDS,
            "disks": (*_DISKS, *(_CONTROLLER_DISKS if host.is_controller else ())),
            "disk_free_mib": limits.disk_free,
            "clock_offset_s": limits.clock_offset,
        }
    return settings


_NODE: Final = re.compile(r"NodeName=(\S+) ")
_SIZE: Final = re.compile(r"(?<= )CPUs=.*?(?=Feature=)")
_PARTITION_SIZE: Final = re.compile(r"(?<= )DefMemPerCPU=\d+ ")


def slurmd_digests(files: Mapping[str, str], inventory: Inventory) -> dict[str, str]:
    """Return host -> digest of the settings that require a restart of slurmd when they change.

    files: Slurm's files, from ``render_files``. If `scontrol reconfigure` can add nodes, a host's
    digest does not depend on other nodes' lines, nor on its own line if the host shares a machine
    with other nodes.
    """
    reconfigures = takes_nodes_by_reconfigure(inventory)
    reloaded_keys = (
        ("NodeName=", "NodeSet=", "PartitionName=", *(f"{key}=" for key in fault_timeouts(0)))
        if reconfigures
        else ()
    )
    node_lines: dict[str, list[str]] = {}
    common = [files["cgroup.conf"], "" if reconfigures else files["topology.conf"]]
    for line in (*files["slurm.conf"].splitlines(), *files["gres.conf"].splitlines()):
        match = _NODE.match(line)
        if match and not (reconfigures and " CPUs=" in line and " Boards=" not in line):
            node_lines.setdefault(match[1], []).append(line)
        if not (line.startswith(reloaded_keys) or (match and " Name=gpu " in line)):
            common.append(_PARTITION_SIZE.sub("", _SIZE.sub("", line)))
    shared = digest(*common)
    return {host.name: digest(shared, *node_lines.get(host.name, ())) for host in inventory.compute}
