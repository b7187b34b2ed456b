"""Spec, inventory and facts -> Slurm's configuration files. Decisions are here; templates place values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from clusterctl.errors import SlurmError
from clusterctl.hosts.gpus import Driver, Gpu, by_type, faults, flags
from clusterctl.hosts.probe import NodeFacts
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER, PROOF_PARTITION, SLURMCTLD_PORT, SLURMD_PORT, SLURMDBD_PORT
from clusterctl.state.inventory import (
    HEALTH_PROGRAM,
    SRUN_PORTS,
    Host,
    Inventory,
)
from clusterctl.util.assets import digest, render

TASK_PROLOG = "/opt/clusterctl/task-prolog"  # of the role job_env
CONTROLLER_PROLOG = "/opt/clusterctl/prolog-slurmctld"  # of the role slurmctld

# The kernel's figure moves by some MiB from boot to boot, and a node with less than promised is drained.
_MEMORY_PROMISED = 0.98
_DISABLES_CGROUPS = "24.11"  # `CgroupPlugin=disabled` is known there; tried with this release and 26.05
# Since 23.11 `scontrol reconfigure` has the daemons execute themselves anew: scontrol(1). Before 23.11.8 that
# could lose credentials and crash slurmctld (Slurm's CHANGELOG/slurm-23.11.md), and Ubuntu 24.04 has 23.11.4.
_RECONFIGURES = "24.05"
_TREE_WIDTH = 128  # above that slurmd forwards messages in more than one step
_PROOF_PRIORITY_TIER = 1000
_PROOF_MAX_MINUTES = 10

Settings = dict[str, str]


@dataclass(frozen=True, slots=True)
class Node:
    """What slurm.conf says of one node. ``topology`` is empty where the node has a share of a machine."""

    host: Host
    cpus: int
    memory_mib: int
    topology: tuple[tuple[str, int], ...]
    gpus: tuple[Gpu, ...]


def render_files(spec: ClusterSpec, inventory: Inventory, facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """File name -> text: Slurm's files, topology.conf among them; none where a cluster has no Slurm.

    ``facts`` is keyed by host name; hosts whose cpus and memory are set in the inventory need none.

    Raises:
        SlurmError: facts of a host are missing.
    """
    if not inventory.has_slurm:
        return {}
    nodes = tuple(_node(host, facts) for host in inventory.compute)
    uses_cgroups = inventory.cgroups and all(node.topology for node in nodes)
    knows_disabled = _release(inventory) >= _DISABLES_CGROUPS
    gpus = [_line(settings) for node in nodes for settings in _gres_settings(node)]
    switches = [
        f"SwitchName={name} " + (f"Nodes={one.hosts}" if one.hosts else f"Switches={one.switches}")
        for name, one in spec.provider.switches.items()
    ]
    return {
        "slurm.conf": _with_extra(_slurm_conf(spec, inventory, nodes), spec.slurm.extra),
        "gres.conf": render("gres.conf.j2", lines=gpus),
        "cgroup.conf": render(
            "cgroup.conf.j2",
            constrains_devices=inventory.constrains_devices,
            disabled=knows_disabled and not uses_cgroups,
        ),
        "topology.conf": render("topology.conf.j2", lines=switches),  # without any, Slurm does not read it
        "slurmdbd.conf": render("slurmdbd.conf.j2", host=inventory.controller.own_name, port=SLURMDBD_PORT),
    }


def accounting_files(cluster: str, port: int) -> dict[str, str]:
    """File name -> text: Slurm's files of a host on which only the accounting of a cluster runs."""
    here = {"ClusterName": cluster, "SlurmctldHost": "localhost", "SlurmUser": "slurm"}
    accounting = {"Type": "accounting_storage/slurmdbd", "Host": "localhost", "Port": str(port)}
    lines = here | {f"AccountingStorage{key}": value for key, value in accounting.items()}
    return {
        **dict.fromkeys(("gres.conf", "cgroup.conf", "topology.conf"), ""),
        "slurm.conf": _line(lines, "\n") + "\n",
        "slurmdbd.conf": render("slurmdbd.conf.j2", host="localhost", port=port),
    }


def takes_nodes_by_reconfigure(inventory: Inventory) -> bool:
    """Whether its Slurm learns of other nodes by `scontrol reconfigure`, and no daemon needs a restart."""
    return _release(inventory) >= _RECONFIGURES


def needs_facts(inventory: Inventory, host: Host) -> bool:
    """Whether a node's line in slurm.conf is made of what `slurmd -C` says there."""
    return inventory.has_slurm and host.cpus is None


def timeouts(nodes: int) -> Settings:
    """Settings that decide how soon a fault is noticed and its job runs again.

    Slurm's defaults are for thousands of nodes: with them a lost node is noticed after five minutes, and a
    requeued job waits until credentials expire (120 s). Small clusters need not wait; larger ones get
    longer limits. None is so short that a machine which is busy for half a minute is taken for a dead one:
    its jobs would be lost.
    """
    grown = nodes // 8
    return {
        "SlurmdTimeout": str(min(60 + grown, 300)),
        "SlurmctldTimeout": str(min(60 + grown, 120)),
        "MessageTimeout": str(min(15 + grown, 60)),
        "BatchStartTimeout": "60",  # the prologue's pause counts
        "AuthInfo": f"cred_expire={min(10 + grown, 120)}",
        "KillWait": "30",  # Slurm's own: for programs that save their work when they are ended
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=5,bf_interval=5",  # a job starts at once
        "TreeWidth": str(max(2, min(nodes, _TREE_WIDTH))),
    }


def gres(gpus: Iterable[Gpu]) -> str:
    """What slurm.conf says of a node's GPUs: ``gpu:a100:1,gpu:t4:2``."""
    alike = groupby(by_type(gpus), key=lambda gpu: gpu.type)
    return ",".join(f"gpu:{kind}:{len([*group])}" for kind, group in alike)


def promised_mib(memory_mib: int) -> int:
    """How much of a node's memory jobs can be given."""
    return int(memory_mib * _MEMORY_PROMISED)


def slurm_minutes(seconds: int) -> int:
    """Slurm counts limits in whole minutes; a shorter limit than asked for would be a surprise."""
    return -(-seconds // 60)


def _release(inventory: Inventory) -> str:
    """Of its Slurm; "" where it is not known."""
    return inventory.slurm or inventory.distribution.slurm or ""


def _node(host: Host, facts: Mapping[str, NodeFacts]) -> Node:
    if host.cpus is not None and host.memory_mib is not None:
        gpus = facts[host.name].gpus if host.name in facts else ()
        return Node(host, host.cpus, host.memory_mib, (), gpus)
    if host.name not in facts:
        raise SlurmError(
            "slurm.conf can't be written: the host's facts are missing",
            code="host-facts-missing",
            host=host.name,
        )
    known = facts[host.name]
    topology = (
        ("Boards", known.boards),
        ("SocketsPerBoard", known.sockets),
        ("CoresPerSocket", known.cores_per_socket),
        ("ThreadsPerCore", known.threads_per_core),
    )
    return Node(host, known.cpus, promised_mib(known.memory_mib), topology, known.gpus)


def _slurm_conf(spec: ClusterSpec, inventory: Inventory, nodes: tuple[Node, ...]) -> str:
    has_shares = any(not node.topology for node in nodes)
    counted_otherwise = any(Driver(len({gpu.index for gpu in node.gpus}), node.gpus).uuids for node in nodes)
    return render(
        "slurm.conf.j2",
        cluster=spec.name,
        controller=inventory.controller,
        slurmctld_port=SLURMCTLD_PORT,
        slurmd_port=SLURMD_PORT,
        slurmdbd_port=SLURMDBD_PORT,
        srun_ports=SRUN_PORTS,
        switches=spec.provider.switches,
        tasks=_line(_tasks(has_shares=has_shares, cgroups=inventory.cgroups), "\n"),
        mpi="pmix" if inventory.pmix else "none",
        # Tells jobs the variables of their host, what CUDA calls their GPUs, and that there is no PMIx.
        task_prolog=TASK_PROLOG if inventory.has_task_prolog or counted_otherwise else None,
        prolog=CONTROLLER_PROLOG,
        timeouts=_line(timeouts(len(nodes)), "\n"),
        health=HEALTH_PROGRAM,
        health_interval=spec.monitoring.health.interval,
        # Where the kernel sees to memory, Slurm refuses to do it, too.
        gather="UsePss" if inventory.cgroups and not has_shares else "OverMemoryKill,UsePss",
        gpus=any(node.gpus for node in nodes),
        nodes="\n".join(_line(_node_settings(node)) for node in nodes),
        partitions="\n".join(_line(settings) for settings in _partitions(spec, nodes)),
    )


def _with_extra(text: str, extra: tuple[str, ...]) -> str:
    """The user's lines at the end. Ours step back where they set the same key: twice would be an error."""
    if not extra:
        return text
    taken = {match.group(1).lower() for line in extra if (match := re.match(r"\s*(\w+)", line))}
    ours = (line for line in text.splitlines() if line.partition("=")[0].lower() not in taken)
    return "\n".join([*ours, "", "# slurm.extra of the spec", *extra, ""])


def _tasks(*, has_shares: bool, cgroups: bool) -> Settings:
    """Who tracks the processes of tasks and binds them to cores."""
    if has_shares:
        # A share's cores are bound to the machine from outside, and its cgroups are not its own: Slurm must
        # not widen the one nor write the other. It counts memory and ends what takes more than it was given.
        parameters, tracks, binds = {"SlurmdParameters": "config_overrides"}, "linuxproc", "task/none"
    elif cgroups:
        parameters, tracks, binds = {}, "cgroup", "task/cgroup,task/affinity"
    else:
        parameters, tracks, binds = {}, "linuxproc", "task/affinity"
    return {**parameters, "ProctrackType": f"proctrack/{tracks}", "TaskPlugin": binds}


def _node_settings(node: Node) -> Settings:
    settings = {"NodeName": node.host.name, "NodeAddr": node.host.address}
    settings |= {"NodeHostname": node.host.hostname} if node.host.hostname else {}
    settings |= {"CPUs": str(node.cpus)}
    settings |= {key: str(value) for key, value in node.topology}
    settings["RealMemory"] = str(node.memory_mib)
    if node.gpus:
        settings["Gres"] = gres(node.gpus)
    settings |= {"Feature": str(node.host.partition), "State": "UNKNOWN"}
    return settings


def _partitions(spec: ClusterSpec, nodes: tuple[Node, ...]) -> Iterable[Settings]:
    for i, partition in enumerate(spec.partitions):
        members = [node for node in nodes if node.host.partition == partition.name]
        minutes = slurm_minutes(partition.max_time) if partition.max_time else None
        yield {
            "PartitionName": partition.name,
            "Nodes": ",".join(node.host.name for node in members),
            "Default": "YES" if i == 0 else "NO",
            "MaxTime": str(minutes) if minutes else "UNLIMITED",
            # Without this a job that names no memory takes all of its nodes'.
            "DefMemPerCPU": str(min(node.memory_mib // node.cpus for node in members)),
            "State": "UP",
        }
    yield {
        "PartitionName": PROOF_PARTITION,
        "Nodes": "ALL",
        "Hidden": "YES",
        "AllowGroups": ADMIN_USER,
        "AllowAccounts": ADMIN_USER,
        "PriorityTier": str(_PROOF_PRIORITY_TIER),
        "MaxTime": str(_PROOF_MAX_MINUTES),
        "DefMemPerCPU": str(min(node.memory_mib // node.cpus for node in nodes)),
        "State": "UP",
    }


def _gres_settings(node: Node) -> Iterable[Settings]:
    # Named file by file: not every distribution's Slurm can ask the driver.
    for gpu in node.gpus:
        files = {"MultipleFiles" if gpu.caps else "File": ",".join(gpu.files)}
        near = {"Cores": gpu.cores} if gpu.cores and node.topology else {}
        links = {"Links": gpu.links} if gpu.links else {}
        yield {"NodeName": node.host.name, "Name": "gpu", "Type": gpu.type, **files, **near, **links}


def _line(settings: Settings, separator: str = " ") -> str:
    return separator.join(f"{key}={value}" for key, value in settings.items())


_DISKS: Final = ("/", "/tmp", "/var", "/var/tmp", "/run", "/var/log")  # noqa: S108
# XIDs that tell of hardware, not of a program: in NVIDIA's "XID Errors", those to reset or report.
_GRAVE_XIDS: Final = (
    *(48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110),
    *(119, 120, 136, 140, 143, 154, 155, 156, 158),
)


def health_file(spec: ClusterSpec, inventory: Inventory, drivers: Mapping[str, Driver]) -> str:
    """JSON: host -> the settings of its check. A host that was not seen is taken to have no GPUs."""
    limits, settings = spec.monitoring.health, {}
    for name in (host.name for host in inventory.compute):
        driver = drivers.get(name, Driver())
        settings[name] = {
            "node": name,
            "gpus": {"cards": driver.cards, "parts": sum(bool(gpu.caps) for gpu in driver.gpus)},
            "gpu_temperature_c": limits.gpu_temperature,
            "faults": {one.says: f"{one.means}: {one.fix.partition(';')[0]}" for one in faults()},
            "flags": {one.field: f"{one.means}: {one.fix or 'boot the node'}" for one in flags()},
            "xids": _GRAVE_XIDS,
            "disks": _DISKS,
            "disk_free_mib": limits.disk_free,
            "clock_offset_s": limits.clock_offset,
        }
    return json.dumps(settings, indent=1, sort_keys=True) + "\n"


_NODE: Final = re.compile(r"NodeName=(\S+) ")
_SIZE: Final = re.compile(r"(?<= )CPUs=.*?(?=Feature=)")
_PARTITION_SIZE: Final = re.compile(r"(?<= )DefMemPerCPU=\d+ ")


def slurmd_file(files: Mapping[str, str], inventory: Inventory) -> str:
    """JSON: host -> a digest of what its slurmd is started with, of Slurm's files as rendered.

    Where `scontrol reconfigure` tells of nodes, it is without them, but for a node itself that is no share:
    what slurmd measures, it measures when it is started, and keeps hwloc's file at a reconfigure.
    """
    reconfigures = takes_nodes_by_reconfigure(inventory)
    of_others = ("NodeName=", "PartitionName=", *(f"{key}=" for key in timeouts(0))) if reconfigures else ()
    own: dict[str, list[str]] = {}
    common = [files["cgroup.conf"], "" if reconfigures else files["topology.conf"]]
    for line in (*files["slurm.conf"].splitlines(), *files["gres.conf"].splitlines()):
        match = _NODE.match(line)
        if match and not (reconfigures and " CPUs=" in line and " Boards=" not in line):
            own.setdefault(match[1], []).append(line)
        if not (line.startswith(of_others) or (match and " Name=gpu " in line)):
            common.append(_PARTITION_SIZE.sub("", _SIZE.sub("", line)))
    shared = digest(*common)
    names = [host.name for host in inventory.compute]
    return json.dumps({host: digest(shared, *own.get(host, ())) for host in names}, indent=1) + "\n"
