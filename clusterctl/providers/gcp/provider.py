"""The provider of GPU nodes on Google Cloud. It creates hosts with Terraform and returns their
inventory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from clusterctl.errors import LockedError, ProvisionError, StalePlanError, UsageError
from clusterctl.hosts.checks import DoctorReport
from clusterctl.providers.base import (
    DEFAULTS,
    NO_PROMPTS,
    BakeTemplates,
    HostOptions,
    HostPlan,
    Leftover,
    Orphan,
    OrphanSearch,
    Prompts,
    Provider,
    Provisioned,
    load_known_hosts,
)
from clusterctl.providers.gcp import apply, costs, fixed, images, orphans, storage
from clusterctl.providers.gcp.api import Api, check_gcloud, host_keys, iap_tunnel
from clusterctl.providers.gcp.images import SHARED
from clusterctl.providers.gcp.imports import import_ids
from clusterctl.providers.gcp.orphans import ANYWHERE, SearchArea
from clusterctl.providers.gcp.preflight import job_environment, notes, preflight
from clusterctl.providers.gcp.storage import VARIABLES
from clusterctl.providers.gcp.terraform import (
    LOCK_FILE,
    Terraform,
    TerraformPlan,
)
from clusterctl.providers.storage import KeptStorage, storage_note, storage_of
from clusterctl.providers.templates import KeptImage
from clusterctl.spec.common import Partition
from clusterctl.spec.distributions import UNSEEN
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import ADMIN_USER
from clusterctl.spec.providers import gcp, gcp_nodes
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.spec.providers.gcp_machines import GcpMachineType
from clusterctl.spec.providers.gcp_nodes import GcpNodes, image_of
from clusterctl.spec.units import GIB_MIB
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, SharedFolder
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.assets import data_folder, digest, tree_files
from clusterctl.util.typed_json import from_json


class GcpProvider(Provider):
    _settings: GcpSettings
    takes_single_hosts = False
    recreates_hosts = True

    def __init__(self, settings: GcpSettings, prompts: Prompts = NO_PROMPTS) -> None:
        self._settings = settings
        self._api = Api(settings.project, reporter=prompts.reporter)
        self.known_shared = SHARED if settings.bakes else None
        # The digest of Terraform's variables, and the plan that the user saw for them.
        self._shown: tuple[str, TerraformPlan] | None = None
        # Whether the plan that the user saw was applied.
        self._is_done = False
        # The hash of the configuration in the images, and partition -> image of its nodes.
        self._inputs = ""
        self._images: Mapping[str, images.ProjectImage] = {}

    def price(self, spec: ClusterSpec, partition: Partition) -> float | None:
        return costs.node_price(spec, partition)

    def recorded_cost(self, spec: ClusterSpec, workspace: Workspace) -> float | None:
        return costs.recorded_cost(spec, workspace.terraform)

    def kept_images(self, *, prune: bool = False) -> tuple[KeptImage, ...]:
        return images.kept(self._settings, prune=prune)

    def check(self, spec: ClusterSpec) -> None:
        if refused := gcp.image_error(spec):
            raise refused
        check_gcloud()

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport | None:
        _reject_changes(spec, workspace)
        return DoctorReport(preflight(spec, workspace.known_id(), services(self._settings)), {})

    def prepare_templates(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        inputs: Mapping[str, str],
        *,
        bake: BakeTemplates,
    ) -> Mapping[str, str]:
        self._use_images(spec, inputs[COMPUTE])
        if not self._images:
            reason = "\n".join(images.partitions_without_base(spec, {}))
            raise ProvisionError(
                "no node image can be built",
                code="unsupported",
                about="image",
                why=reason,
            )
        if self._shown and apply.has_image_node(self._shown[1]):
            apply.remove_image_node(self._terraform(workspace, spec.controller_host))
        for image in {image.name: image for image in self._images.values()}.values():
            if not images.wait_until_ready(self._api, image.name):
                self._make_image(spec, workspace, image, bake)
        return {COMPUTE: inputs[COMPUTE]}

    def _use_images(self, spec: ClusterSpec, inputs: str) -> None:
        if inputs and inputs != self._inputs:
            self._images = images.images_of(self._api, spec, inputs)
            self._inputs = inputs

    def _make_image(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        image: images.ProjectImage,
        bake: BakeTemplates,
    ) -> None:
        """Build a node image: create a machine, configure it, copy its disk, delete the machine."""
        _reject_changes(spec, workspace)
        name = images.machine_name(spec)
        machine = {
            **_host(image.nodes, image.machine),
            "role": "compute",
            "partition": apply.IMAGE_PARTITION,
        }
        machine["image"] = image.base.model_dump(mode="json")
        used = self._storage_of(spec, workspace)
        self._write_module(spec, workspace, used, {name: machine})
        terraform = self._terraform(workspace, spec.controller_host)
        terraform.init()
        record_applied(workspace.terraform)
        try:
            with apply.image_node(terraform, name, self._shown and self._shown[1]):
                key = host_keys(self._api, self._settings.zone, [name])[name]
                bake(
                    images.machine_inventory(spec, workspace.cluster_id(), image, self._images, key)
                )
                images.build(self._api, image, name, self._settings)
        finally:
            # The user may run plain `terraform`, which must not create the machine again.
            self._write_module(spec, workspace, used)

    def plan(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> HostPlan:
        _reject_changes(spec, workspace)
        self._use_images(spec, options.inputs)
        used = self._storage_of(spec, workspace)
        is_new = not (has_module(workspace.terraform) or workspace.inventory.exists())
        variables_digest = self._write_module(spec, workspace, used)
        terraform = self._terraform(workspace, spec.controller_host, searches=not is_new)
        terraform.init()
        plan = terraform.plan()
        apply.reject_foreign_state(plan, workspace.cluster_id())
        apply.reject_loss_of_files(plan)
        apply.reject_smaller_disks(plan)
        self._shown = (variables_digest, plan)
        order = {name: position for position, name in enumerate(_names(spec))}
        hosts = apply.host_changes(plan, costs.HostPrices.by(spec))
        builder_hosts = [host for host in hosts if host.name == images.machine_name(spec)]
        now, _ = costs.other_costs((c.type, c.before) for c in plan.changes if c.before is not None)
        then, unpriced = costs.other_costs(
            (c.type, c.after) for c in plan.changes if c.after is not None
        )
        price = storage.usd_per_hour(spec, used)
        now += (price or 0.0) if used else 0.0
        then += price or 0.0
        unpriced += () if price is not None else (f"storage {spec.storage.name}",)
        to_build = tuple(images.describe_missing(self._api, spec, self._images))
        created = {host.name for host in hosts if host.action in {"make", "replace"}}
        new_nodes = created - {spec.controller_host}
        removals = [
            f"remove {host.name}, from an interrupted image build" for host in builder_hosts
        ]
        return HostPlan(
            tuple(
                sorted(
                    set(hosts) - set(builder_hosts),
                    key=lambda host: order.get(host.name, len(order)),
                )
            ),
            (*apply.other_changes(plan), *removals),
            priced_on=costs.table()["date"],
            other_usd_per_hour=(now, then),
            other_unpriced=unpriced,
            notes=(
                *notes(spec),
                *(storage_note(spec, used) if is_new else ()),
                *(images.partitions_without_base(spec, self._images) if options.inputs else ()),
                *(to_build if new_nodes else ()),
                *filter(None, [costs.caveat(self._settings.region_name)]),
            ),
            images=to_build,
        )

    def apply(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> Provisioned:
        self._use_images(spec, options.templates.keys[COMPUTE] if options.templates else "")
        used = self._storage_of(spec, workspace)
        if spec.storage.name and used is None:
            used = self._create_storage(spec, workspace)
        variables_digest = self._write_module(spec, workspace, used)
        terraform = self._terraform(workspace, spec.controller_host)
        terraform.init()
        digest_of_shown, plan = self._shown or (variables_digest, self._new_plan(terraform))
        if digest_of_shown != variables_digest:
            # The address of a new Filestore instance was not known when the plan was shown.
            plan = terraform.plan_remaining(plan, except_for=apply.RULES_OF_FILESTORE)
        record_applied(workspace.terraform)
        if not plan.is_empty:
            apply.apply_plan(terraform, plan, clock=self._api.clock)
        self._shown = None
        self._is_done = True
        made, started = _new_hosts(plan)
        inventory = self._inventory(spec, workspace, terraform.outputs())
        return Provisioned(inventory, notes(spec), made, started)

    def _new_plan(self, terraform: Terraform) -> TerraformPlan:
        plan = terraform.plan()
        # The user has seen only the plan of the first apply.
        lost_hosts = [host.name for host in apply.host_changes(plan) if host.destroys]
        if self._is_done and lost_hosts:
            raise StalePlanError(
                "the plan has changed since it was shown",
                why=f"it would now delete or recreate: {', '.join(lost_hosts)}",
                fix="run the same command again, which makes a new plan",
            )
        return plan

    def alive(self, cluster_id: str) -> bool:
        return orphans.has_running_instance(self._api, cluster_id)

    @staticmethod
    def may_have_hosts(workspace: Workspace) -> bool:
        folder = workspace.terraform
        # Nothing is created before the spec is written.
        has_records = workspace.spec.exists() or workspace.inventory.exists()
        return (folder.is_dir() and has_records) or any(folder.glob("*.tfstate*"))

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        has_state = workspace is not None and has_module(workspace.terraform)
        area = _area_of(workspace)
        if workspace and has_state and not self._destroy_with_terraform(cluster_id, workspace):
            # Resources outside the state may have blocked the deletion of resources in the state.
            self._delete_labelled(cluster_id, area)
            self._destroy_with_terraform(cluster_id, workspace)
        self._delete_labelled(cluster_id, area)

    def _destroy_with_terraform(self, cluster_id: str, workspace: Workspace) -> bool:
        """Delete the resources in Terraform's state. On an error, show the error and return
        False.
        """
        terraform = self._terraform(workspace, controller_of(workspace.terraform), searches=False)
        try:
            terraform.init()
            plan = terraform.plan(destroy=True)
            apply.reject_foreign_state(plan, cluster_id)
            apply.apply_plan(terraform, plan, clock=self._api.clock)
        except LockedError:
            raise
        except ProvisionError as exc:
            self._api.reporter.progress(exc.cause)
            return False
        return True

    def leftovers(self, cluster_id: str, *, workspace: Workspace | None) -> tuple[Leftover, ...]:
        resources = orphans.find_resources(self._api, cluster_id, _area_of(workspace))
        return tuple(resource.leftover for resource in resources if not resource.kept)

    def orphans(self, name: str) -> OrphanSearch:
        return OrphanSearch(tuple(map(Orphan, orphans.orphan_ids(self._api, name))))

    def storages(self) -> tuple[KeptStorage, ...]:
        return storage.find(self._api)

    def remove_storage(self, storage_: KeptStorage) -> None:
        # A cluster may have come up since the storage was shown.
        current = [one for one in self.storages() if one.id == storage_.id]
        for one in current:
            one.reject_use()
        orphans.remove_resources(self._api, map(storage.as_resource, current))
        shutil.rmtree(storage.folder(self._settings.project, storage_.name), ignore_errors=True)

    def _storage_of(self, spec: ClusterSpec, workspace: Workspace) -> KeptStorage | None:
        """Return the spec's storage. None: the spec names no storage, or it does not exist yet."""
        used = storage_of(spec, self.storages() if spec.storage.name else ())
        if used is not None:
            storage.reject_elsewhere(spec, used)
            used.reject_use(workspace.known_id())
        return used

    def _create_storage(self, spec: ClusterSpec, workspace: Workspace) -> KeptStorage:
        name = str(spec.storage.name)
        folder = storage.folder(self._settings.project, name)
        self._api.reporter.progress(f"creating storage {name}")
        write_module(folder, storage.own_variables(spec), module="gcp-storage")
        terraform = self._terraform_in(folder, "")
        terraform.init()
        apply.apply_plan(terraform, terraform.plan(), clock=self._api.clock)
        made = self._storage_of(spec, workspace)
        if made is None:
            raise ProvisionError(
                f"storage {name!r} was created, but Google does not list it yet",
                code="cloud-refused",
                about="storage-not-ready",
                where="storage.name",
                fix="run the command again",
            )
        return made

    def _delete_labelled(self, cluster_id: str, area: SearchArea) -> None:
        resources = orphans.find_resources(self._api, cluster_id, area)
        orphans.remove_resources(self._api, resources)
        for resource in resources:
            if resource.kept:
                self._api.reporter.progress(f"kept: {resource.what}: {resource.kept}")

    def _write_module(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        used: KeptStorage | None,
        more_hosts: Mapping[str, Variables] = MappingProxyType({}),
    ) -> str:
        module_variables = variables(
            spec,
            workspace.cluster_id(),
            workspace.read_admin_key(),
            storage.variable(self._api, spec, used),
        )
        boot = {
            name: {"boot_image": images.path_of(self._api, i.name)}
            for name, i in self._images.items()
        }
        hosts = module_variables["hosts"]
        hosts = {
            name: host | boot.get(host.get("partition", ""), {}) for name, host in hosts.items()
        }
        module_variables["hosts"] = {**hosts, **more_hosts}
        write_module(workspace.terraform, module_variables)
        return digest((workspace.terraform / VARIABLES).read_bytes())

    def _terraform(
        self, workspace: Workspace, controller: str, *, searches: bool = True
    ) -> Terraform:
        """Return Terraform in the cluster's folder.

        searches: import what a plan creates although it exists. False: nothing can exist.
        """
        terraform = self._terraform_in(workspace.terraform, controller)
        if searches:
            area = _area_of(workspace)
            terraform.existing = partial(import_ids, self._api, workspace.cluster_id(), area)
        return terraform

    def _terraform_in(self, folder: Path, controller: str) -> Terraform:
        settings = self._settings
        place = apply.ProjectZone(
            settings.project, settings.zone, controller, enables_apis=settings.enable_apis
        )
        return Terraform(folder, self._api.reporter, place.explain, place.name)

    def _inventory(
        self, spec: ClusterSpec, workspace: Workspace, outputs: Mapping[str, Any]
    ) -> Inventory:
        names = _names(spec)
        hosts = outputs["hosts"]
        # A host with another instance id was recreated and has a new host key.
        ids = {name: output["instance_id"] for name, output in hosts.items()}
        recorded_hosts = load_known_hosts(workspace).items()
        unchanged = {
            name: host for name, host in recorded_hosts if ids.get(name, "") == host.instance_id
        }
        keys = {name: host.host_key for name, host in unchanged.items()}
        if missing := [name for name in names if name not in keys]:
            keys |= host_keys(self._api, self._settings.zone, missing)
        return Inventory(
            cluster=spec.name,
            cluster_id=workspace.cluster_id(),
            provider=self._settings.type,
            hosts=tuple(
                self._host(spec, name, hosts[name], keys[name], unchanged.get(name))
                for name in names
            ),
            network=outputs.get("network_cidr") or self._subnetwork_cidr(),
            shared=SHARED,
            shared_folder=from_json(SharedFolder, outputs["shared"]),
            bucket=outputs.get("bucket"),
            baked=False,
        )

    def _host(
        self,
        spec: ClusterSpec,
        name: str,
        output: Mapping[str, Any],
        host_key: str,
        before: Host | None,
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
            # The user's overrides of the module may set the size.
            cpus=output.get("cpus"),
            memory_mib=output.get("memory_mib"),
            proxy_command=()
            if partition
            else iap_tunnel(name, project=self._settings.project, zone=self._settings.zone),
            jump=spec.controller_host if partition else None,
            job_environment=job_environment(machine, gvnic=nodes.gvnic),
            local_ssds=nodes.local_ssds + machine.bundled_ssds,
        )

    def _subnetwork_cidr(self) -> str:
        path = self._settings.subnetwork_path
        return str(IPv4Network(self._api.get("compute", path)["ipCidrRange"]))


def _names(spec: ClusterSpec) -> tuple[str, ...]:
    return (spec.controller_host, *(name for p in spec.partitions for name in spec.node_names(p)))


def _new_hosts(plan: TerraformPlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (names of hosts that the plan creates, names of existing hosts that are switched
    off).
    """
    instances = [change for change in plan.changes if change.type == costs.INSTANCE]
    changes = {(change.after or change.before or {})["name"]: change for change in instances}
    made = tuple(name for name, change in changes.items() if change.action in ("create", "replace"))
    statuses = {
        name: (change.before or {}).get("current_status") for name, change in changes.items()
    }
    off = (name for name, status in statuses.items() if status in costs.OFF)
    return made, tuple(name for name in off if name not in made)


_SERVICES: Final = (
    "compute",
    "iam",
    "iap",
    "serviceusage",
    "cloudresourcemanager",
    "logging",
    "monitoring",
)

Variables = dict[str, Any]


def variables(
    spec: ClusterSpec, cluster_id: str, public_key: str, used: Variables | None = None
) -> Variables:
    """Return the variables of Terraform's root module, ready for JSON. ``used``: the storage."""
    settings = gcp.settings_of(spec)
    share = None if spec.storage.name else settings.filestore
    hosts = _hosts(spec, settings, cluster_id)
    common = {
        "project",
        "zone",
        "labels",
        "enable_apis",
        "kms_key",
        "network",
        "secure_boot",
        "bucket",
    }
    return {
        **settings.model_dump(mode="json", include=common),
        "region": settings.region_name,
        "cluster": spec.name,
        "cluster_id": cluster_id,
        "admin_user": ADMIN_USER,
        "admin_public_key": public_key.strip(),
        "services": services(settings),
        "auto_down": settings.auto_down is not None,
        "hosts": hosts,
        "placements": [
            *dict.fromkeys(host["placement"] for host in hosts.values() if host.get("placement"))
        ],
        "filestore": share and {"tier": share.tier, "capacity_gib": share.capacity // GIB_MIB},
        "storage": used,
    }


def services(settings: GcpSettings) -> list[str]:
    """Return the Google APIs that the cluster needs, in the order in which they are shown."""
    names = [*_SERVICES]
    if settings.bucket:
        names.append("storage")
    if settings.filestore:
        names.append("file")
    return [f"{name}.googleapis.com" for name in names]


def _hosts(spec: ClusterSpec, settings: GcpSettings, cluster_id: str) -> dict[str, Variables]:
    controller = _host(settings.controller, gcp.controller_machine(spec))
    hosts: dict[str, Variables] = {spec.controller_host: {"role": "controller", **controller}}
    for partition in spec.partitions:
        nodes = settings.nodes_of(partition.name)
        policy = f"{spec.name}-{cluster_id}-{partition.name}" if nodes.compact_placement else None
        host = _host(nodes, gcp.machine_of(spec, partition))
        host |= {"role": "compute", "partition": partition.name, "placement": policy}
        hosts |= dict.fromkeys(spec.node_names(partition), host)
    return hosts


def _host(nodes: GcpNodes, machine: GcpMachineType) -> Variables:
    gpu = machine.gpu if machine.guest_accelerator else None
    fields = {"local_ssds", "spot", "termination_action", "tier_1", "reservation"}
    return {
        **nodes.model_dump(mode="json", include=fields),
        "flex_start": nodes.flex_start,
        "machine_type": machine.name,
        "image": image_of(nodes, machine).model_dump(mode="json"),
        "boot_disk": {
            "size_gib": nodes.boot_disk.size // GIB_MIB,
            "type": gcp_nodes.disk_type(nodes.boot_disk, machine.disk_types),
        },
        "guest_accelerator": {"type": machine.accelerator, "count": gpu.count} if gpu else None,
        "has_gpu": machine.gpu is not None,
        "reservation_bound": machine.reservation_bound and nodes.reservation is not None,
        "nic_type": "GVNIC" if nodes.gvnic else "VIRTIO_NET",
    }


_VERSIONS: Final = "versions.tf"
APPLIED: Final = "clusterctl_applied.json"


def has_module(folder: Path) -> bool:
    """Return whether a folder contains clusterctl's Terraform module. If so, it may also contain a
    state.
    """
    return (folder / "main.tf").is_file()


def controller_of(folder: Path) -> str:
    """Return the controller's name in the file of Terraform's variables. Empty if the file can't be
    read.
    """
    hosts = storage.read_variables(folder).get("hosts", {})
    return next((name for name, host in hosts.items() if host["role"] == CONTROLLER), "")


def _area_of(workspace: Workspace | None) -> SearchArea:
    """Return where resources may be, by the variables of Terraform's folder."""
    if workspace is None:
        return ANYWHERE
    recorded = storage.read_variables(workspace.terraform)
    host_project = recorded.get("network", {}).get("host_project")
    return SearchArea(str(recorded.get("region", "")), host_project or "")


def _reject_changes(spec: ClusterSpec, workspace: Workspace) -> None:
    """Raise a UsageError if settings differ that a cluster keeps from its first `up`."""
    applied = _applied_variables(workspace)
    if applied is not None:
        fixed.reject_changes(applied, variables(spec, "", ""))


def _applied_variables(workspace: Workspace) -> Mapping[str, Any] | None:
    """Return Terraform's variables at the last `up`. None: Terraform has created nothing.

    Raise a UsageError if the record can't be read.
    """
    path = workspace.terraform / APPLIED
    try:
        return {**json.loads(path.read_bytes())}
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as exc:
        raise UsageError(
            f"the record of the settings of cluster {workspace.root.name!r} can't be read",
            code="record-damaged",
            about="settings",
            where=str(path),
            why=str(exc),
            fix="restore the file from a backup; or take the cluster down: `clusterctl down`",
        ) from exc


def record_applied(folder: Path) -> None:
    """Record Terraform's variables as those of the existing resources. To be called before
    Terraform creates
    anything: a plan writes variables too, and the user may decline it.
    """
    write_atomic(folder / APPLIED, (folder / VARIABLES).read_bytes())


def write_module(folder: Path, variables: Mapping[str, Any], *, module: str = "gcp") -> None:
    """Update clusterctl's files in Terraform's folder. Leave the user's files `*_override.tf`
    unchanged.

    module: the name of the root module.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = data_folder("terraform") / module
    files = {path.relative_to(source): path.read_bytes() for path in tree_files(source)}
    for path in [*folder.glob("*.tf"), *folder.glob("modules/**/*.tf")]:
        if path.relative_to(folder) not in files and not path.name.endswith("_override.tf"):
            path.unlink()
    versions = folder / _VERSIONS
    if versions.is_file() and versions.read_bytes() != files[Path(_VERSIONS)]:
        # The module of another release pins another version of Google's provider.
        (folder / LOCK_FILE).unlink(missing_ok=True)
    for inner, content in files.items():
        _write(folder / inner, content)
    _write(folder / VARIABLES, (json.dumps(variables, indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content)
