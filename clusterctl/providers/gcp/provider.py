"""GPU nodes on Google Cloud: ClusterSpec -> Terraform -> Inventory."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import LockedError, ProvisionError, StalePlanError
from clusterctl.providers.base import Leftover, Planned, Provider, Provisioned, Sizes, hosts_as_raised
from clusterctl.providers.gcp import costs, orphans, tfvars
from clusterctl.providers.gcp.api import Api, check_gcloud, host_keys, iap_tunnel
from clusterctl.providers.gcp.apply import (
    INSTANCE,
    Owner,
    Place,
    apply_plan,
    explaining,
    host_changes,
    lost,
    names,
    other_changes,
    refuse_another,
    refuse_moved,
)
from clusterctl.providers.gcp.orphans import ID_LABEL
from clusterctl.providers.gcp.terraform.client import Plan, Terraform
from clusterctl.providers.gcp.tfvars import variables
from clusterctl.spec import gcp
from clusterctl.spec.base import Model
from clusterctl.spec.distributions import UNSEEN
from clusterctl.spec.gcp import GcpProvider as Settings
from clusterctl.spec.gcp_nodes import Machine
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, SharedFolder
from clusterctl.state.journal import digest
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Reporter
from clusterctl.util.tables import table

SHARED: Final = "/shared"


class GcpProvider(Provider):
    """Nodes on Google Cloud."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._api = Api(settings.project)
        self._shown: tuple[str, Plan] | None = None  # the variables' digest, and what was shown of them
        self._is_done = False  # what was shown

    def check(self, spec: ClusterSpec) -> None:
        if refused := gcp.refusal(spec):
            raise refused
        check_gcloud()

    def plan(self, spec: ClusterSpec, workspace: Workspace, *, keep: Sizes, report: Reporter) -> Planned:  # noqa: ARG002
        asked = self._write_module(spec, workspace)
        terraform = self._terraform(workspace, spec.controller_host, report)
        terraform.init()
        plan = terraform.plan()
        refuse_another(plan, workspace.cluster_id())
        refuse_moved(plan, self._settings.project)
        self._shown = (asked, plan)
        order = {name: place for place, name in enumerate(_names(spec))}
        hosts = host_changes(plan, costs.host_price(spec))
        now, _ = costs.others((c.type, c.before) for c in plan.changes if c.before is not None)
        then, unknown = costs.others((c.type, c.after) for c in plan.changes if c.after is not None)
        return Planned(
            tuple(sorted(hosts, key=lambda host: order.get(host.name, len(order)))),
            other_changes(plan),
            priced_on=costs.table().date,
            other_usd_per_hour=(now, then),
            other_unpriced=unknown,
            other_lost=lost(plan),
            notes=(*_notes(spec), *filter(None, [costs.caveat(self._settings.region_name)])),
        )

    def apply(self, spec: ClusterSpec, workspace: Workspace, *, keep: Sizes, report: Reporter) -> Provisioned:  # noqa: ARG002
        asked = self._write_module(spec, workspace)
        terraform = self._terraform(workspace, spec.controller_host, report)
        terraform.init()
        shown_for, plan = self._shown or (asked, self._since_shown(terraform))
        if shown_for != asked:
            plan = terraform.rest_of(plan)  # which refuses to go beyond what was shown
        if not plan.is_empty:
            apply_plan(terraform, plan, Owner(workspace.cluster_id()), report=report)
        self._shown, self._is_done = None, True
        made, started = _new_hosts(plan)
        inventory = self._inventory(spec, workspace, terraform.outputs(), report)
        return Provisioned(inventory, _notes(spec), made, started)

    def _since_shown(self, terraform: Terraform) -> Plan:
        """What there is to do where nothing was shown, or all of that is done: hosts that went down since."""
        plan = terraform.plan()
        gone = [host.name for host in host_changes(plan) if host.destroys]
        if self._is_done and (gone or lost(plan)):
            raise StalePlanError(
                "what there is to do has changed since it was shown",
                why=f"this would go, or be made anew: {', '.join([*gone, *lost(plan)])}",
                fix="run the same command again: it starts from how things are now",
            )
        return plan

    def alive(self, cluster_id: str) -> bool:
        path = f"projects/{self._settings.project}/aggregated/instances"  # the spec's zone may be a new one
        pages = self._api.pages("compute", path, filter=f"labels.{ID_LABEL}={cluster_id}")
        return any(
            row["status"] not in costs.OFF and orphans.read_labels(row).get(ID_LABEL) == cluster_id
            for page in pages
            for zone in page.get("items", {}).values()
            for row in zone.get("instances", ())
        )

    def destroy(self, cluster_id: str, *, workspace: Workspace | None, report: Reporter) -> None:
        if workspace is not None and tfvars.has_module(workspace.terraform):
            terraform = self._terraform(workspace, tfvars.controller_of(workspace.terraform), report)
            owner = Owner(cluster_id, lambda: self._remove_found(cluster_id, report))
            try:
                terraform.init()
                plan = terraform.plan(destroy=True)
                refuse_another(plan, cluster_id)
                apply_plan(terraform, plan, owner, report=report)
            except LockedError:
                raise
            except ProvisionError as exc:  # what it left is found and removed without it
                report(exc.cause)
        self._remove_found(cluster_id, report)

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:
        found = orphans.find_resources(self._api, cluster_id)
        return tuple(one.priced for one in found if not one.kept)

    def orphans(self, name: str) -> tuple[str, ...]:
        return orphans.orphan_ids(self._api, name)

    def _remove_found(self, cluster_id: str, report: Reporter) -> None:
        """Remove what the API shows of the cluster, whatever Terraform knows."""
        found = orphans.find_resources(self._api, cluster_id)
        orphans.remove_resources(self._api, found, report=report)
        for one in found:
            if one.kept:
                report(f"kept: {one.what}: {one.kept}")

    def _write_module(self, spec: ClusterSpec, workspace: Workspace) -> str:
        """Bring the folder of Terraform up to date; a digest of what is asked for."""
        asked = variables(spec, workspace.cluster_id(), workspace.public_key.read_text())
        tfvars.write_module(workspace.terraform, asked, self._settings.state, cluster=spec.name)
        return digest((workspace.terraform / tfvars.VARIABLES).read_bytes())

    def _terraform(self, workspace: Workspace, controller: str, report: Reporter) -> Terraform:
        settings = self._settings
        place = Place(settings.project, settings.zone, controller, enables_apis=settings.enable_apis)
        return Terraform(workspace.terraform, report, explain=explaining(place), names=names(place))

    def _inventory(
        self, spec: ClusterSpec, workspace: Workspace, outputs: Mapping[str, Any], report: Reporter
    ) -> Inventory:
        names, hosts = _names(spec), outputs["hosts"]
        before = ((host, hosts.get(host.name)) for host in hosts_as_raised(workspace).values())
        same = {host.name: host for host, now in before if now and now["instance_id"] == host.instance_id}
        keys = {name: host.host_key for name, host in same.items()}
        if missing := [name for name in names if name not in keys]:
            keys |= host_keys(self._api, self._settings.zone, missing, report=report)
        return Inventory(
            cluster=spec.name,
            cluster_id=workspace.cluster_id(),
            provider=self._settings.type,
            hosts=tuple(self._host(spec, name, hosts[name], keys[name], same.get(name)) for name in names),
            network=outputs.get("network_cidr") or self._subnetwork_cidr(),
            shared=SHARED,
            shared_folder=SharedFolder.model_validate(outputs["shared"]),
            bucket=outputs.get("bucket"),
            baked=False,
        )

    def _host(
        self, spec: ClusterSpec, name: str, output: Mapping[str, Any], host_key: str, before: Host | None
    ) -> Host:
        partition = next((p for p in spec.partitions if p.name == output["partition"]), None)
        nodes = self._settings.nodes_of(partition.name) if partition else self._settings.controller
        machine = gcp.machine_of(spec, partition) if partition else gcp.controller_machine(spec)
        return Host(
            name=name,
            address=output["address"],
            roles=(COMPUTE if partition else CONTROLLER,),
            partition=partition.name if partition else None,
            host_key=host_key,
            distribution=before.distribution if before else UNSEEN,
            instance_id=output["instance_id"],
            cpus=output.get("cpus"),  # these two only by an override of the module
            memory_mib=output.get("memory_mib"),
            proxy_command=iap_tunnel(name, project=self._settings.project, zone=self._settings.zone),
            job_environment=job_environment(machine, gvnic=nodes.gvnic or machine.gvnic_only),
            local_ssds=nodes.local_ssds + machine.bundled_ssds,
        )

    def _subnetwork_cidr(self) -> str:
        """The addresses of a subnetwork that was there before."""
        region, name = self._settings.region_name, self._settings.network.subnetwork
        path = f"projects/{self._settings.project}/regions/{region}/subnetworks/{name}"
        return str(IPv4Network(self._api.get("compute", path)["ipCidrRange"]))


def _names(spec: ClusterSpec) -> tuple[str, ...]:
    """All hosts, the controller first."""
    return (spec.controller_host, *(name for p in spec.partitions for name in spec.node_names(p)))


def _new_hosts(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts that a plan makes, and those that were there and did not run."""
    instances = [change for change in plan.changes if change.type == INSTANCE]
    found = {(change.after or change.before or {})["name"]: change for change in instances}
    made = tuple(name for name, change in found.items() if change.action in ("create", "replace"))
    off = (name for name, change in found.items() if (change.before or {}).get("current_status") in costs.OFF)
    return made, tuple(name for name in off if name not in made)


def _notes(spec: ClusterSpec) -> tuple[str, ...]:
    partitions = (gcp.machine_of(spec, partition) for partition in spec.partitions)
    notes = map(network_note, (gcp.controller_machine(spec), *partitions))
    return tuple(dict.fromkeys(filter(None, notes)))


_NAME_PARTS: Final = 2  # of a machine type, that name its family: a3-highgpu


class _JobsData(Model):
    gpu: Mapping[str, str]
    gvnic: Mapping[str, str]
    notes: Mapping[str, str]


def job_environment(machine: Machine, *, gvnic: bool) -> dict[str, str]:
    """The variables of all jobs on such a machine; none where there is no GPU."""
    if machine.gpu is None:
        return {}
    return {**_jobs_data().gpu, **(_jobs_data().gvnic if gvnic else {})}


def network_note(machine: Machine) -> str | None:
    """What its network could do beyond plain sockets, and what that takes."""
    family = "-".join(machine.name.split("-")[:_NAME_PARTS])
    said = _jobs_data().notes.get(family)
    return f"{family}: jobs talk over gVNIC's sockets; {said} (docs/gcp.md)" if said else None


def _jobs_data() -> _JobsData:
    return table(Path(__file__).with_name("data") / "jobs.yaml", _JobsData)
