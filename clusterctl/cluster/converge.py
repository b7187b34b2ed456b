"""Configuration of new hosts, and of hosts whose files or services have drifted since `up`.

Ansible runs only if a host, or the hash of all inputs, differs from the record of the last `up`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.drift import (
    ACCOUNTING,
    drift_of_host,
    drifted,
    hosts_with_drift,
    lost_packages,
    matches,
    people_marks,
    repairs_of,
    touches_slurm,
    wanted_marks,
)
from clusterctl.cluster.hardware import (
    NodeConfig,
    NodeHardware,
    cgroup_notes,
    fetch_gpu_wheels,
    gpus_file,
    hardware,
    node_config,
    nodes_with_jobs,
    with_recorded_memory,
    without_missing_cgroups,
)
from clusterctl.cluster.host_files import (
    can_renew,
    expected_marks,
    marks_from_template,
    node_files,
    record_wanted,
    render_host_files,
    renew,
)
from clusterctl.cluster.phases import Drift, PhaseResult
from clusterctl.cluster.template_inputs import inputs_of_templates
from clusterctl.configure import ansible, events, inventory_file
from clusterctl.errors import Notice
from clusterctl.hosts.probe import Checksums, HostReport
from clusterctl.providers.base import Provisioned
from clusterctl.providers.templates import NodeFiles
from clusterctl.scheduler.session import SHORT_PATIENCE_S
from clusterctl.scheduler.slurm.conf import (
    needs_facts,
    render_files,
)
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import SLURMD_PORT
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace, this_person, write_atomic
from clusterctl.util import formatting
from clusterctl.util.assets import ansible_hash, digest
from clusterctl.util.numbers import counted
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import SILENT, report_steps

UNFINISHED = Notice("up-unfinished", "the last `clusterctl up` did not finish")

# Recorded instead of a digest after `up --limit`, so the next `up` without --limit configures all
# hosts.
_PARTIAL = "some hosts"

_START_SLURMD = (
    "sudo",
    "-n",
    "sh",
    "-c",
    f'ss -Hltn "sport = :{SLURMD_PORT}" | grep -q . || systemctl restart slurmd',
)


class ClusterRecord(BaseModel):
    """What the controller keeps of the last `up` for all hosts (``Wanted.cluster``), so that each
    administrator of the cluster sees the same.

    inputs: hash of all inputs of the configuration. Empty until `up` has configured all hosts.
    groups: group of hosts -> hash of the inputs that are the same for all hosts of the group.
    hardware: node -> the hardware that the node is configured for. Written before the nodes are
        configured.
    accounting: the mark of Slurm's accounting, as `up` left it.
    people: the wanted marks of accounts and their keys.
    by: who ran the last `up` that configured the hosts, and when.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: str = ""
    groups: Mapping[str, str] = {}
    hardware: Mapping[str, NodeHardware] = {}
    accounting: str = ""
    people: Checksums = {}
    by: str = ""


@dataclass(frozen=True, slots=True)
class WantedState:
    """What `up` wants on the hosts. marks: configured host -> the wanted marks of its items."""

    cluster: ClusterRecord = field(default_factory=ClusterRecord)
    marks: Mapping[str, Checksums] = field(default_factory=dict)


def converge(
    cluster: ClusterContext,
    provisioned: Provisioned,
    reports: Mapping[str, HostReport],
    *,
    limit: Collection[str] | None,
    again: bool = False,
) -> PhaseResult[Mapping[str, HostReport]]:
    """Configure new and changed hosts, and report each repair. Return host -> new probe result (all
    hosts).

    limit: configure only these hosts and the controller. None: all hosts.
    again: also configure hosts that need no change.
    """
    workspace = cluster.workspace
    inventory = provisioned.inventory
    slurm = cluster.scheduler(inventory, patience_s=SHORT_PATIENCE_S)
    wanted = wanted_of(inventory, reports, provisioned.made)
    recorded = wanted.cluster
    concerned = inventory.names if limit is None else limit
    reports = _install_slurmd(cluster, inventory, reports, concerned)
    at_work = partial(nodes_with_jobs, slurm, drain=True)
    nodes = node_config(
        cluster.spec, inventory, reports, recorded.hardware, at_work, concerned=concerned
    )
    rendered = render(cluster.spec, inventory, workspace, nodes.reports)
    fetch_gpu_wheels(cluster, inventory, nodes.reports)
    notes = (*nodes.notes, *cgroup_notes(inventory, nodes.reports))
    has_changed = rendered.inputs != recorded.inputs
    groups = (
        {} if limit else inputs_of_templates(cluster, inventory) if has_changed else recorded.groups
    )
    needs_files = provisioned.from_template or (groups and has_changed)
    files = (
        node_files(cluster.spec, inventory, workspace, rendered.files, reports)
        if needs_files
        else {}
    )
    hosts = HostChooser(inventory, wanted, reports, rendered, groups, files)
    work = (
        hosts.choose_limited(limit)
        if limit
        else hosts.choose(provisioned.from_template, again=again)
    )
    if not work:
        return PhaseResult(reports, f"unchanged: {counted(len(reports), 'host')} checked", notes)

    current = hardware(cluster.spec, inventory, nodes.reports)
    if work.replaces_record:
        workspace.note_configuration()
        if recorded.hardware or recorded.inputs:
            begun = recorded.model_copy(update={"inputs": "", "groups": {}, "hardware": current})
            _record(cluster, inventory, begun)
    new_reports, summary = _change_hosts(cluster, inventory, work, reports, files)
    inputs = _PARTIAL if limit else rendered.inputs
    all_reports = {**reports, **new_reports}
    left = all_reports[inventory.controller.name].checksums.get(ACCOUNTING, "")
    last = ClusterRecord(
        inputs=inputs,
        groups=groups,
        hardware=current,
        accounting=left,
        people=people_marks(cluster.spec),
        by=f"{this_person()}, {formatting.moment(time.time())}",
    )
    _record(cluster, inventory, last)
    workspace.note_configuration(inputs)
    # Without recorded inputs, the earlier state of the hosts is unknown, so no repair can be
    # reported.
    if limit or recorded.inputs:
        cluster.report_repairs(
            Drift(host, change, "configured") for host, change in nodes.applied.items()
        )
    if recorded.inputs and not limit:
        for host in sorted(reports.keys() & wanted.marks.keys()):
            marks = (wanted.marks[host], reports[host].checksums, all_reports[host].checksums)
            cluster.report_repairs(repairs_of(host, *marks))
    return PhaseResult(all_reports, summary, notes)


@dataclass(frozen=True, slots=True)
class HostsToConfigure:
    """The hosts to configure, in a field for each way of configuring.

    ansible: hosts on which Ansible runs every role.
    introduced: hosts on which Ansible only updates the list of the cluster's hosts.
    from_template: new hosts that were created with their configuration already in place.
    renewed: hosts on which only host-specific files are rewritten.
    reconfigures: whether to run `scontrol reconfigure`.
    replaces_record: whether to invalidate the record of the last `up` until these hosts are
        configured.
    """

    ansible: tuple[str, ...] = ()
    introduced: tuple[str, ...] = ()
    from_template: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    reconfigures: bool = False
    replaces_record: bool = False

    def __bool__(self) -> bool:
        return bool(self.ansible or self.from_template or self.renewed)


@dataclass(frozen=True, slots=True)
class HostChooser:
    """Chooses the hosts to configure, by comparing what is wanted with new probe results.

    groups: group of hosts -> hash of the inputs that are the same for all hosts of the group.
    files: host -> its host-specific files. Empty if no host can be configured by rewriting only
        these files.
    """

    inventory: Inventory
    wanted: WantedState
    reports: Mapping[str, HostReport]
    rendered: RenderedFiles
    groups: Mapping[str, str]
    files: NodeFiles

    def choose_limited(self, limit: Collection[str]) -> HostsToConfigure:
        """For `up --limit`: choose these hosts and the controller. Other hosts only get the list of
        hosts.
        """
        ansible = tuple(
            host.name for host in self.inventory.hosts if host.name in limit or host.is_controller
        )
        introduced = (
            host for host in self.wanted.marks if host in self.reports and host not in ansible
        )
        return HostsToConfigure(ansible, tuple(introduced), reconfigures=True, replaces_record=True)

    def choose(self, from_template: Collection[str], *, again: bool) -> HostsToConfigure:
        """Choose all hosts if inputs changed or ``again`` is set, else only new and changed hosts.

        from_template: new hosts that were created with their configuration already in place.
        """
        marks = _marks(self.reports)
        configures_all = again or self.wanted.cluster.inputs != self.rendered.inputs
        host_names = (
            self.inventory.names if configures_all else hosts_with_drift(self.wanted.marks, marks)
        )
        ready = (
            ()
            if again
            else self._without_cards(host for host in from_template if host in self.reports)
        )
        renewed = self._to_renew(marks) if configures_all and not again else ()
        controller = self.inventory.controller.name
        controller_drift = drifted(self.wanted.marks.get(controller, {}), marks[controller])
        return HostsToConfigure(
            tuple(host for host in host_names if host not in (*ready, *renewed)),
            from_template=ready if host_names else (),
            renewed=renewed,
            # Drift on a single node does not concern the slurmd of other nodes.
            reconfigures=touches_slurm(controller_drift)
            or (configures_all and bool(self.wanted.marks)),
            replaces_record=configures_all,
        )

    def _to_renew(self, marks: Mapping[str, Checksums]) -> tuple[str, ...]:
        """Return the hosts that need no Ansible: at most their host-specific files are outdated."""
        wanted = self.wanted.marks
        groups = self.wanted.cluster.groups
        unchanged = {group for group, inputs in self.groups.items() if inputs == groups.get(group)}
        candidates = (host.name for host in self.inventory.hosts if unchanged & {*host.roles})
        return tuple(
            host
            for host in self._without_cards(name for name in candidates if name in wanted)
            if not drifted(wanted[host], marks[host]) and can_renew(self.files[host], marks[host])
        )

    def _without_cards(self, hosts: Iterable[str]) -> tuple[str, ...]:
        gpus = json.loads(self.rendered.files[inventory_file.GPUS_FILE])
        return tuple(host for host in hosts if not any(gpus.get(host, {}).values()))


def _change_hosts(
    cluster: ClusterContext,
    inventory: Inventory,
    work: HostsToConfigure,
    reports: Mapping[str, HostReport],
    files: NodeFiles,
) -> tuple[Mapping[str, HostReport], str]:
    """Configure the hosts chosen in ``work``. Return (host -> new probe result, summary)."""
    connect = cluster.connections.to
    new_reports: dict[str, HostReport] = {}
    summary = []
    if work.introduced:
        results = ansible.run("introduce", inventory, cluster.workspace, hosts=work.introduced)
        recap = report_steps(results, SILENT)
        summary.append(f"{recap.changed} changed on other hosts")
    if work.ansible:
        summary.insert(0, str(_run_playbook("configure", cluster, inventory, work.ansible)))
        new_reports |= cluster.probe(inventory, (*work.ansible, *work.introduced))
    parallel_map(
        work.renewed, lambda host: renew(files[host], reports[host].checksums, connect(host))
    )
    if work.reconfigures:
        cluster.scheduler(inventory).reconfigure()
    expected: dict[str, Checksums] = {
        host: {**reports[host].checksums, **expected_marks(files[host])} for host in work.renewed
    }
    expected |= marks_from_template(
        cluster.spec, inventory, {host: files[host] for host in work.from_template}
    )
    if expected:
        parallel_map(
            work.from_template,
            lambda host: record_wanted(connect(host), marks=expected_marks(files[host])),
        )
        compute = [host.name for host in inventory.compute if host.name in work.from_template]
        # These nodes booted before the controller was ready, and newer slurmd retries only after 10
        # s.
        parallel_map(compute, lambda host: connect(host).run(_START_SLURMD))
        checked, differing = _check_without_ansible(cluster, inventory, expected, reports)
        new_reports |= checked
        unchanged = counted(len(expected) - len(differing), "host")
        summary.append(f"{unchanged} already up to date")
    return new_reports, "; ".join(summary)


def _check_without_ansible(
    cluster: ClusterContext,
    inventory: Inventory,
    expected: Mapping[str, Checksums],
    reports: Mapping[str, HostReport],
) -> tuple[dict[str, HostReport], tuple[str, ...]]:
    """Check hosts configured without Ansible. Run Ansible on hosts that differ from ``expected``.

    expected: host -> the checksums and states of a host that is configured correctly.
    Returns (host -> new probe result, the hosts on which Ansible ran).
    """
    checked = {
        host: reports[host] for host in expected if matches(expected[host], reports[host].checksums)
    }
    if unknown_hosts := expected.keys() - checked.keys():
        checked |= cluster.probe(inventory, unknown_hosts)
    differing = tuple(
        host for host in expected if not matches(expected[host], checked[host].checksums)
    )
    if differing:
        _run_playbook("configure", cluster, inventory, differing)
        checked |= cluster.probe(inventory, differing)
    return checked, differing


def _marks(reports: Mapping[str, HostReport]) -> dict[str, Checksums]:
    return {host: report.checksums for host, report in reports.items()}


def _run_playbook(
    playbook: Literal["configure", "install_first"],
    cluster: ClusterContext,
    inventory: Inventory,
    hosts: Collection[str],
) -> events.Recap:
    ordered_hosts = [name for name in inventory.names if name in hosts]
    return report_steps(
        ansible.run(playbook, inventory, cluster.workspace, hosts=ordered_hosts), cluster.reporter
    )


def _install_slurmd(
    cluster: ClusterContext,
    inventory: Inventory,
    reports: Mapping[str, HostReport],
    concerned: Collection[str],
) -> Mapping[str, HostReport]:
    """Install slurmd on nodes without it. Return host -> probe result, with detected hardware.

    Also install NVIDIA's driver where it shows fewer GPUs than the PCI bus, because Slurm is
    configured with the GPUs that the driver shows. If any node needs either, the same run of
    Ansible installs all missing packages on the hosts to configure (``concerned``) and on the
    controller.
    """
    spec = cluster.spec
    workspace = cluster.workspace
    nodes = [(host, reports[host.name]) for host in inventory.compute]
    lacking = {
        host.name for host, report in nodes if needs_facts(inventory, host) and report.facts is None
    }
    if spec.software.nvidia.has_driver and (lacking or why_outdated(cluster, inventory, reports)):
        hidden = {host.name for host, report in nodes if report.cards > report.driver.cards}
        lacking |= hidden.intersection(concerned)
    if not lacking:
        return reports
    others = (
        ()
        if inventory.baked
        else inventory_file.hosts_to_install(
            inventory, spec.software, reports, cluster.connections.to
        )
    )
    chosen = lacking | {
        host.name for host in others if host.is_controller or host.name in concerned
    }
    variables = inventory_file.cluster_variables(spec, inventory, workspace)
    inventory_file.write_inventory(inventory, workspace, variables)
    _run_playbook("install_first", cluster, inventory, chosen)
    return {**reports, **cluster.probe(inventory, lacking)}


def why_outdated(
    cluster: ClusterContext, inventory: Inventory, reports: Mapping[str, HostReport]
) -> Notice | None:
    """Return why `up` would configure all hosts, if so: changed inputs, or an unfinished `up`."""
    recorded = wanted_of(inventory, reports).cluster
    if not recorded.inputs:
        return UNFINISHED
    same = with_recorded_memory(reports, recorded.hardware)
    rendered = inputs_of(
        cluster.spec, without_missing_cgroups(inventory, same), cluster.workspace, same
    )
    if rendered.inputs == recorded.inputs:
        return None
    return Notice(
        "hosts-outdated",
        f"the spec, clusterctl or the hardware differs from that of the last `up` (by {recorded.by})",
    )


def pending_changes(
    cluster: ClusterContext, inventory: Inventory, reports: Mapping[str, HostReport]
) -> NodeConfig:
    """Return the changes of hardware that `up` would configure, and those it would postpone."""
    at_work = partial(
        nodes_with_jobs, cluster.scheduler(inventory, patience_s=SHORT_PATIENCE_S), drain=False
    )
    recorded = wanted_of(inventory, reports).cluster.hardware
    return node_config(
        cluster.spec, inventory, reports, recorded, at_work, concerned=inventory.names
    )


def packages_lost_on(inventory: Inventory, reports: Mapping[str, HostReport]) -> Mapping[str, str]:
    """Return host -> the packages that were removed since the host was configured."""
    wanted = wanted_of(inventory, reports).marks
    lost = {host: lost_packages(marks, reports[host].checksums) for host, marks in wanted.items()}
    return {host: packages for host, packages in lost.items() if packages}


def drift_of(inventory: Inventory, reports: Mapping[str, HostReport]) -> Iterator[Drift]:
    """Yield each difference between these hosts and what is wanted on them."""
    wanted = wanted_of(inventory, reports).marks
    for host, report in reports.items():
        if host not in wanted:
            yield Drift(host, "is not configured yet")
            continue
        yield from drift_of_host(host, wanted[host], report.checksums)


def wanted_of(
    inventory: Inventory,
    reports: Mapping[str, HostReport],
    recreated: Collection[str] = (),
) -> WantedState:
    """Return what is wanted on the hosts that answered, as the last `up` has recorded it on them.

    recreated: hosts whose record is that of the template from which they were just created.
    """
    controller = inventory.controller.name
    try:
        answered = reports[controller].wanted.cluster if controller in reports else {}
        cluster = ClusterRecord.model_validate(answered)
    except ValidationError:
        # Another version of clusterctl has written it.
        cluster = ClusterRecord()
    marks = {
        host: wanted_marks(report.wanted.marks, cluster.people, report.checksums)
        for host, report in reports.items()
        if report.wanted.marks and host not in recreated
    }
    if controller in marks and cluster.accounting:
        marks[controller] = {**marks[controller], ACCOUNTING: cluster.accounting}
    sizes = {host: size for host, size in cluster.hardware.items() if host not in recreated}
    return WantedState(cluster.model_copy(update={"hardware": sizes}), marks)


def _record(cluster: ClusterContext, inventory: Inventory, recorded: ClusterRecord) -> None:
    controller = cluster.connections.to(inventory.controller.name)
    record_wanted(controller, cluster=recorded.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class RenderedFiles:
    """The files generated for the hosts: name -> content. inputs: hash of all inputs of the
    configuration.
    """

    inputs: str
    files: Mapping[str, str]

    def write(self, workspace: Workspace) -> None:
        """Write the files to the folder that Ansible reads."""
        for name, content in self.files.items():
            path = workspace.rendered / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(path, content)


def inputs_of(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> RenderedFiles:
    """Generate the configuration files for these hosts, and hash all inputs. Write nothing."""
    facts = {host: report.facts for host, report in reports.items() if report.facts}
    slurm = render_files(spec, inventory, facts)
    drivers = {host: report.driver for host, report in reports.items()}
    files = {
        **render_host_files(spec, inventory, slurm, drivers),
        inventory_file.GPUS_FILE: gpus_file(spec, inventory, reports),
    }
    # `up` restores a missing key from a host.
    munge_key = workspace.munge_key.read_bytes() if workspace.has_munge_key else b""
    secrets = (munge_key, workspace.read_admin_key())
    variables = inventory_file.cluster_variables(spec, inventory, workspace)
    hosts = inventory_file.inventory_text(inventory, workspace, variables)
    cards = json.dumps(
        {host: size.cards for host, size in hardware(spec, inventory, reports).items()}
    )
    contents = (files[name] for name in sorted(files))
    return RenderedFiles(digest(ansible_hash(), hosts, *secrets, cards, *contents), files)


def render(
    spec: ClusterSpec, inventory: Inventory, workspace: Workspace, reports: Mapping[str, HostReport]
) -> RenderedFiles:
    """Generate and write the configuration files for these hosts, and the Ansible inventory."""
    inventory = without_missing_cgroups(inventory, reports)
    rendered = inputs_of(spec, inventory, workspace, reports)
    rendered.write(workspace)
    variables = inventory_file.cluster_variables(spec, inventory, workspace)
    inventory_file.write_inventory(inventory, workspace, variables)
    return rendered
