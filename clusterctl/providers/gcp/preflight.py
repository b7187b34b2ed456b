"""What stands in the way of a cluster on Google Cloud, all of it at once, before anything is made or billed.

Only reads. A refusal that Terraform would end with later has the words of diagnoses.yaml here, too; what is
asked for is preflight.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Network
from math import inf
from typing import Any, Final

from clusterctl.errors import ApiOffError, CloudError, MachineError, PermissionDeniedError
from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp.allowance import HostGroup, demand, forbidden
from clusterctl.providers.gcp.api import Api, Json, LateError, check_gcloud, org_policy, rules
from clusterctl.providers.gcp.notes import unlinked
from clusterctl.providers.gcp.orphans import ID_LABEL
from clusterctl.providers.gcp.requirements import Constraint, Rights, requirements
from clusterctl.spec import gcp, gcp_nodes
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.gcp_nodes import image_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import GIB_MIB
from clusterctl.util.assets import filled
from clusterctl.util.process import parallel_map
from clusterctl.util.progress import Limit

LIMIT_S: Final = 25.0  # of all calls together
ANSWER_S: Final = 10.0
_MOST: Final = 12  # calls at once
_NOT_FOUND: Final = 404
_COUNTED: Final = "serviceusage.services.use"
_SSH: Final = 22
_FOR_SOME: Final = ("targetResources", "targetSecureTags", "targetServiceAccounts")
_OURS_PRIORITY: Final = 1000  # of the module's rules that let SSH in
_IAP: Final = IPv4Network("35.235.240.0/20")
_OS_LOGIN: Final = ("compute.requireOsLogin", "compute.managed.requireOsLogin")
_MAY_BE_REQUIRED: Final = (
    "the project has OS Login on, and its organization may require it",
    "Google rejects the cluster's instances then: they have it off, and their account from their metadata",
    "ask who administers the organization whether compute.requireOsLogin is enforced, and for an exception",
)
_OF_NEW_NETWORK: Final = ("NETWORKS", "SUBNETWORKS", "ROUTERS")  # quotas; none where a network is named
_DRIVER_IN: Final = re.compile(r"nvidia|-cu\d|accelerator|deeplearning")


def preflight(
    spec: ClusterSpec, cluster_id: str | None, services: Collection[str], *, api: Api | None = None
) -> tuple[Finding, ...]:
    """Everything that keeps the hosts from being made that are not there yet, each with what to do.

    ``cluster_id`` is that of a cluster that is there in part; ``services`` are the APIs that it needs. What
    Google does not answer within the limit of ``api`` is a finding.
    """
    settings = gcp.settings_of(spec)
    api = api or Api(settings.project, answer_s=ANSWER_S, limit=Limit.within(LIMIT_S))
    look = _Look(spec, settings, api, cluster_id)
    parts: tuple[Callable[[], tuple[Finding, ...]], ...] = (_gcloud, partial(look.google, services))
    answers = parallel_map(parts, lambda part: part())
    return _joined(one for answer in answers for one in answer)


def _gcloud() -> tuple[Finding, ...]:
    try:
        check_gcloud()
    except MachineError as exc:
        return (Finding("this machine", "error", "gcloud", exc.what, exc.why, exc.fix),)
    return ()


def _joined(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding of what is found in several places."""
    places: dict[Finding, list[str]] = {}
    for one in found:
        places.setdefault(replace(one, host=""), []).append(one.host)
    return tuple(replace(one, host=", ".join(dict.fromkeys(hosts))) for one, hosts in places.items())


Check = tuple[str, Callable[[], Iterable[Finding]]]  # what is looked at, and how


@dataclass(frozen=True, slots=True)
class _Look:
    """The checks of one spec. Each yields what it finds, or ends with Google's refusal."""

    spec: ClusterSpec
    settings: GcpSettings
    api: Api
    cluster_id: str | None

    def google(self, services: Collection[str]) -> tuple[Finding, ...]:
        try:
            groups = self.groups()
        except (ApiOffError, PermissionDeniedError):  # the checks below name it
            groups = self.all_groups(())
        except CloudError as exc:  # nothing else can be asked
            return (self.refused(exc),)
        if not groups:
            return ()
        found = self.all([("the project", self.project)])
        if any(one.level == "error" and one.code != ApiOffError.code for one in found):
            return found
        found += self.all((name, partial(self.service, name)) for name in services)
        return (*found, *self.all(self.checks(groups, off={one.host for one in found})))

    def checks(self, groups: Collection[HostGroup], *, off: Collection[str]) -> Iterator[Check]:
        """Those of APIs that are on."""
        yield "buckets", self.buckets
        if "cloudresourcemanager.googleapis.com" not in off:
            yield "roles", self.permissions
            for name, constraint in requirements().constraints.items():
                yield f"policy {name}", partial(self.policy, name, constraint, groups)
        if "compute.googleapis.com" in off:
            return
        yield "zone", self.zone
        yield "quotas", partial(self.quotas, groups)
        for one in groups:
            yield f"machine type of {one.who}", partial(self.machine, one)
            yield f"image of {one.who}", partial(self.image, one)
            if one.nodes.reservation:
                yield f"reservation of {one.who}", partial(self.reservation, one)
        if self.settings.network.network:
            yield "network", self.network
            yield "firewall rules", self.firewall

    def all(self, checks: Iterable[Check]) -> tuple[Finding, ...]:
        """What these checks find, several at once."""
        answers = parallel_map([*checks], self._asked, most=_MOST)
        return tuple(one for answer in answers for one in answer)

    def _asked(self, check: Check) -> tuple[Finding, ...]:
        name, look = check
        try:
            return tuple(look())
        except LateError as exc:
            return (Finding(name, "warning", exc.code, exc.what, exc.why, exc.fix),)
        except CloudError as exc:
            return (self.refused(exc),)

    def refused(self, exc: CloudError) -> Finding:
        """Google's refusal in the words of its own error, or of the table of diagnoses."""
        code = exc.failures[0].code
        return Finding(self.settings.project, "error", code, exc.what, exc.why, exc.fix or "try again later")

    def _found(self, code: str, where: str, what: str, why: str = "", /, **words: str) -> Finding:
        """A finding with the fix, and without a ``why`` the cause, of that code in the table of diagnoses."""
        rule = next(rule for rule in rules() if rule.code == code)
        place = {"project": self.settings.project, "zone": self.settings.zone}
        failure = rule.failure(
            {**place, "region": self.settings.region_name, **words}, host=None, phase="plan"
        )
        return Finding(where, "error", code, what, why or failure.cause, failure.fix)

    def _there(self, path: str, service: str = "compute") -> Json | None:
        """A resource; None where there is none."""
        return self.api.find(service, path)

    @property
    def _project(self) -> str:
        return f"projects/{self.settings.project}"

    @property
    def _zone(self) -> str:
        return f"{self._project}/zones/{self.settings.zone}"

    # --- what is asked for ---------------------------------------------------------------------------------

    def groups(self) -> tuple[HostGroup, ...]:
        """The hosts that are to be made, by what they are."""
        there: set[str] = set()
        if self.cluster_id:
            search = f'labels.{ID_LABEL}="{self.cluster_id}"'
            pages = self.api.pages("compute", f"{self._zone}/instances", filter=search)
            there = {row["name"] for page in pages for row in page.get("items", ())}
        return self.all_groups(there)

    def all_groups(self, there: Collection[str]) -> tuple[HostGroup, ...]:
        controller = gcp.controller_machine(self.spec)
        nodes = self.settings.controller
        count = int(self.spec.controller_host not in there)
        found = [HostGroup("", nodes, controller, image_of(nodes, controller), count)]
        for partition in self.spec.partitions:
            nodes, machine = self.settings.nodes_of(partition.name), gcp.machine_of(self.spec, partition)
            count = sum(name not in there for name in self.spec.node_names(partition))
            found.append(HostGroup(partition.name, nodes, machine, image_of(nodes, machine), count))
        return tuple(one for one in found if one.count)

    # --- the project ---------------------------------------------------------------------------------------

    def project(self) -> Iterator[Finding]:
        try:
            found = self.api.get("cloudresourcemanager", self._project)
        except CloudError as exc:
            if exc.status != _NOT_FOUND and not isinstance(exc, PermissionDeniedError):
                raise
            if _COUNTED in exc.cause:  # no call is answered, for all of them count on this project
                role = next(role for role, one in requirements().roles.items() if _COUNTED in one.permissions)
                what = f"{role} is missing"
                yield self._found("permission", self.settings.project, what, exc.why, role=role)
                return
            # Google tells nobody whether a project exists that they may not see.
            what = f"there is no project {self.settings.project}, or the login may not see it"
            yield self._found("project-missing", self.settings.project, what, exc.why)
            return
        if (state := found.get("lifecycleState", "ACTIVE")) != "ACTIVE":
            why = f"its state is {state}"
            yield self._found("project-missing", self.settings.project, "the project is being deleted", why)

    def service(self, name: str) -> Iterator[Finding]:
        """An API that is off, as the host of the finding; `up` enables it where the spec lets it."""
        state = self.api.get("serviceusage", f"{self._project}/services/{name}").get("state")
        if state == "ENABLED":
            return
        if self.settings.enable_apis:
            why = "`up` enables it; until then what the project may have of it can't be looked at"
            off = self._found("api-off", name, "an API is off", why, service=name)
            yield replace(off, level="warning")
        else:
            yield self._found("api-off", name, "an API is off", service=name)

    def permissions(self) -> Iterator[Finding]:
        for role, missing in self._rights.lacking():
            unseen = requirements().roles[role].unseen
            why = "; ".join(filter(None, (f"the login lacks {', '.join(missing)}", unseen)))
            one = self._found("permission", self.settings.project, f"{role} is missing", why, role=role)
            yield replace(one, level="warning") if unseen else one

    @property
    def _rights(self) -> Rights:
        return Rights(self.api, self.settings, self.spec.name, self.cluster_id)

    def policy(self, name: str, rule: Constraint, groups: Collection[HostGroup]) -> Iterator[Finding]:
        if rule.unless and getattr(self.settings, rule.unless):
            return
        try:
            policy = org_policy(self.api, name)
        except (ApiOffError, PermissionDeniedError) as exc:
            what, fix = "the organization's policies can't be looked at", "ask who administers them"
            if isinstance(exc, ApiOffError):  # few projects have that of managed policies on
                if "parent" not in self.api.get("cloudresourcemanager", self._project):
                    return  # it is in no organization
                fix = exc.fix or fix
            yield Finding(self.settings.project, "warning", "org-policy", what, exc.what, fix)
            if name in _OS_LOGIN and self._has_os_login():
                yield Finding(self.settings.project, "warning", "org-policy", *_MAY_BE_REQUIRED)
            return
        thing = forbidden(policy, rule.needs, self.settings, groups)
        if thing is not None:
            title, why = f"a policy of the organization: {name}", filled(rule.why, {"needs": thing})
            yield self._found("org-policy", self.settings.project, title, why, constraint=name)

    def _has_os_login(self) -> bool:
        """Whether the project has it on, as Google makes new ones where the organization requires it."""
        try:
            common = self.api.get("compute", self._project).get("commonInstanceMetadata", {})
        except CloudError:  # other checks name that
            return False
        said = {one.get("key"): one.get("value", "") for one in common.get("items", ())}
        return str(said.get("enable-oslogin")).lower() == "true"

    def buckets(self) -> Iterator[Finding]:
        bucket, state = self.settings.bucket, self.settings.state
        for name, key, make in (
            (bucket and bucket.name, "provider.bucket", bucket and bucket.create),
            (state and state.bucket, "provider.state", False),
        ):
            if not name:
                continue
            try:
                there = self._there(f"b/{name}", "storage") is not None
            except PermissionDeniedError as exc:  # somebody else's, or of which only the objects may be seen
                if make:
                    yield self._found("bucket-name-taken", key, f"the bucket {name} is not yours")
                else:
                    what = f"the bucket {name} can't be looked at"
                    yield Finding(key, "warning", "bucket-unseen", what, exc.what, exc.fix)
                continue
            if not there and not make:
                why = f"there is no bucket {name}"
                fix = f"`gcloud storage buckets create gs://{name} --project {self.settings.project}`"
                yield Finding(key, "error", "bucket-missing", "a bucket is missing", why, fix)

    # --- the zone and what is in it ------------------------------------------------------------------------

    def zone(self) -> Iterator[Finding]:
        there = self._there(self._zone)
        if there is None:
            yield self._found("bad-zone", self.settings.zone, "there is no such zone", bad=self.settings.zone)
        elif there.get("status", "UP") != "UP":
            why = f"Google says that it is {there['status']}"
            yield self._found("stockout", self.settings.zone, "the zone does not work", why)

    def machine(self, group: HostGroup) -> Iterator[Finding]:
        name, accelerator = group.machine.name, group.machine.accelerator
        if self._there(f"{self._zone}/machineTypes/{name}") is None:
            what = f"{self.settings.zone} has no {name}"
            yield self._found("machine-type-unavailable", group.who, what, machine=name)
        if accelerator is None:
            return
        there = self._there(f"{self._zone}/acceleratorTypes/{accelerator}")
        if there is None:
            what = f"{self.settings.zone} has no {accelerator}"
            yield self._found("machine-type-unavailable", group.who, what, machine=accelerator)

    def image(self, group: HostGroup) -> Iterator[Finding]:
        image = group.image
        name = image.family or image.name or ""
        path = f"projects/{image.project}/global/images/{'family/' if image.family else ''}{name}"
        there = self._there(path)
        state = (there or {}).get("deprecated", {}).get("state", "ACTIVE")
        if there is None or state in ("OBSOLETE", "DELETED"):
            what = f"{image.project} has no image {name}" if there is None else f"the image {name} is {state}"
            yield self._found("image-missing", group.who, what, image=name)
            return
        least, asked = int(there.get("diskSizeGb", 0)), group.nodes.boot_disk.size // GIB_MIB
        if least > asked:
            what, why = "the boot disk is too small", f"{name} needs {least} GiB, boot_disk has {asked}"
            fix = f"write boot_disk: {{size: {least}GiB}}"
            yield Finding(group.who, "error", "boot-disk", what, why, fix)
        if there.get("architecture") == "ARM64":
            why, fix = f"{name} is for ARM64, {group.machine.name} is x86_64", "name an image for x86_64"
            yield Finding(group.who, "error", "image-architecture", "an image for other processors", why, fix)
        public = gcp_nodes.release_of(image) is not None
        installs = self.spec.software.nvidia.has_driver
        if group.machine.gpu and public and not installs and not _DRIVER_IN.search(f"{image.project} {name}"):
            why = f"{name} has no driver of NVIDIA's, and software.nvidia installs none"
            fix = "write software: {nvidia: {driver: open}}, or name an image with a driver, or none"
            yield Finding(group.who, "error", "image-driver", "GPUs without a driver", why, fix)
        yield from unlinked(self.spec, group.who, group.machine)

    def reservation(self, group: HostGroup) -> Iterator[Finding]:
        name = str(group.nodes.reservation)
        words = {"reservation": name}
        there = self._there(f"{self._zone}/reservations/{name}")
        if there is None:
            yield self._found("reservation", group.who, f"there is no reservation {name}", **words)
            return
        specific = there.get("specificReservation", {})
        machine = specific.get("instanceProperties", {}).get("machineType", group.machine.name)
        free = int(specific.get("count", 0)) - int(specific.get("inUseCount", 0))
        why = ""
        if machine != group.machine.name:
            why = f"it is of {machine}, not of {group.machine.name}"
        elif specific and free < group.count:
            why = f"{group.count} are asked for, and {free} of {specific.get('count')} are free"
        elif there.get("specificReservationRequired") is False:
            why = "it can't be asked for by name: it was made without --require-specific-reservation"
        elif (state := there.get("status", "READY")) != "READY":
            why = f"it is {state}"
        if why:
            yield self._found("reservation", group.who, f"the reservation {name} does not fit", why, **words)

    # --- quotas --------------------------------------------------------------------------------------------

    def quotas(self, groups: Collection[HostGroup]) -> Iterator[Finding]:
        region = self.settings.region_name
        regional, everywhere = demand(groups)
        everywhere.update(self._network_to_make())
        places = ((f"{self._project}/regions/{region}", region, regional), (self._project, "", everywhere))
        for path, where, wanted in places:
            known = {one["metric"]: one for one in self.api.get("compute", path).get("quotas", ())}
            for metric, count in wanted.items():
                yield from self._quota(metric, count, known.get(metric), where)

    def _network_to_make(self) -> Iterator[str]:
        """The quotas of which one more is needed: what an earlier `up` made counts already."""
        for metric in () if self.settings.network.network else _OF_NEW_NETWORK:
            if not self._rights.is_done(f"compute.{metric.lower()}.create"):
                yield metric

    def _quota(self, metric: str, count: int, known: Json | None, region: str) -> Iterator[Finding]:
        where = region or self.settings.project
        if known is None:
            if metric.endswith("_GPUS"):
                what, why = f"the quota {metric} can't be looked at", "Google counts these GPUs by family"
                yield replace(self._found("quota", where, what, why, metric=metric), level="warning")
            return
        limit, used = float(known.get("limit", inf)), float(known.get("usage", 0))
        if count > limit - used:
            free = max(0, limit - used)
            why = f"{count} are needed, {free:g} of {limit:g} are left"
            place = "per-project-region" if region else "per-project"
            words = {"metric": metric, "quota_id": f"{metric.replace('_', '-')}-{place}"}
            if region:
                words["dimension"] = f" --dimensions=region={region}"
            wanted = f"{used + count:g}"
            yield self._found("quota", where, f"too little quota {metric}", why, wanted=wanted, **words)

    # --- a network that is there ---------------------------------------------------------------------------

    def network(self) -> Iterator[Finding]:
        settings, region = self.settings, self.settings.region_name
        name = str(settings.network.subnetwork)
        there = self._there(f"{self._project}/regions/{region}/subnetworks/{name}")
        network = self._there(f"{self._project}/global/networks/{settings.network.network}")
        if network is None:
            what = f"there is no network {settings.network.network}"
            yield self._found(
                "network-missing", "provider.network", what, network=settings.network.network or ""
            )
        if there is None:
            what = f"{region} has no subnetwork {name}"
            yield self._found("network-missing", "provider.network", what, network=name)
        elif str(there.get("network", "")).rpartition("/")[2] not in ("", settings.network.network):
            why = f"it is in the network {str(there['network']).rpartition('/')[2]}"
            what = f"{name} is not in {settings.network.network}"
            yield self._found("network-missing", "provider.network", what, why, network=name)

    def firewall(self) -> Iterator[Finding]:
        """Rules that come before the cluster's own and keep Identity-Aware Proxy from SSH."""
        name = self.settings.network.network
        path = f"{self._project}/global/networks/{name}/getEffectiveFirewalls"
        if (effective := self._there(path)) is None:
            return
        blocking = [one["name"] for one in effective.get("firewalls", ()) if _blocks(one)]
        for policy in effective.get("firewallPolicys", ()):
            # Policies of the network itself come after its rules, unless somebody has changed that.
            if not policy.get("type", "").startswith(("SYSTEM", "NETWORK")) and _denied_first(
                policy.get("rules", ())
            ):
                blocking.append(policy.get("shortName") or policy.get("name", "a policy"))
        for one in blocking:
            why = f"{one} drops what comes from {_IAP} to port {_SSH} before the cluster's rule lets it in"
            fix = (
                f"let {_IAP} in there, or give the rule a priority above {_OURS_PRIORITY}: `gcloud compute "
                f"firewall-rules update {one} --priority=3000 --project {self.settings.project}`"
            )
            yield Finding("provider.network", "error", "iap-firewall", "a firewall keeps SSH out", why, fix)


def _covers(ranges: Iterable[str]) -> bool:
    return any(_IAP.overlaps(IPv4Network(one)) for one in ranges if ":" not in one)


def _of_ssh(layers: Iterable[Mapping[str, Any]], key: str) -> bool:
    """Whether these protocols and ports include TCP's of SSH."""
    for one in layers:
        if one.get(key) in ("all", "tcp", "6"):
            bounds = [port.partition("-") for port in one.get("ports", ())]
            if not bounds or any(int(low) <= _SSH <= int(high or low) for low, _, high in bounds):
                return True
    return False


def _blocks(rule: Mapping[str, Any]) -> bool:
    """Whether a rule of the network drops SSH from IAP before ours: for all its hosts."""
    first = int(rule.get("priority", _OURS_PRIORITY)) <= _OURS_PRIORITY
    here = rule.get("direction", "INGRESS") == "INGRESS" and not rule.get("disabled")
    every = not rule.get("targetTags") and not rule.get("targetServiceAccounts")
    narrow = rule.get("sourceTags") or rule.get("sourceServiceAccounts")
    sources = rule.get("sourceRanges", [] if narrow else ["0.0.0.0/0"])
    return first and here and every and _of_ssh(rule.get("denied", ()), "IPProtocol") and _covers(sources)


def _denied_first(rules: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the first rule of a policy that means SSH from IAP denies it."""
    for rule in sorted(rules, key=lambda one: int(one.get("priority", 0))):
        match = rule.get("match", {})
        if rule.get("direction", "INGRESS") != "INGRESS" or rule.get("disabled"):
            continue
        if any(rule.get(key) for key in _FOR_SOME) or match.get("destIpRanges"):
            continue
        if _of_ssh(match.get("layer4Configs", ()), "ipProtocol") and _covers(match.get("srcIpRanges", ())):
            return bool(rule.get("action") == "deny")
    return False
