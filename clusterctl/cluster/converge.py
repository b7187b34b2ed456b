"""Configure what is not configured yet, put back what drifted, and say which was what.

What configuring leaves on each host is noted in the workspace with a digest of all that went in. As long as
both are the same, Ansible need not run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.cluster.drift import Mended, drifted, found, hosts_with_drift, mended, touches_slurm
from clusterctl.cluster.hardware import (
    Hardware,
    NodeConfig,
    as_registered,
    at_work,
    fetch_gpu_wheels,
    fetch_wheels,
    gpus_file,
    hardware,
    keep_free,
    node_config,
    refuse_missing_gpus,
    steady,
)
from clusterctl.cluster.managed import questions
from clusterctl.configure import ansible, events, inventory_file
from clusterctl.errors import Failure, SchedulerError, TransportError
from clusterctl.hosts.probe import probe_hosts
from clusterctl.hosts.report import Checksums, HostReport
from clusterctl.providers.base import Provisioned
from clusterctl.scheduler.base import Scheduler
from clusterctl.scheduler.session import admin_scheduler
from clusterctl.scheduler.slurm.config import health_file, render_files, slurmd_file
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.journal import digest
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.connections import Connections
from clusterctl.util.assets import asset, tree_hash
from clusterctl.util.progress import HostStep, Reporter

__all__ = [
    "Configured",
    "Mended",
    "NodeConfig",
    "astray",
    "fetch_wheels",
    "mend",
    "news",
    "questions",
    "refuse_missing_gpus",
    "stale",
]

_PATIENCE_S = 5.0  # for Slurm to tell of its jobs
_SOME = "some hosts"  # were configured last, and nothing is known of what the others would need


@dataclass(frozen=True, slots=True)
class Configured:
    """Hosts that are as they should be; ``summary`` is for the table of phases."""

    summary: str
    mended: tuple[Mended, ...] = ()
    views: Mapping[str, HostReport] = field(default_factory=dict)  # the hosts as they are now
    notes: tuple[str, ...] = ()


class _Noted(BaseModel):
    """What the last configuring left. ``inputs`` is empty while another one replaces it, for ``tried``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: str = ""
    marks: Mapping[str, Checksums] = {}
    hardware: Mapping[str, Hardware] = {}
    tried: Mapping[str, Hardware] = {}


def mend(
    spec: ClusterSpec,
    provisioned: Provisioned,
    workspace: Workspace,
    connections: Connections,
    views: Mapping[str, HostReport],
    *,
    anew: bool,
    limit: Collection[str] = (),
    report: Reporter,
) -> Configured:
    """Configure all hosts if what goes in has changed, or ``anew``; else those on which something drifted.

    With a ``limit`` it is these hosts and the controller; the others only learn who belongs to the cluster.

    Raises:
        ConfigureError: tasks failed; one failure a host.
        TransportError: a host could not be looked at afterwards.
    """
    inventory = provisioned.inventory
    slurm = admin_scheduler(inventory, connections, patience_s=_PATIENCE_S)
    noted = _settled(_read(workspace, without=provisioned.made), slurm)
    views = _installed(spec, inventory, workspace, connections, views, limit=limit, report=report)
    fitted = node_config(spec, inventory, views, noted.hardware, partial(keep_free, slurm), limit=limit)
    notes = (*fitted.notes, *fetch_gpu_wheels(spec, inventory, workspace, fitted.views, report))
    inputs, files = _inputs(spec, inventory, workspace, fitted.views)
    for name, content in files.items():
        write_atomic(workspace.rendered / name, content)
    inventory_file.write_inventory(spec, inventory, workspace)
    before = {host: view.checksums for host, view in views.items()}
    concerned = hosts_with_drift(noted.marks, before)
    if limit:
        return _mend_some(
            limit,
            spec=spec,
            inventory=inventory,
            workspace=workspace,
            connections=connections,
            noted=noted,
            views=views,
            fitted=fitted,
            notes=notes,
            report=report,
        )
    everything = anew or noted.inputs != inputs
    if not everything and not concerned:
        return Configured(f"unchanged: {len(views)} hosts checked", (), views, notes)

    has = hardware(spec, inventory, fitted.views)
    if everything:
        _write(workspace, noted.model_copy(update={"inputs": "", "tried": has}))
    limit = () if everything else concerned
    recap = ansible.configure(
        inventory, workspace, limit=limit, progress=lambda p: report(_step(p, inventory, limit))
    )
    keys = drifted(noted.marks.get(inventory.controller.name, {}), before[inventory.controller.name])
    if touches_slurm(keys) or (everything and noted.marks):
        # Other nodes' slurmd were not restarted for what concerns one alone.
        admin_scheduler(inventory, connections).reconfigure()
    asked = questions(spec, inventory, workspace)
    seen = probe_hosts({host: asked[host] for host in limit or asked}, connections.to)
    after = {**before, **{host: view.checksums for host, view in seen.items()}}
    _write(workspace, _Noted(inputs=inputs, marks=after, hardware=has))
    if not noted.inputs:  # nothing is known of how it was left
        return Configured(str(recap), (), {**views, **seen}, notes)
    told = (
        mended(host, noted.marks[host], before[host], after[host]) for host in before if host in noted.marks
    )
    put_back = (one for host in told for one in host)
    return Configured(str(recap), (*_taken_up(fitted), *put_back), {**views, **seen}, notes)


def _mend_some(
    limit: Collection[str],
    *,
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    noted: _Noted,
    views: Mapping[str, HostReport],
    fitted: NodeConfig,
    notes: tuple[str, ...],
    report: Reporter,
) -> Configured:
    """Configure these hosts and the controller, and tell the others who belongs to the cluster now."""
    chosen = tuple(h.name for h in inventory.hosts if h.name in limit or h.is_controller)
    others = tuple(h.name for h in inventory.hosts if h.name not in chosen and h.name in noted.marks)
    has = hardware(spec, inventory, fitted.views)
    _write(workspace, noted.model_copy(update={"inputs": "", "tried": has}))
    told = ansible.introduce(inventory, workspace, limit=others) if others else None
    recap = ansible.configure(
        inventory, workspace, limit=chosen, progress=lambda p: report(_step(p, inventory, chosen))
    )
    admin_scheduler(inventory, connections).reconfigure()
    asked = questions(spec, inventory, workspace)
    seen = probe_hosts({host: asked[host] for host in (*chosen, *others)}, connections.to)
    # Not what all of them were configured for: the next `up` of the whole cluster looks at them anew.
    now = {**views, **seen}
    marks = {host: view.checksums for host, view in now.items()}
    _write(workspace, _Noted(inputs=_SOME, marks=marks, hardware=has))
    summary = f"{recap}; {told.changed if told else 0} changed on others"
    return Configured(summary, _taken_up(fitted), now, notes)


def _taken_up(fitted: NodeConfig) -> tuple[Mended, ...]:
    return tuple(Mended(host, words, "taken up") for host, words in fitted.taken_up.items())


def _installed(
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    views: Mapping[str, HostReport],
    *,
    limit: Collection[str],
    report: Reporter,
) -> Mapping[str, HostReport]:
    """The views, with what only slurmd can tell of a node: it is installed first where there is none.

    So is a driver where it does not show all cards: Slurm is told of those that it shows, and they get CuPy.
    """
    silent = [
        host.name
        for host in inventory.compute
        if inventory.has_slurm and host.cpus is None and views[host.name].facts is None
    ]
    first = set(silent)
    if spec.software.nvidia.has_driver and (silent or stale(spec, inventory, workspace, views)):
        first |= {
            host.name
            for host in inventory.compute
            if (not limit or host.name in limit) and _lacks_driver(views[host.name])
        }
    if not first:
        return views
    inventory_file.write_inventory(spec, inventory, workspace)
    ansible.install_on_hosts(
        inventory, workspace, limit=sorted(first), progress=lambda p: report(_step(p, inventory, first))
    )
    asked = questions(spec, inventory, workspace)
    return {**views, **probe_hosts({host: asked[host] for host in first}, connections.to)}


def _lacks_driver(view: HostReport) -> bool:
    """Whether there are cards that no driver shows."""
    return view.cards > view.driver.cards


def stale(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, views: Mapping[str, HostReport]
) -> str:
    """Why ``mend`` would configure all of these hosts, which stay as they are; "" if it would not."""
    noted = _read(workspace, without=())
    if not noted.inputs:
        return "the last `clusterctl up` did not end"
    inputs, _ = _inputs(spec, inventory, workspace, steady(views, noted.hardware))
    if inputs == noted.inputs:
        return ""
    return "the spec, clusterctl itself or the hardware is not what the hosts were configured for"


def news(
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    views: Mapping[str, HostReport],
) -> NodeConfig:
    """What of the hardware ``mend`` would take up, and what waits."""
    slurm = admin_scheduler(inventory, connections, patience_s=_PATIENCE_S)
    noted = _settled(_read(workspace, without=()), slurm)
    return node_config(spec, inventory, views, noted.hardware, partial(at_work, slurm))


def _settled(noted: _Noted, slurm: Scheduler) -> _Noted:
    """With the hardware that Slurm knows of, where the last `up` did not end."""
    if not noted.tried:
        return noted
    try:
        has = as_registered(noted.hardware, noted.tried, slurm.nodes())
    except (SchedulerError, TransportError):
        return noted
    return noted.model_copy(update={"hardware": has})


def outlook(
    spec: ClusterSpec, inventory: Inventory, copy: Workspace, views: Mapping[str, HostReport]
) -> tuple[tuple[events.TaskPreview, ...], tuple[Failure, ...]]:
    """What ``mend`` would change on these hosts, task by task, and where that can't be told.

    ``copy`` is a copy of the workspace, to write in.

    Raises:
        ConfigureError: Ansible itself could not run.
    """
    _, files = _inputs(spec, inventory, copy, views)
    for name, content in files.items():
        write_atomic(copy.rendered / name, content)
    inventory_file.write_inventory(spec, inventory, copy)
    return ansible.preview(inventory, copy, limit=tuple(views))


def astray(workspace: Workspace, views: Mapping[str, HostReport]) -> tuple[tuple[str, str], ...]:
    """What ``mend`` would find on these hosts that is not as configuring left it: (host, what)."""
    noted = _read(workspace, without=())
    return tuple((host, what) for host, view in views.items() for what in _drift(host, noted, view.checksums))


def _drift(host: str, noted: _Noted, now: Checksums) -> tuple[str, ...]:
    if host not in noted.marks:
        return ("it is not configured yet",)
    return found(noted.marks[host], now)


def _step(progress: events.TaskProgress, inventory: Inventory, limit: Collection[str]) -> HostStep:
    """What a task that ended on a host says, and how many hosts have it to do."""
    groups = progress.group.split(":")
    concerned = [
        host
        for host in inventory.hosts
        if ("all" in groups or set(host.roles) & set(groups)) and (not limit or host.name in limit)
    ]
    return HostStep(progress.host, progress.what, len(concerned), progress.status, progress.failed)


def _inputs(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, views: Mapping[str, HostReport]
) -> tuple[str, Mapping[str, str]]:
    """A digest of all that decides what configuring leaves on a host, and of it the files that are made
    for them, Slurm's among these.

    The payload's hash stands in the inventory.
    """
    facts = {host: view.facts for host, view in views.items() if view.facts}
    files = {
        **(render_files(spec, inventory, facts) if inventory.has_slurm else {}),
        inventory_file.HEALTH_FILE: health_file(
            spec, inventory, {h: view.driver for h, view in views.items()}
        ),
        inventory_file.GPUS_FILE: gpus_file(spec, inventory, workspace, views),
    }
    if inventory.has_slurm:
        files[inventory_file.SLURMD_FILE] = slurmd_file(files, [host.name for host in inventory.compute])
    secrets = (workspace.munge_key.read_bytes(), workspace.public_key.read_bytes())
    variables = inventory_file.inventory_text(spec, inventory, workspace)
    cards = json.dumps({host: has.cards for host, has in hardware(spec, inventory, views).items()})
    made = (files[name] for name in sorted(files))
    return digest(tree_hash(asset("ansible")), variables, *secrets, cards, *made), files


def _read(workspace: Workspace, *, without: Collection[str]) -> _Noted:
    """What was noted, but for hosts that have been made anew since."""
    try:
        noted = _Noted.model_validate_json(workspace.configured.read_bytes())
    except (FileNotFoundError, ValidationError):
        return _Noted()
    marks = {host: mark for host, mark in noted.marks.items() if host not in without}
    has = {host: what for host, what in noted.hardware.items() if host not in without}
    tried = {host: what for host, what in noted.tried.items() if host not in without}
    return _Noted(inputs=noted.inputs, marks=marks, hardware=has, tried=tried)


def _write(workspace: Workspace, noted: _Noted) -> None:
    write_atomic(workspace.configured, noted.model_dump_json(indent=1) + "\n")
