"""Configure hosts that are not configured yet, repair what drifted, and report each repair.

Ansible runs only if a host, or the digest of all that goes in, is not as the last configuring recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.drift import (
    drift_of_host,
    drifted,
    hosts_with_drift,
    lost_packages,
    repairs_of,
    shows,
    touches_slurm,
)
from clusterctl.cluster.hardware import (
    Hardware,
    NodeConfig,
    fetch_gpu_wheels,
    gpus_file,
    hardware,
    node_config,
    nodes_with_jobs,
    with_plugins,
    without_cgroups,
    without_jitter,
)
from clusterctl.cluster.node_class import (
    can_renew,
    node_files,
    own_marks,
    renew,
    shared_inputs,
)
from clusterctl.cluster.phases import Drift, Outcome
from clusterctl.configure import ansible, events, inventory_file
from clusterctl.errors import Notice
from clusterctl.hosts.probe import Checksums, HostReport
from clusterctl.providers.base import Provisioned
from clusterctl.providers.node_class import NodeFiles
from clusterctl.scheduler.base import Nodes
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.scheduler.slurm_conf import health_file, needs_facts, render_files, slurmd_file
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import SLURMD_PORT
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import ansible_hash, digest
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import SILENT, follow

UNFINISHED = Notice("up-unfinished", "the last `clusterctl up` did not end")

_SOME = "some hosts"  # were configured last: the next `up` of the whole cluster looks at all of them

_START_SLURMD = (
    *("sudo", "-n", "sh", "-c"),
    f'ss -Hltn "sport = :{SLURMD_PORT}" | grep -q . || systemctl restart slurmd',
)


class Configured(BaseModel):
    """What the last configuring left, of marks and groups; ``hardware`` is that of a new one since it began.

    Nodes whose jobs a change of hardware would end are drained by then.

    inputs: the digest of all that went in. Empty while a new configuring replaces this record.
    groups: group -> the digest of that part of the inputs which its hosts have in common.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: str = ""
    groups: Mapping[str, str] = {}
    marks: Mapping[str, Checksums] = {}
    hardware: Mapping[str, Hardware] = {}


def converge(
    cluster: ClusterContext,
    provisioned: Provisioned,
    reports: Mapping[str, HostReport],
    *,
    limit: Collection[str] | None,
    again: bool = False,
) -> Outcome[Mapping[str, HostReport]]:
    """Configure the hosts that need it, and report what was repaired. Return the new reports of all hosts.

    limit: the only hosts to configure, besides the controller. None: all hosts.
    again: configure hosts that are configured and have not drifted, too.
    """
    workspace, inventory = cluster.workspace, provisioned.inventory
    slurm = cluster.scheduler(inventory, patience_s=SHORT_PATIENCE_S)
    recorded = _read(workspace, provisioned.made)
    concerned = inventory.names if limit is None else limit
    reports = _installed(cluster, inventory, reports, concerned)
    at_work = partial(nodes_with_jobs, slurm, drain=True)
    nodes = node_config(cluster.spec, inventory, reports, recorded.hardware, at_work, concerned=concerned)
    rendered = render(cluster.spec, inventory, workspace, nodes.reports)
    notes = (
        *nodes.notes,
        *fetch_gpu_wheels(cluster, inventory, nodes.reports),
        *without_cgroups(inventory, nodes.reports),
    )
    has_changed = rendered.inputs != recorded.inputs
    groups = {} if limit else shared_inputs(cluster, inventory) if has_changed else recorded.groups
    needs_files = provisioned.classed or (groups and has_changed)
    files = node_files(cluster.spec, inventory, workspace) if needs_files else {}
    hosts = HostsToConfigure(inventory, recorded, reports, rendered, groups, files)
    work = hosts.of_limit(limit) if limit else hosts.choose(provisioned.classed, again=again)
    if not work:
        return Outcome(reports, f"unchanged: {len(reports)} hosts checked", notes)

    has = hardware(cluster.spec, inventory, nodes.reports)
    if work.replaces_record:
        _write(workspace, recorded.model_copy(update={"inputs": "", "groups": {}, "hardware": has}))
    seen, summary = _change_hosts(cluster, inventory, work, reports, files)
    before, after = _marks(reports), _marks({**reports, **seen})
    inputs = _SOME if limit else rendered.inputs
    _write(workspace, Configured(inputs=inputs, groups=groups, marks=after, hardware=has))
    if limit or recorded.inputs:  # else nothing is known of how the hosts were left
        cluster.repaired(Drift(host, change, "configured") for host, change in nodes.taken_up.items())
    if recorded.inputs and not limit:
        for host in sorted(before.keys() & recorded.marks.keys()):
            cluster.repaired(repairs_of(host, recorded.marks[host], before[host], after[host]))
    return Outcome({**reports, **seen}, summary, notes)


@dataclass(frozen=True, slots=True)
class Work:
    """The hosts that configuring has to change, each by name.

    ansible: hosts on which Ansible configures every role.
    introduced: hosts that only learn which hosts belong to the cluster.
    classed: new hosts that came with everything that Ansible would do.
    renewed: hosts that lack nothing but newer files of their own.
    reconfigures: whether Slurm's daemons have to read their configuration again.
    replaces_record: whether the record of the last configuring is void until this has ended.
    """

    ansible: tuple[str, ...] = ()
    introduced: tuple[str, ...] = ()
    classed: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    reconfigures: bool = False
    replaces_record: bool = False

    def __bool__(self) -> bool:
        return bool(self.ansible or self.classed or self.renewed)


@dataclass(frozen=True, slots=True)
class HostsToConfigure:
    """Decides which hosts are configured, and how, by what was recorded and what hosts show now.

    groups: group -> digest of everything that its hosts have in common.
    files: the files that each host has for itself, if hosts may need no more than these.
    """

    inventory: Inventory
    recorded: Configured
    reports: Mapping[str, HostReport]
    rendered: Rendered
    groups: Mapping[str, str]
    files: NodeFiles

    def of_limit(self, limit: Collection[str]) -> Work:
        """Return the work on these hosts and the controller; the others only learn of them."""
        ansible = tuple(
            host.name for host in self.inventory.hosts if host.name in limit or host.is_controller
        )
        others = (host for host in self.recorded.marks if host in self.reports and host not in ansible)
        return Work(ansible, tuple(others), reconfigures=True, replaces_record=True)

    def choose(self, classed: Collection[str], *, again: bool) -> Work:
        """Return the work on all hosts if what goes in has changed, or ``again``; else on those that drifted.

        classed: new hosts that came with the files of their class.
        """
        marks = _marks(self.reports)
        everything = again or self.recorded.inputs != self.rendered.inputs
        hosts = self.inventory.names if everything else hosts_with_drift(self.recorded.marks, marks)
        ready = () if again else self._without_cards(host for host in classed if host in self.reports)
        renewed = self._to_renew(marks) if everything and not again else ()
        lead = self.inventory.controller.name
        drifted_on_lead = drifted(self.recorded.marks.get(lead, {}), marks[lead])
        return Work(
            tuple(host for host in hosts if host not in (*ready, *renewed)),
            classed=ready if hosts else (),
            renewed=renewed,
            # Other nodes' slurmd are not restarted for what concerns a single node.
            reconfigures=touches_slurm(drifted_on_lead) or (everything and bool(self.recorded.marks)),
            replaces_record=everything,
        )

    def _to_renew(self, marks: Mapping[str, Checksums]) -> tuple[str, ...]:
        """The hosts whose group has not changed, and that lack nothing but newer files of their own."""
        before = self.recorded
        same = {group for group, inputs in self.groups.items() if inputs == before.groups.get(group)}
        known = (host.name for host in self.inventory.hosts if same & {*host.roles})
        return tuple(
            host
            for host in self._without_cards(name for name in known if name in before.marks)
            if not drifted(before.marks[host], marks[host]) and can_renew(self.files[host], marks[host])
        )

    def _without_cards(self, hosts: Iterable[str]) -> tuple[str, ...]:
        gpus = json.loads(self.rendered.files[inventory_file.GPUS_FILE])
        return tuple(host for host in hosts if not any(gpus.get(host, {}).values()))


def _change_hosts(
    cluster: ClusterContext,
    inventory: Inventory,
    work: Work,
    reports: Mapping[str, HostReport],
    files: NodeFiles,
) -> tuple[Mapping[str, HostReport], str]:
    """Configure these hosts. Return their new reports, and a summary."""
    to = cluster.connections.to
    seen: dict[str, HostReport] = {}
    summary = []
    if work.introduced:
        results = ansible.run("introduce", inventory, cluster.workspace, hosts=work.introduced)
        recap = follow(results, SILENT)
        summary.append(f"{recap.changed} changed on others")
    if work.ansible:
        summary.insert(0, str(_run("configure", cluster, inventory, work.ansible)))
        seen |= cluster.probe(inventory, (*work.ansible, *work.introduced))
    parallel_map(work.renewed, lambda host: renew(files[host], reports[host].checksums, to(host)))
    if work.reconfigures and isinstance(scheduler := cluster.scheduler(inventory), Nodes):
        scheduler.reconfigure()
    expected: dict[str, Checksums] = {
        host: {**reports[host].checksums, **own_marks(files[host])} for host in work.renewed
    }
    expected |= {host: own_marks(files[host]) for host in work.classed}
    if expected:
        compute = [host.name for host in inventory.compute if host.name in work.classed]
        # The controller was not there at their boot: newer slurmd ask again after 10 s only.
        parallel_map(compute, lambda host: to(host).run(_START_SLURMD))
        checked, unlike = _take_in(cluster, inventory, expected, reports)
        seen |= checked
        summary.append(f"{len(expected) - len(unlike)} hosts as their class")
    return seen, "; ".join(summary)


def _take_in(
    cluster: ClusterContext,
    inventory: Inventory,
    expected: Mapping[str, Checksums],
    reports: Mapping[str, HostReport],
) -> tuple[dict[str, HostReport], tuple[str, ...]]:
    """Look at hosts that should be as expected without Ansible, and configure those that are not.

    reports: of the hosts as they were seen before. Returns the new reports, and the hosts that were unlike.
    """
    seen = {host: reports[host] for host in expected if shows(expected[host], reports[host].checksums)}
    if rest := expected.keys() - seen.keys():
        seen |= cluster.probe(inventory, rest)
    unlike = tuple(host for host in expected if not shows(expected[host], seen[host].checksums))
    if unlike:
        _run("configure", cluster, inventory, unlike)
        seen |= cluster.probe(inventory, unlike)
    return seen, unlike


def _marks(reports: Mapping[str, HostReport]) -> dict[str, Checksums]:
    return {host: report.checksums for host, report in reports.items()}


def _run(
    playbook: Literal["configure", "install_first"],
    cluster: ClusterContext,
    inventory: Inventory,
    hosts: Collection[str],
) -> events.Recap:
    ordered = [name for name in inventory.names if name in hosts]
    return follow(ansible.run(playbook, inventory, cluster.workspace, hosts=ordered), cluster.reporter)


def _installed(
    cluster: ClusterContext,
    inventory: Inventory,
    reports: Mapping[str, HostReport],
    concerned: Collection[str],
) -> Mapping[str, HostReport]:
    """Return the reports with what only slurmd can tell of a node; install slurmd first if it is missing.

    A driver that does not show all cards is installed, too, because Slurm is told of the cards that it shows.
    Whatever else the ``concerned`` hosts and the controller lack is installed in the same run.
    """
    spec, workspace = cluster.spec, cluster.workspace
    known = [(host, reports[host.name]) for host in inventory.compute]
    asked = {host.name for host, seen in known if needs_facts(inventory, host) and seen.facts is None}
    if spec.software.nvidia.has_driver and (asked or stale(cluster, inventory, reports)):
        hidden = {host.name for host, seen in known if seen.cards > seen.driver.cards}
        asked |= hidden.intersection(concerned)
    if not asked:
        return reports
    others = (
        ()
        if inventory.baked
        else inventory_file.hosts_to_install(inventory, spec.software, reports, cluster.connections.to)
    )
    chosen = asked | {host.name for host in others if host.is_controller or host.name in concerned}
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    _run("install_first", cluster, inventory, chosen)
    return {**reports, **cluster.probe(inventory, asked)}


def stale(cluster: ClusterContext, inventory: Inventory, reports: Mapping[str, HostReport]) -> Notice | None:
    """Return why ``converge`` would configure all of these hosts, which stay as they are; else None."""
    recorded = _read(cluster.workspace)
    if not recorded.inputs:
        return UNFINISHED
    same = without_jitter(reports, recorded.hardware)
    rendered = inputs_of(cluster.spec, with_plugins(inventory, same), cluster.workspace, same)
    if rendered.inputs == recorded.inputs:
        return None
    return Notice(
        "hosts-outdated",
        "the spec, clusterctl itself or the hardware is not what the hosts were configured for",
    )


def pending_changes(
    cluster: ClusterContext, inventory: Inventory, reports: Mapping[str, HostReport]
) -> NodeConfig:
    """The changes of hardware that ``converge`` would take up, and those that would wait."""
    at_work = partial(nodes_with_jobs, cluster.scheduler(inventory, patience_s=SHORT_PATIENCE_S), drain=False)
    recorded = _read(cluster.workspace).hardware
    return node_config(cluster.spec, inventory, reports, recorded, at_work, concerned=inventory.names)


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


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files that are made for hosts, Slurm's among them; and a digest of all that configuring uses."""

    inputs: str
    files: Mapping[str, str]

    def write(self, workspace: Workspace) -> None:
        """Write the files where Ansible reads them."""
        for name, content in self.files.items():
            write_atomic(workspace.rendered / name, content)


def inputs_of(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> Rendered:
    """Render the files for these hosts."""
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
    return Rendered(digest(ansible_hash(), variables, *secrets, cards, *made), files)


def render(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> Rendered:
    """Render the files for these hosts, and write all that Ansible reads."""
    inventory = with_plugins(inventory, reports)
    rendered = inputs_of(spec, inventory, workspace, reports)
    rendered.write(workspace)
    inventory_file.write_ansible_inventory(spec, inventory, workspace)
    return rendered


def _read(workspace: Workspace, without: Collection[str] = ()) -> Configured:
    """What was recorded, but for hosts that were recreated since."""
    try:
        recorded = Configured.model_validate_json(workspace.configured.read_bytes())
    except (FileNotFoundError, ValidationError):
        return Configured()
    marks = {host: seen for host, seen in recorded.marks.items() if host not in without}
    has = {host: one for host, one in recorded.hardware.items() if host not in without}
    return recorded.model_copy(update={"marks": marks, "hardware": has})


def _write(workspace: Workspace, recorded: Configured) -> None:
    write_atomic(workspace.configured, recorded.model_dump_json(indent=1) + "\n")
