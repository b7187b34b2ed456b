"""Configure what is not configured yet, put back what drifted, and say which was what.

What configuring leaves on each host is noted in the workspace with a digest of all that went in. As long as
both are the same, Ansible need not run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl import configure
from clusterctl.assets import asset, tree_hash
from clusterctl.errors import Failure
from clusterctl.inventory import Inventory
from clusterctl.journal import digest
from clusterctl.mend.drift import Mended, drifted, found, hosts_with_drift, mended, touches_slurm
from clusterctl.mend.managed import questions
from clusterctl.providers.base import Provisioned
from clusterctl.reach import Marks, View, reach
from clusterctl.slurm.config import render_files
from clusterctl.spec import ClusterSpec
from clusterctl.telling import HostStep, Say
from clusterctl.transport.connections import Connections
from clusterctl.workspace import Workspace, write_atomic

__all__ = ["Configured", "Mended", "astray", "mend", "questions", "stale"]

_SOME = "some hosts"  # were configured last, and nothing is known of what the others would need


@dataclass(frozen=True, slots=True)
class Configured:
    """Hosts that are as they should be; ``summary`` is for the table of phases."""

    summary: str
    mended: tuple[Mended, ...] = ()


class _Noted(BaseModel):
    """What the last configuring left. ``inputs`` is empty while another one replaces it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: str = ""
    marks: Mapping[str, Marks] = {}


def mend(
    spec: ClusterSpec,
    provisioned: Provisioned,
    workspace: Workspace,
    connections: Connections,
    views: Mapping[str, View],
    *,
    anew: bool,
    limit: Collection[str] = (),
    say: Say,
) -> Configured:
    """Configure all hosts if what goes in has changed, or ``anew``; else those on which something drifted.

    With a ``limit`` it is these hosts and the controller; the others only learn who belongs to the cluster.

    Raises:
        ConfigureError: tasks failed; one failure a host.
        TransportError: a host could not be looked at afterwards.
    """
    inventory = provisioned.inventory
    views = _installed(spec, inventory, workspace, connections, views, say=say)
    inputs, files = _inputs(spec, inventory, workspace, views)
    for name, content in files.items():
        write_atomic(workspace.rendered / name, content)
    configure.write_inventory(spec, inventory, workspace)
    noted = _read(workspace, without=provisioned.made)
    before = {host: view.marks for host, view in views.items()}
    concerned = hosts_with_drift(noted.marks, before)
    if limit:
        return _mend_some(
            limit,
            spec=spec,
            inventory=inventory,
            workspace=workspace,
            connections=connections,
            noted=noted,
            before=before,
            say=say,
        )
    everything = anew or noted.inputs != inputs
    if not everything and not concerned:
        return Configured(f"unchanged: {len(views)} hosts checked")

    if everything:
        _write(workspace, _Noted(marks=noted.marks))
    limit = () if everything else concerned
    recap = configure.configure(
        inventory, workspace, limit=limit, progress=lambda p: say(_step(p, inventory, limit))
    )
    keys = drifted(noted.marks.get(inventory.controller.name, {}), before[inventory.controller.name])
    if touches_slurm(keys):
        connections.to(inventory.controller.name).run(["scontrol", "reconfigure"])
    asked = questions(spec, inventory, workspace)
    seen = reach({host: asked[host] for host in limit or asked}, connections.to)
    after = {**before, **{host: view.marks for host, view in seen.items()}}
    _write(workspace, _Noted(inputs=inputs, marks=after))
    if not noted.inputs:  # nothing is known of how it was left
        return Configured(str(recap))
    told = (
        mended(host, noted.marks[host], before[host], after[host]) for host in before if host in noted.marks
    )
    return Configured(str(recap), tuple(one for host in told for one in host))


def _mend_some(
    limit: Collection[str],
    *,
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    noted: _Noted,
    before: Mapping[str, Marks],
    say: Say,
) -> Configured:
    """Configure these hosts and the controller, and tell the others who belongs to the cluster now."""
    lead = inventory.controller.name
    chosen = tuple(h.name for h in inventory.hosts if h.name in limit or h.leads)
    others = tuple(h.name for h in inventory.hosts if h.name not in chosen and h.name in noted.marks)
    _write(workspace, _Noted(marks=noted.marks))
    told = configure.introduce(inventory, workspace, limit=others) if others else None
    recap = configure.configure(
        inventory, workspace, limit=chosen, progress=lambda p: say(_step(p, inventory, chosen))
    )
    if inventory.has_slurm:
        connections.to(lead).run(["scontrol", "reconfigure"])
    asked = questions(spec, inventory, workspace)
    seen = reach({host: asked[host] for host in (*chosen, *others)}, connections.to)
    # Not what all of them were configured for: the next `up` of the whole cluster looks at them anew.
    _write(workspace, _Noted(inputs=_SOME, marks={**before, **{h: view.marks for h, view in seen.items()}}))
    return Configured(f"{recap}; {told.changed if told else 0} changed on others")


def _installed(
    spec: ClusterSpec,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    views: Mapping[str, View],
    *,
    say: Say,
) -> Mapping[str, View]:
    """The views, with what only slurmd can tell of a node: it is installed first where there is none."""
    silent = [host.name for host in inventory.compute if host.cpus is None and views[host.name].facts is None]
    if not silent or not inventory.has_slurm:
        return views
    configure.write_inventory(spec, inventory, workspace)
    configure.install_on_hosts(
        inventory, workspace, limit=silent, progress=lambda p: say(_step(p, inventory, silent))
    )
    asked = questions(spec, inventory, workspace)
    return {**views, **reach({host: asked[host] for host in silent}, connections.to)}


def stale(spec: ClusterSpec, inventory: Inventory, workspace: Workspace, views: Mapping[str, View]) -> str:
    """Why ``mend`` would configure all of these hosts, which stay as they are; "" if it would not."""
    noted = _read(workspace, without=())
    if not noted.inputs:
        return "the last `clusterctl up` did not end"
    inputs, _ = _inputs(spec, inventory, workspace, views)
    if inputs == noted.inputs:
        return ""
    return "the spec, clusterctl itself or the hardware is not what the hosts were configured for"


def outlook(
    spec: ClusterSpec, inventory: Inventory, copy: Workspace, views: Mapping[str, View]
) -> tuple[tuple[configure.Foretold, ...], tuple[Failure, ...]]:
    """What ``mend`` would change on these hosts, task by task, and where that can't be told.

    ``copy`` is a copy of the workspace, to write in.

    Raises:
        ConfigureError: Ansible itself could not run.
    """
    _, files = _inputs(spec, inventory, copy, views)
    for name, content in files.items():
        write_atomic(copy.rendered / name, content)
    configure.write_inventory(spec, inventory, copy)
    return configure.foretell(inventory, copy, limit=tuple(views))


def astray(workspace: Workspace, views: Mapping[str, View]) -> tuple[tuple[str, str], ...]:
    """What ``mend`` would find on these hosts that is not as configuring left it: (host, what)."""
    noted = _read(workspace, without=())
    return tuple((host, what) for host, view in views.items() for what in _drift(host, noted, view.marks))


def _drift(host: str, noted: _Noted, now: Marks) -> tuple[str, ...]:
    if host not in noted.marks:
        return ("it is not configured yet",)
    return found(noted.marks[host], now)


def _step(progress: configure.Progress, inventory: Inventory, limit: Collection[str]) -> HostStep:
    """What a task that ended on a host says, and how many hosts have it to do."""
    groups = progress.group.split(":")
    concerned = [
        host
        for host in inventory.hosts
        if ("all" in groups or set(host.roles) & set(groups)) and (not limit or host.name in limit)
    ]
    return HostStep(progress.host, progress.what, len(concerned), progress.status, progress.failed)


def _inputs(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, views: Mapping[str, View]
) -> tuple[str, Mapping[str, str]]:
    """A digest of all that decides what configuring leaves on a host, and of it the files of Slurm.

    The payload's hash stands in the inventory.
    """
    facts = {host: view.facts for host, view in views.items() if view.facts}
    files = render_files(spec, inventory, facts) if inventory.has_slurm else {}
    secrets = (workspace.munge_key.read_bytes(), workspace.public_key.read_bytes())
    ansible = configure.inventory_text(spec, inventory, workspace)
    return digest(
        tree_hash(asset("ansible")), ansible, *secrets, *(files[name] for name in sorted(files))
    ), files


def _read(workspace: Workspace, *, without: Collection[str]) -> _Noted:
    """What was noted, but for hosts that have been made anew since."""
    try:
        noted = _Noted.model_validate_json(workspace.configured.read_bytes())
    except (FileNotFoundError, ValidationError):
        return _Noted()
    return _Noted(inputs=noted.inputs, marks={h: m for h, m in noted.marks.items() if h not in without})


def _write(workspace: Workspace, noted: _Noted) -> None:
    write_atomic(workspace.configured, noted.model_dump_json(indent=1) + "\n")
