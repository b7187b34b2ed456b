"""Find what stands in the way of a cluster on Google Cloud, all at once, before anything is made or billed.

Only reads. A finding has the code and the fix that Terraform's refusal would have, from diagnoses.yaml. A
question that Google does not answer is a warning: if there is an obstacle, Terraform finds it. The rights and
policies that are looked at are those of preflight.yaml.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import ApiOffError, CloudError, PermissionDeniedError
from clusterctl.hosts.checks import Finding, no_cgroups
from clusterctl.providers.gcp.api import Api, Json, enforces, org_policy, rules
from clusterctl.providers.gcp.images import HostGroup
from clusterctl.providers.gcp.orphans import ID_LABEL
from clusterctl.spec import gcp
from clusterctl.spec.base import Model
from clusterctl.spec.distributions import distribution_of
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.gcp_nodes import Machine, disk_type, image_of, release_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import GIB_MIB
from clusterctl.util.assets import table
from clusterctl.util.process import parallel_map

# How long an answer may take.
_ANSWER_S: Final = 10.0
_TRIES: Final = 2
_MOST_CALLS: Final = 12
_DATA: Final = Path(__file__).with_name("data")
# The words of a machine type that name its family: a3-highgpu.
_NAME_PARTS: Final = 2
_NOT_FOUND: Final = 404
_COUNTED: Final = "serviceusage.services.use"
_DRIVER_IN: Final = re.compile(r"nvidia|-cu\d|accelerator|deeplearning")
_LOCAL_SSD_GB: Final = 375
# The quotas of processors, by family; those of the other families are counted by GPU.
_CPUS: Final = {"e2": "CPUS", "n1": "CPUS"} | {
    family: f"{family.upper()}_CPUS" for family in ("n2", "n2d", "c2", "c2d", "c3", "a2")
}
_DISKS: Final = {"pd-standard": "DISKS_TOTAL_GB", "hyperdisk-balanced": "HDB_TOTAL_GB"}
_DISKS_OF_FLASH: Final = "SSD_TOTAL_GB"

Check = tuple[str, Callable[[], Iterable[Finding]]]


def preflight(
    spec: ClusterSpec, cluster_id: str | None, services: Collection[str], *, api: Api | None = None
) -> tuple[Finding, ...]:
    """Return everything that keeps the missing hosts from being made, each with what to do.

    ``cluster_id`` is that of a cluster that an earlier `up` began; ``services`` are the APIs that it needs.
    What Google does not answer in time is a warning.
    """
    settings = gcp.settings_of(spec)
    api = api or Api(settings.project, answer_s=_ANSWER_S, tries=_TRIES)
    # A finding of several places is reported once.
    places: dict[Finding, list[str]] = {}
    for finding in _Look(spec, settings, api, cluster_id).findings(services):
        places.setdefault(replace(finding, host=""), []).append(finding.host)
    return tuple(replace(finding, host=", ".join(dict.fromkeys(hosts))) for finding, hosts in places.items())


@dataclass(frozen=True, slots=True)
class _Look:
    """The checks of a spec. Each yields what it finds, or raises Google's refusal."""

    spec: ClusterSpec
    settings: GcpSettings
    api: Api
    cluster_id: str | None

    def findings(self, services: Collection[str]) -> tuple[Finding, ...]:
        try:
            groups = self.groups()
        except CloudError as exc:
            return (self._refused("instances", exc),)
        if not groups:
            return ()
        # Without the project all other calls are refused, too.
        if found := self._all([("project", self.project)]):
            return found
        found = self._all((name, partial(self.service, name)) for name in services)
        off = {finding.host for finding in found if finding.code == ApiOffError.code}
        return found + self._all(self.checks(groups, off=off))

    def groups(self) -> tuple[HostGroup, ...]:
        """Return the hosts that are to be made, by what they are."""
        existing: set[str] = set()
        # The check of the APIs names one that is off.
        with suppress(ApiOffError):
            if self.cluster_id:
                search = f'labels.{ID_LABEL}="{self.cluster_id}"'
                pages = self.api.pages("compute", f"{self._zone}/instances", filter=search)
                existing = {row["name"] for page in pages for row in page.get("items", ())}
        controller = gcp.controller_machine(self.spec)
        parts = [("", self.settings.controller, controller, [self.spec.controller_host])]
        for partition in self.spec.partitions:
            nodes, machine = self.settings.nodes_of(partition.name), gcp.machine_of(self.spec, partition)
            parts.append((partition.name, nodes, machine, [*self.spec.node_names(partition)]))
        return tuple(
            HostGroup(name, nodes, machine, image_of(nodes, machine), len(missing))
            for name, nodes, machine, hosts in parts
            if (missing := {*hosts} - existing)
        )

    def checks(self, groups: Collection[HostGroup], *, off: Collection[str]) -> Iterator[Check]:
        """Yield the checks that ask none of the APIs that are ``off``."""
        if "cloudresourcemanager.googleapis.com" not in off:
            yield "roles", self.permissions
            for name, why in _data()["constraints"].items():
                if name != "compute.requireShieldedVm" or not self.settings.secure_boot:
                    yield f"policy {name}", partial(self.policy, name, why)
        if "compute.googleapis.com" not in off:
            yield "quotas", partial(self.quotas, groups)
            for group in groups:
                yield f"image of {group.who}", partial(self.image, group)
        for code, where, path in self._named(groups):
            if "compute.googleapis.com" not in off or path.startswith("b/"):
                yield f"{path.rpartition('/')[2]} of {where}", partial(self.exists, code, where, path)

    def _named(self, groups: Collection[HostGroup]) -> Iterator[tuple[str, str, str]]:
        """Yield what hosts need by its name: the code if it is missing, where it is asked for, its path."""
        zone, network, region = self._zone, self.settings.network, self.settings.region_name
        yield "bad-zone", "provider.zone", zone
        for group in groups:
            yield "machine-type-unavailable", group.who, f"{zone}/machineTypes/{group.machine.name}"
            if group.machine.accelerator:
                path = f"{zone}/acceleratorTypes/{group.machine.accelerator}"
                yield "machine-type-unavailable", group.who, path
            if group.nodes.reservation:
                yield "reservation", group.who, f"{zone}/reservations/{group.nodes.reservation}"
        if network.network:
            subnetwork = f"{self._project}/regions/{region}/subnetworks/{network.subnetwork}"
            yield "network-missing", "provider.network", f"{self._project}/global/networks/{network.network}"
            yield "network-missing", "provider.network", subnetwork
        if (bucket := self.settings.bucket) and not bucket.create:
            yield "bucket-missing", "provider.bucket", f"b/{bucket.name}"
        if state := self.settings.state:
            yield "bucket-missing", "provider.state", f"b/{state.bucket}"

    def _all(self, checks: Iterable[Check]) -> tuple[Finding, ...]:
        """Return what these checks find, several at once."""

        def ask(check: Check) -> tuple[Finding, ...]:
            name, look = check
            try:
                return tuple(look())
            except CloudError as exc:
                return (self._refused(name, exc),)

        answers = parallel_map([*checks], ask, most=_MOST_CALLS)
        return tuple(finding for answer in answers for finding in answer)

    def _refused(self, name: str, exc: CloudError) -> Finding:
        """Return Google's refusal; if it is none that lasts, a warning that ``name`` was not looked at."""
        code, fix = exc.failures[0].code, exc.fix or "run the same command again"
        lasting = {rule.code for rule in rules() if not (rule.transient or rule.retryable)}
        if code in {*lasting, ApiOffError.code}:
            return Finding(self.settings.project, "error", code, exc.what, exc.why, fix)
        return Finding(name, "warning", code, exc.what, exc.why, fix)

    def _found(self, code: str, where: str, what: str, why: str = "", **words: str) -> Finding:
        """Return an error with the fix, and without a ``why`` the cause, of that code in diagnoses.yaml."""
        rule = next(rule for rule in rules() if rule.code == code)
        place = {**self.settings.location, "region": self.settings.region_name}
        failure = rule.failure({**place, **words}, host=None, phase="plan")
        return Finding(where, "error", code, what, why or failure.cause, failure.fix)

    @property
    def _project(self) -> str:
        return f"projects/{self.settings.project}"

    @property
    def _zone(self) -> str:
        return f"{self._project}/zones/{self.settings.zone}"

    def project(self) -> Iterator[Finding]:
        try:
            self.api.get("cloudresourcemanager", self._project)
        except ApiOffError:
            return
        except CloudError as exc:
            # Google tells nobody whether a project exists that they may not see.
            is_hidden = isinstance(exc, PermissionDeniedError) and _COUNTED not in exc.why
            if exc.status != _NOT_FOUND and not is_hidden:
                raise
            what = f"there is no project {self.settings.project}, or the login may not see it"
            yield self._found("project-missing", self.settings.project, what, exc.why)

    def service(self, name: str) -> Iterator[Finding]:
        """Yield an API that is off, as the host of the finding; `up` enables it if the spec lets it."""
        if self.api.get("serviceusage", f"{self._project}/services/{name}").get("state") != "ENABLED":
            off = self._found("api-off", name, "an API is off", service=name)
            why = "`up` enables it; until then what the project may have of it can't be looked at"
            yield replace(off, level="warning", why=why) if self.settings.enable_apis else off

    def permissions(self) -> Iterator[Finding]:
        # An earlier `up` that got past these checks had the rights to make the network and the accounts.
        is_new, has_network = self.cluster_id is None, self.settings.network.network is not None
        needed = {"always": True, "new_cluster": is_new, "new_network": is_new and not has_network}
        wanted = defaultdict[str, list[str]](list)
        for when, roles in _data()["rights"].items():
            if needed.get(when) or getattr(self.settings, when, False):
                for role, names in roles.items():
                    wanted[role] += names
        body = {"permissions": [name for names in wanted.values() for name in names]}
        answer = self.api.post("cloudresourcemanager", f"{self._project}:testIamPermissions", body)
        for role, names in wanted.items():
            if missing := [name for name in names if name not in answer.get("permissions", ())]:
                unseen = _data()["unseen"].get(role)
                why = "; ".join(filter(None, (f"the login lacks {', '.join(missing)}", unseen)))
                finding = self._found(
                    "permission", self.settings.project, f"{role} is missing", why, role=role
                )
                yield replace(finding, level="warning") if unseen else finding

    def policy(self, name: str, why: str) -> Iterator[Finding]:
        # A project in no organization has no policies, and few others have the API of managed ones on.
        with suppress(ApiOffError, PermissionDeniedError):
            if enforces(org_policy(self.api, name)):
                what = f"a policy of the organization: {name}"
                yield self._found("org-policy", self.settings.project, what, why, constraint=name)

    def exists(self, code: str, where: str, path: str) -> Iterator[Finding]:
        """Look for something that the spec names. A login that may not look may be able to use it."""
        kind, _, name = path.removeprefix(f"{self._project}/").rpartition("/")
        with suppress(PermissionDeniedError):
            if self.api.find("storage" if kind == "b" else "compute", path) is None:
                # Each of these codes has its own word for the name.
                words = dict.fromkeys(("bad", "machine", "reservation", "network", "bucket"), name)
                place = "Cloud Storage" if kind == "b" else kind
                yield self._found(code, where, f"there is no {name} in {place}", **words)

    def image(self, group: HostGroup) -> Iterator[Finding]:
        image, project = group.image, group.image.project
        name, folder = image.family or image.name or "", "family/" if image.family else ""
        found = self.api.find("compute", f"projects/{project}/global/images/{folder}{name}")
        if found is None or found.get("deprecated", {}).get("state") in ("OBSOLETE", "DELETED"):
            what = f"{project} has no image {name} that can be used"
            yield self._found("image-missing", group.who, what, image=name)
            return
        has_driver = self.spec.software.nvidia.has_driver or _DRIVER_IN.search(f"{project} {name}")
        if group.machine.gpu and release_of(image) and not has_driver:
            why = f"{name} has no driver of NVIDIA's, and software.nvidia installs none"
            fix = "write software: {nvidia: {driver: open}}, or name an image with a driver, or none"
            yield Finding(group.who, "error", "image-driver", "GPUs without a driver", why, fix)
        yield from unlinked(self.spec, group.who, group.machine)

    def quotas(self, groups: Collection[HostGroup]) -> Iterator[Finding]:
        region = self.settings.region_name
        regional, everywhere = _demand(groups)
        # A network that an earlier `up` made counts already.
        if not (self.cluster_id or self.settings.network.network):
            everywhere.update(("NETWORKS", "SUBNETWORKS", "ROUTERS"))
        for path, place, wanted in (
            (f"{self._project}/regions/{region}", region, regional),
            (self._project, self.settings.project, everywhere),
        ):
            quotas = {row["metric"]: row for row in self.api.get("compute", path).get("quotas", ())}
            for metric, count in wanted.items():
                yield from self._quota(metric, count, quotas.get(metric), place)

    def _quota(self, metric: str, count: int, quota: Json | None, place: str) -> Iterator[Finding]:
        if quota is None:
            if metric.endswith("_GPUS"):
                what, why = f"the quota {metric} can't be looked at", "Google counts these GPUs by family"
                yield replace(self._found("quota", place, what, why, metric=metric), level="warning")
            return
        limit, used = float(quota.get("limit", inf)), float(quota.get("usage", 0))
        if count > limit - used:
            words = {"metric": metric, "wanted": f"{used + count:g}"}
            words["quota_id"] = f"{metric.replace('_', '-')}-per-project"
            if place == self.settings.region_name:
                words["quota_id"] += "-region"
                words["dimension"] = f" --dimensions=region={place}"
            why = f"{count} are needed, {max(0, limit - used):g} of {limit:g} are left"
            yield self._found("quota", place, f"too little quota {metric}", why, **words)


def _data() -> dict[str, Any]:
    return table(_DATA / "preflight.yaml", dict[str, Any])


def _demand(groups: Collection[HostGroup]) -> tuple[Counter[str], Counter[str]]:
    """Return how much of each quota these hosts need: of the region's, and of the whole project's."""
    regional, everywhere = Counter[str](), Counter[str]()
    for group in groups:
        machine, nodes, count = group.machine, group.nodes, group.count
        extra = ((disk, machine.extra_disks) for disk in nodes.extra_disks)
        for disk, types in ((nodes.boot_disk, machine.boot_disks), *extra):
            regional[_DISKS.get(disk_type(disk, types), _DISKS_OF_FLASH)] += disk.size // GIB_MIB * count
        # The processors and GPUs of a reservation count already.
        if nodes.reservation:
            continue
        regional["INSTANCES"] += count
        everywhere["CPUS_ALL_REGIONS"] += machine.vcpus * count
        if machine.family in _CPUS and not nodes.spot:
            regional[_CPUS[machine.family]] += machine.vcpus * count
        if machine.gpu:
            name = machine.gpu.type.upper().replace("-", "_")
            metric = f"{'PREEMPTIBLE_' if nodes.spot else ''}NVIDIA_{name}_GPUS"
            regional[metric] += machine.gpu.count * count
            everywhere["GPUS_ALL_REGIONS"] += machine.gpu.count * count
        metric = "PREEMPTIBLE_LOCAL_SSD_GB" if nodes.spot else "LOCAL_SSD_TOTAL_GB"
        regional[metric] += nodes.local_ssds * _LOCAL_SSD_GB * count
    return regional, everywhere


class _JobsData(Model):
    gpu: Mapping[str, str]
    gvnic: Mapping[str, str]
    notes: Mapping[str, str]


def notes(spec: ClusterSpec) -> tuple[str, ...]:
    """What `plan` and `up` say of a cluster."""
    partitions = (gcp.machine_of(spec, partition) for partition in spec.partitions)
    found = [*map(network_note, (gcp.controller_machine(spec), *partitions))]
    if gcp.settings_of(spec).shared_disk and not gcp.shared_disk(spec):
        found.append("provider.shared_disk is not used: it is for storage.keep, without filestore")
    if gcp.settings_of(spec).bucket and spec.provider.expected_release(spec) == "rocky-10":
        found.append(
            "/bucket may fail on Rocky Linux 10, which refuses the key that gcsfuse was signed with in 2025 "
            "(github.com/GoogleCloudPlatform/gcsfuse/issues/3874): take images of Rocky Linux 9 if it does"
        )
    return tuple(dict.fromkeys(filter(None, found)))


def ahead(spec: ClusterSpec, made: Collection[str]) -> Iterator[str]:
    """What `plan` says of the hosts that are to be made, and `up` once it has looked at them."""
    release = spec.provider.expected_release(spec)
    if made and spec.scheduler == "slurm" and release and not distribution_of(release).cgroup_v2:
        yield str(no_cgroups("the nodes"))
    for partition in spec.partitions:
        if not set(spec.node_names(partition)).isdisjoint(made):
            machine = gcp.machine_of(spec, partition)
            yield from map(str, unlinked(spec, f"partition {partition.name}", machine))


def unlinked(spec: ClusterSpec, who: str, machine: Machine) -> Iterator[Finding]:
    """GPUs that may need a fabric manager, which then is left to their image."""
    if machine.has_nvswitches and not spec.software.nvidia.has_driver:
        why = (
            f"NVSwitches link those of {machine.name}. Where instances see these, programs end with CUDA "
            "error 802, unless the image has a fabric manager of its driver's version"
        )
        fix = "write software: {nvidia: {driver: open}}, which adds one where it is needed; or try one node"
        yield Finding(who, "warning", "fabric-manager", "GPUs may need a fabric manager", why, fix)


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
    return table(_DATA / "jobs.yaml", _JobsData)
