"""Configure hosts that are not configured yet, repair what drifted, and report each repair.

What configuring leaves on each host is recorded in the workspace with a digest of all that went in. As
long as both are the same, Ansible need not run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.cluster.drift import (
    MISSING,
    UNKNOWN,
    drift_of_host,
    drifted,
    hosts_with_drift,
    lost_packages,
    repairs_of,
    touches_slurm,
)
from clusterctl.cluster.hardware import (
    Hardware,
    NodeConfig,
    fetch_gpu_wheels,
    gpus_file,
    hardware,
    hardware_known_to_slurm,
    node_config,
    nodes_with_jobs,
    with_plugins,
    without_cgroups,
    without_jitter,
)
from clusterctl.cluster.node_class import (
    can_renew,
    expected_marks,
    node_files,
    own_marks,
    renew,
    shared_inputs,
)
from clusterctl.cluster.session import ClusterSession, Drift
from clusterctl.configure import ansible, events, inventory_file
from clusterctl.errors import Notice, SchedulerError, TransportError
from clusterctl.hosts.probe import Checksums, HostReport, probe_hosts
from clusterctl.hosts.roles import probe_requests
from clusterctl.providers.base import Provisioned
from clusterctl.providers.node_class import NodeFiles
from clusterctl.scheduler.base import Scheduler
from clusterctl.scheduler.session import SHORT_PATIENCE_S, scheduler_of
from clusterctl.scheduler.slurm_conf import health_file, needs_facts, render_files, slurmd_file
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import SLURMD_PORT, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import ansible_hash, digest
from clusterctl.util.process import parallel_map

UNFINISHED = Notice("up-unfinished", "the last `clusterctl up` did not end")

_SOME = "some hosts"  # were configured last: the next `up` of the whole cluster looks at all of them

_START_SLURMD = (
    *("sudo", "-n", "sh", "-c"),
    f'ss -Hltn "sport = :{SLURMD_PORT}" | grep -q . || systemctl restart slurmd',
)


@dataclass(frozen=True, slots=True)
class Converged:
    """Hosts that are as the spec wants them: ``notes``: what still needs attention."""

    inventory: Inventory
    reports: Mapping[str, HostReport]
    notes: tuple[str, ...] = ()


class Configured(BaseModel):
    """What the last configuring left. ``inputs`` is empty while another one replaces it, for ``tried``.

    ``groups``: group -> the digest of that part of them which its hosts have in common.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: str = ""
    groups: Mapping[str, str] = {}
    marks: Mapping[str, Checksums] = {}
    hardware: Mapping[str, Hardware] = {}
    tried: Mapping[str, Hardware] = {}


def converge(
    session: ClusterSession,
    provisioned: Provisioned,
    reports: Mapping[str, HostReport],
    limit: Collection[str] = (),
    *,
    again: bool = False,
) -> Converged:
    """Configure all hosts if what goes in has changed, or ``again``; else those that have drifted.

    With a ``limit`` it is these and the controller; the others only learn which hosts belong to the cluster.
    """
    spec, workspace, inventory = session.spec, session.workspace, provisioned.inventory
    slurm = scheduler_of(inventory, session.connections.to, patience_s=SHORT_PATIENCE_S)
    recorded = _with_registered_hardware(_read(workspace, provisioned.made), slurm)
    reports = _installed(session, inventory, reports, limit)
    nodes = node_config(
        spec, inventory, reports, recorded.hardware, partial(nodes_with_jobs, slurm, drain=True), limit=limit
    )
    without = fetch_gpu_wheels(
        spec, inventory, workspace, nodes.reports, to=session.connections.to, report=session.report
    )
    notes = (*nodes.notes, *without, *without_cgroups(inventory, nodes.reports))
    inputs = render(spec, inventory, workspace, nodes.reports)
    before = {host: report.checksums for host, report in reports.items()}
    has = hardware(spec, inventory, nodes.reports)
    drifting = hosts_with_drift(recorded.marks, before)
    everything = again or recorded.inputs != inputs
    if not (limit or everything or drifting):
        session.note = f"unchanged: {len(reports)} hosts checked"
        return Converged(inventory, reports, notes)

    if limit or everything:
        _write(workspace, recorded.model_copy(update={"inputs": "", "groups": {}, "tried": has}))
    chosen = [host.name for host in inventory.hosts if host.name in limit or host.is_controller]
    # New hosts that came with all that Ansible would do there: none where a card wants more.
    new = (host for host in provisioned.classed if host in reports and (not limit or host in limit))
    classed = () if again else _without_cards(session, new)
    hosts = chosen if limit else () if everything else drifting
    shared = {} if limit else shared_inputs(session, inventory)
    files = _own_files(session, inventory) if shared else {}
    same = {group for group, one in shared.items() if one == recorded.groups.get(group)}
    equal = same if everything and not again else set()
    known = [h.name for h in inventory.hosts if h.name in recorded.marks and equal.intersection(h.roles)]
    renewed = [
        host
        for host in _without_cards(session, known)
        if not drifted(recorded.marks[host], before[host]) and can_renew(files[host], before[host])
    ]
    if left := {*classed, *renewed}:
        hosts = [h.name for h in inventory.hosts if (not hosts or h.name in hosts) and h.name not in left]
    others = [host for host in recorded.marks if host in before and host not in chosen] if limit else ()
    controller = inventory.controller.name
    slurm_drifted = touches_slurm(drifted(recorded.marks.get(controller, {}), before[controller]))
    # Other nodes' slurmd are not restarted for what concerns one alone.
    reconfigures = bool(limit) or slurm_drifted or (everything and bool(recorded.marks))
    seen = dict(_configure(session, inventory, hosts, others)) if hosts or not left else {}
    to = session.connections.to
    parallel_map(renewed, lambda host: renew(files[host], before[host], to(host)))
    if reconfigures:
        scheduler_of(inventory, to).reconfigure()
    if left:
        expected = class_marks_of(session, provisioned, classed)
        expected |= {host: {**before[host], **own_marks(files[host])} for host in renewed}
        seen |= _take_in(session, inventory, expected, reports, new=classed)
    after = before | {host: report.checksums for host, report in seen.items()}
    done = Configured(inputs=_SOME if limit else inputs, groups=shared, marks=after, hardware=has)
    _write(workspace, done)
    if limit or recorded.inputs:  # else nothing is known of how the hosts were left
        session.repaired(Drift(host, change, "configured") for host, change in nodes.taken_up.items())
        for host in sorted(before.keys() & recorded.marks.keys()) if not limit else ():
            session.repaired(repairs_of(host, recorded.marks[host], before[host], after[host]))
    return Converged(inventory, {**reports, **seen}, notes)


def _configure(
    session: ClusterSession,
    inventory: Inventory,
    hosts: Collection[str],
    others: Collection[str],
) -> Mapping[str, HostReport]:
    """Run the configure half of every role on these hosts, none: all; introduce them to ``others``; probe."""
    workspace = session.workspace
    introduced = ansible.run("introduce", inventory, workspace, limit=others) if others else None
    recap = _run("configure", session, inventory, hosts)
    session.note = f"{recap}; {introduced.changed} changed on others" if introduced else str(recap)
    return _probe(session, inventory, (*hosts, *others))


def _without_cards(session: ClusterSession, hosts: Iterable[str]) -> tuple[str, ...]:
    gpus = json.loads((session.workspace.rendered / inventory_file.GPUS_FILE).read_bytes())
    return tuple(host for host in hosts if not any(gpus.get(host, {}).values()))


def _take_in(
    session: ClusterSession,
    inventory: Inventory,
    expected: Mapping[str, Checksums],
    reports: Mapping[str, HostReport],
    new: Collection[str],
) -> Mapping[str, HostReport]:
    """Look at hosts that have what their class has and their own files; those that lack it are configured.

    ``reports``: of hosts as they were seen before.
    """
    to = session.connections.to
    compute = [host.name for host in inventory.compute if host.name in new]
    # The controller was not there at their boot: newer slurmd ask again after 10 s only.
    parallel_map(compute, lambda host: to(host).run(_START_SLURMD))
    seen = {host: reports[host] for host in expected if _shows(reports[host], expected[host])}
    if rest := expected.keys() - seen.keys():
        seen |= _probe(session, inventory, rest)
    unlike = [host for host in expected if not _shows(seen[host], expected[host])]
    shared = f"{len(expected) - len(unlike)} hosts as their class"
    session.note = f"{session.note}; {shared}" if session.note else shared
    if unlike:
        _run("configure", session, inventory, unlike)
        seen = {**seen, **_probe(session, inventory, unlike)}
    return seen


def _shows(report: HostReport, expected: Checksums) -> bool:
    """Whether a host is as expected; what is not, because it can't be known before, must be no fault."""
    known, asked = (
        {key: mark for key, mark in marks.items() if not key.startswith("accounting ")}
        for marks in (report.checksums, expected)
    )
    others = (mark for key, mark in report.checksums.items() if key not in known)
    return known == asked and all(mark not in (UNKNOWN, MISSING) for mark in others)


def _own_files(session: ClusterSession, inventory: Inventory) -> NodeFiles:
    """Host -> the files that it has for itself, by those that were rendered."""
    files = (path for path in session.workspace.rendered.iterdir() if path.suffix in {".json", ".conf"})
    rendered = {path.name: path.read_text() for path in files}
    return node_files(session.spec, inventory, session.workspace, rendered)


def class_marks_of(
    session: ClusterSession, provisioned: Provisioned, hosts: Collection[str]
) -> dict[str, Checksums]:
    """Host -> what it has to show that came with what its class has."""
    spec, inventory = session.spec, provisioned.inventory
    asked, files = probe_requests(spec, inventory, session.workspace), _own_files(session, inventory)
    marks = {
        host.name: provisioned.class_marks[host.roles[0]] for host in inventory.hosts if host.name in hosts
    }
    shared = inventory.shared
    return {host: expected_marks(asked[host], files[host], marks[host], spec, shared) for host in hosts}


def _run(
    playbook: Literal["configure", "install_first"],
    session: ClusterSession,
    inventory: Inventory,
    limit: Collection[str],
) -> events.Recap:
    """Run a playbook on these hosts, none: all; of each task, report how many of them have it to do."""

    def progress(task: events.TaskProgress) -> None:
        groups = task.group.split(":")
        # A group clusterctl_* has all hosts, or none.
        every = any(group == "all" or group.startswith("clusterctl_") for group in groups)
        concerned = [
            host
            for host in inventory.hosts
            if (every or set(host.roles) & set(groups)) and (not limit or host.name in limit)
        ]
        session.report(task.step(len(concerned)))

    return ansible.run(playbook, inventory, session.workspace, limit=limit, progress=progress)


def _probe(session: ClusterSession, inventory: Inventory, hosts: Collection[str]) -> dict[str, HostReport]:
    """Probe these hosts; none: all."""
    asked = probe_requests(session.spec, inventory, session.workspace)
    return dict(probe_hosts({host: asked[host] for host in hosts or asked}, session.connections.to))


def _installed(
    session: ClusterSession,
    inventory: Inventory,
    reports: Mapping[str, HostReport],
    limit: Collection[str] = (),
) -> Mapping[str, HostReport]:
    """The reports, with what only slurmd can tell of a node: it is installed first where it is missing.

    Where the inventory says a node's size, as of local ones, slurmd is not asked.
    So is a driver where it does not show all cards: Slurm is told of those that it shows, and they get CuPy.
    Whatever other hosts lack is installed in the same run.
    """
    spec, workspace = session.spec, session.workspace
    known = [(host, reports[host.name]) for host in inventory.compute]
    asked = {host.name for host, seen in known if needs_facts(inventory, host) and seen.facts is None}
    if spec.software.nvidia.has_driver and (asked or stale(spec, inventory, workspace, reports)):
        hidden = {host.name for host, seen in known if seen.cards > seen.driver.cards}
        asked |= hidden & set(limit) if limit else hidden
    if not asked:
        return reports
    others = (
        ()
        if inventory.baked
        else inventory_file.hosts_to_install(inventory, spec.software, reports, session.connections.to)
    )
    chosen = asked | {h.name for h in others if not limit or h.is_controller or h.name in limit}
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    _run("install_first", session, inventory, sorted(chosen))
    return {**reports, **_probe(session, inventory, asked)}


def stale(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> Notice | None:
    """Why ``converge`` would configure all of these hosts, which stay as they are; None if it would not."""
    recorded = _read(workspace)
    if not recorded.inputs:
        return UNFINISHED
    same = without_jitter(reports, recorded.hardware)
    inputs, _ = inputs_of(spec, with_plugins(inventory, same), workspace, same)
    if inputs == recorded.inputs:
        return None
    return Notice(
        "hosts-outdated",
        "the spec, clusterctl itself or the hardware is not what the hosts were configured for",
    )


def pending_changes(
    session: ClusterSession, inventory: Inventory, reports: Mapping[str, HostReport]
) -> NodeConfig:
    """The changes of hardware that ``converge`` would take up, and those that would wait."""
    slurm = scheduler_of(inventory, session.connections.to, patience_s=SHORT_PATIENCE_S)
    recorded = _with_registered_hardware(_read(session.workspace), slurm)
    return node_config(
        session.spec, inventory, reports, recorded.hardware, partial(nodes_with_jobs, slurm, drain=False)
    )


def _with_registered_hardware(recorded: Configured, slurm: Scheduler) -> Configured:
    """With the hardware that Slurm knows of, where the last `up` did not end."""
    if not recorded.tried:
        return recorded
    try:
        has = hardware_known_to_slurm(recorded.hardware, recorded.tried, slurm.nodes())
    except (SchedulerError, TransportError):
        return recorded
    return recorded.model_copy(update={"hardware": has})


def packages_lost_on(workspace: Workspace, reports: Mapping[str, HostReport]) -> Mapping[str, str]:
    """Host -> the packages that were there when it was configured, and are not any more."""
    recorded = _read(workspace).marks
    found = {host: lost_packages(recorded.get(host, {}), one.checksums) for host, one in reports.items()}
    return {host: packages for host, packages in found.items() if packages}


def drift_of(workspace: Workspace, reports: Mapping[str, HostReport]) -> Iterator[Drift]:
    """What has drifted on these hosts since they were configured."""
    recorded = _read(workspace).marks
    for host, seen in reports.items():
        if host not in recorded:
            yield Drift(host, "it is not configured yet")
            continue
        yield from drift_of_host(host, recorded[host], seen.checksums)


def inputs_of(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> tuple[str, Mapping[str, str]]:
    """A digest of all that decides what configuring leaves on a host, and of it the files that are made
    for them, Slurm's among these.

    The payload's hash stands in the inventory.
    """
    facts = {host: seen.facts for host, seen in reports.items() if seen.facts}
    slurm = render_files(spec, inventory, facts)
    drivers = {host: seen.driver for host, seen in reports.items()}
    files = {
        **slurm,
        inventory_file.HEALTH_FILE: health_file(spec, inventory, drivers),
        inventory_file.GPUS_FILE: gpus_file(spec, inventory, workspace, reports),
    }
    if slurm:
        files[inventory_file.SLURMD_FILE] = slurmd_file(slurm, inventory)
    secrets = (workspace.munge_key.read_bytes(), workspace.public_key.read_bytes())
    variables = inventory_file.inventory_text(spec, inventory, workspace)
    cards = json.dumps({host: has.cards for host, has in hardware(spec, inventory, reports).items()})
    made = (files[name] for name in sorted(files))
    return digest(ansible_hash(), variables, *secrets, cards, *made), files


def render(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> str:
    """Write what Ansible ships; the digest of ``inputs_of``."""
    inventory = with_plugins(inventory, reports)
    inputs, files = inputs_of(spec, inventory, workspace, reports)
    for name, content in files.items():
        write_atomic(workspace.rendered / name, content)
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    return inputs


def _read(workspace: Workspace, without: Collection[str] = ()) -> Configured:
    """What was recorded, but for hosts that were recreated since."""
    try:
        recorded = Configured.model_validate_json(workspace.configured.read_bytes())
    except (FileNotFoundError, ValidationError):
        return Configured()
    by_host = {"marks": recorded.marks, "hardware": recorded.hardware, "tried": recorded.tried}
    return recorded.model_copy(
        update={
            name: {host: one for host, one in values.items() if host not in without}
            for name, values in by_host.items()
        }
    )


def _write(workspace: Workspace, recorded: Configured) -> None:
    write_atomic(workspace.configured, recorded.model_dump_json(indent=1) + "\n")
