"""Checks of the most frequent obstacles to a cluster on Google Cloud, before anything is billed:
the login, the project, its APIs and quotas, machine types and images.

The checks only read. A finding has the code and the fix of the corresponding Terraform error, from
diagnoses.yaml. For all else, `up` shows what Google itself says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import ApiOffError, CloudError, PermissionDeniedError
from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp import quotas
from clusterctl.providers.gcp.api import Api, Json, rules
from clusterctl.providers.gcp.images import HostGroup
from clusterctl.providers.gcp.orphans import ID_LABEL
from clusterctl.providers.gcp.quotas import Shortage
from clusterctl.spec.base import SpecModel
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.spec.providers.gcp_machines import GcpMachineType, gpu_type
from clusterctl.spec.providers.gcp_nodes import image_of, release_of
from clusterctl.util import formatting
from clusterctl.util.assets import read_table
from clusterctl.util.process import parallel_map

_ANSWER_S: Final = 10.0
_TRIES: Final = 2
_MOST_CALLS: Final = 12
_DATA: Final = Path(__file__).with_name("data")
# The number of parts of a machine type that name its family: a3-highgpu.
_NAME_PARTS: Final = 2
_NOT_FOUND: Final = 404
_COUNTED: Final = "serviceusage.services.use"
_DRIVER_IN: Final = re.compile(r"nvidia|-cu\d|accelerator|deeplearning")

Check = tuple[str, Callable[[], Iterable[Finding]]]


def preflight(
    spec: ClusterSpec, cluster_id: str | None, services: Collection[str], *, api: Api | None = None
) -> tuple[Finding, ...]:
    """Return a finding for each problem that would prevent the creation of the missing hosts, with
    its fix.

    cluster_id: the cluster's id, or None before the first `up`. services: required APIs. If Google
    does not answer a check in time, the finding is only a warning, because Terraform would find the
    problem later.
    """
    settings = gcp.settings_of(spec)
    api = api or Api(settings.project, answer_s=_ANSWER_S, tries=_TRIES)
    # The same finding at several places is reported once.
    places: dict[Finding, list[str]] = {}
    for finding in _Checks(spec, settings, api, cluster_id).findings(services):
        places.setdefault(replace(finding, host=""), []).append(finding.host)
    return tuple(
        replace(finding, host=", ".join(dict.fromkeys(hosts))) for finding, hosts in places.items()
    )


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks for a spec. A check yields findings, or raises a CloudError if Google refuses a
    call.
    """

    spec: ClusterSpec
    settings: GcpSettings
    api: Api
    cluster_id: str | None

    def findings(self, services: Collection[str]) -> tuple[Finding, ...]:
        try:
            groups = self.groups()
        except CloudError as exc:
            return (self._refusal_finding("instances", exc),)
        if not groups:
            return ()
        # If the project is missing, Google refuses all other calls.
        if blockers := self._run_checks([("project", self.project)]):
            return blockers
        findings = self._run_checks((name, partial(self.service, name)) for name in services)
        disabled = {finding.host for finding in findings if finding.code == ApiOffError.code}
        has_compute = "compute.googleapis.com" not in disabled
        return findings + self._run_checks(self.checks(groups) if has_compute else ())

    def groups(self) -> tuple[HostGroup, ...]:
        """Return hosts that don't exist yet: a group for the controller and a group for each
        partition.
        """
        existing: set[str] = set()
        # Another check reports disabled APIs.
        with suppress(ApiOffError):
            if self.cluster_id:
                search = f'labels.{ID_LABEL}="{self.cluster_id}"'
                pages = self.api.pages("compute", f"{self._zone}/instances", filter=search)
                existing = {row["name"] for page in pages for row in page.get("items", ())}
        controller = gcp.controller_machine(self.spec)
        parts = [("", self.settings.controller, controller, [self.spec.controller_host])]
        for partition in self.spec.partitions:
            nodes = self.settings.nodes_of(partition.name)
            machine = gcp.machine_of(self.spec, partition)
            parts.append((partition.name, nodes, machine, [*self.spec.node_names(partition)]))
        return tuple(
            HostGroup(name, nodes, machine, image_of(nodes, machine), len(missing))
            for name, nodes, machine, hosts in parts
            if (missing := {*hosts} - existing)
        )

    def checks(self, groups: Collection[HostGroup]) -> Iterator[Check]:
        """Yield (name, function) of each check that needs the API of Compute Engine."""
        yield "quotas", partial(self.quotas, groups)
        for group in groups:
            yield f"image of {group.title}", partial(self.image, group)
            yield f"machine type of {group.title}", partial(self.machine_type, group)

    def _run_checks(self, checks: Iterable[Check]) -> tuple[Finding, ...]:

        def ask(check: Check) -> tuple[Finding, ...]:
            name, find_problems = check
            try:
                return tuple(find_problems())
            except CloudError as exc:
                return (self._refusal_finding(name, exc),)

        answers = parallel_map([*checks], ask, most=_MOST_CALLS)
        return tuple(finding for answer in answers for finding in answer)

    def _refusal_finding(self, name: str, exc: CloudError) -> Finding:
        """Return a finding about a refused call: a warning if a retry may succeed, otherwise an
        error.
        """
        failure = exc.failures[0]
        code = failure.about or failure.code
        fix = exc.fix or "run the same command again"
        lasting = {
            (rule.code, rule.about) for rule in rules() if not (rule.transient or rule.retryable)
        }
        if (failure.code, failure.about) in {*lasting, (ApiOffError.code, "")}:
            return Finding(
                self.settings.project, "error", code, exc.what, exc.why, fix, failure.code
            )
        return Finding(name, "warning", code, exc.what, exc.why, fix, failure.code)

    def _error(
        self, about: str, where: str, message: str, reason: str = "", **words: str
    ) -> Finding:
        rule = next(rule for rule in rules() if about in (rule.about, rule.code))
        location = {**self.settings.location, "region": self.settings.region_name}
        failure = rule.failure({**location, **words}, host=None, phase="plan")
        cause = reason or failure.cause
        return Finding(where, "error", about, message, cause, failure.fix, rule.code)

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
            # Google hides whether a project exists from users without access to it.
            is_hidden = isinstance(exc, PermissionDeniedError) and _COUNTED not in exc.why
            if exc.status != _NOT_FOUND and not is_hidden:
                raise
            message = (
                f"the project {self.settings.project} does not exist, or the login may not see it"
            )
            yield self._error("project", self.settings.project, message, exc.why)

    def service(self, name: str) -> Iterator[Finding]:
        """Yield an error if an API is disabled, or a warning if `up` may enable the API
        (`enable_apis`).
        """
        if (
            self.api.get("serviceusage", f"{self._project}/services/{name}").get("state")
            != "ENABLED"
        ):
            finding = self._error("api-off", name, "the API is not enabled", service=name)
            reason = "`up` enables it; until then, its quotas and resources can't be checked"
            yield (
                replace(finding, level="warning", why=reason)
                if self.settings.enable_apis
                else finding
            )

    def machine_type(self, group: HostGroup) -> Iterator[Finding]:
        """Yield an error if the zone lacks a machine type or its GPUs, or a finding if Google
        describes the type otherwise.
        """
        name = group.machine.name
        paths = [f"{self._zone}/machineTypes/{name}"]
        if group.machine.accelerator:
            paths.append(f"{self._zone}/acceleratorTypes/{group.machine.accelerator}")
        with suppress(PermissionDeniedError):
            row, *more = (self.api.find("compute", path) for path in paths)
            if row is None or None in more:
                missing = group.machine.accelerator if row else name
                message = f"{missing} does not exist in zones/{self.settings.zone}"
                yield self._error("machine-type", group.title, message, machine=str(missing))
                return
            own_facts = _facts_of(group.machine)
            google_facts = _facts_at_google(row)
            differing = [key for key, value in google_facts.items() if own_facts[key] != value]
            if differing:
                facts = ", ".join(f"{key}: {value}" for key, value in google_facts.items())
                wrong_facts = ", ".join(f"{key}: {own_facts[key]}" for key in differing)
                yield Finding(
                    group.title,
                    "error" if "gpus" in differing else "warning",
                    "machine-type-differs",
                    f"Google's {name} is not as clusterctl or the spec describes it",
                    f"Google says {facts}, not {wrong_facts}",
                    f"set provider.machine_types: {{{name}: {{{facts}}}}}",
                )

    def image(self, group: HostGroup) -> Iterator[Finding]:
        image = group.image
        project = group.image.project
        name = image.family or image.name or ""
        folder = "family/" if image.family else ""
        resource = self.api.find("compute", f"projects/{project}/global/images/{folder}{name}")
        if resource is None or resource.get("deprecated", {}).get("state") in (
            "OBSOLETE",
            "DELETED",
        ):
            message = f"the image {name} does not exist in the project {project}, or is obsolete"
            yield self._error("image-missing", group.title, message, image=name)
            return
        has_driver = self.spec.software.nvidia.has_driver or _DRIVER_IN.search(f"{project} {name}")
        if group.machine.gpu and release_of(image) and not has_driver:
            reason = f"{name} has no NVIDIA driver, and software.nvidia does not install a driver"
            fix = (
                "set software: {nvidia: {driver: open}}, or use the default image or an "
                "image with a driver"
            )
            yield Finding(
                group.title, "error", "image-driver", "the GPUs would have no driver", reason, fix
            )

    def quotas(self, groups: Collection[HostGroup]) -> Iterator[Finding]:
        region = self.settings.region_name
        for path, place, needs in (
            (f"{self._project}/regions/{region}", region, quotas.regional_needs(groups)),
            (self._project, self.settings.project, quotas.project_needs(groups)),
        ):
            rows = self.api.get("compute", path).get("quotas", ())
            for shortage in quotas.shortages(needs, rows):
                yield self._shortage_finding(shortage, place)

    def _shortage_finding(self, shortage: Shortage, place: str) -> Finding:
        metric = shortage.quota.metric
        dimensions = [shortage.quota.family] if shortage.quota.family else []
        words = {"metric": metric, "wanted": f"{shortage.used + shortage.needed:g}"}
        words["quota_id"] = f"{metric.replace('_', '-')}-per-project"
        if place == self.settings.region_name:
            words["quota_id"] += "-region"
            dimensions.insert(0, ("region", place))
        if dimensions:
            listed = ",".join(f"{name}={value}" for name, value in dimensions)
            words["dimension"] = f" --dimensions={listed}"
        if shortage.limit is None:
            message = f"the quota {metric} can't be checked"
        else:
            message = f"the quota {metric} is too small"
        finding = self._error("quota", place, message, shortage.reason, **words)
        return finding if shortage.is_certain else replace(finding, level="warning")


def _facts_of(machine: GcpMachineType) -> dict[str, Any]:
    """Return the keys and values of MachineFacts for a machine type, without GPUs that are added to
    it.
    """
    gpus = None if machine.guest_accelerator else machine.gpu
    return {
        "vcpus": machine.vcpus,
        "memory": formatting.exact_size(machine.memory_mib),
        "gpus": _flow(gpus.type, gpus.count) if gpus else None,
        "bundled_ssds": machine.bundled_ssds,
    }


def _facts_at_google(row: Json) -> dict[str, Any]:
    """Return the same of a machine type of the REST API, without values that Google does not
    tell.
    """
    facts: dict[str, Any] = {}
    if "guestCpus" in row:
        facts = {"vcpus": row["guestCpus"], "memory": formatting.exact_size(row["memoryMb"])}
    for gpu in row.get("accelerators", ()):
        name = gpu["guestAcceleratorType"]
        facts["gpus"] = _flow(gpu_type(name) or name, gpu["guestAcceleratorCount"])
    if "bundledLocalSsds" in row:
        facts["bundled_ssds"] = row["bundledLocalSsds"].get("partitionCount", 0)
    return facts


def _flow(gpu: str, count: int) -> str:
    return f"{{type: {gpu}, count: {count}}}"


class _JobsData(SpecModel):
    gpu: Mapping[str, str]
    gvnic: Mapping[str, str]
    notes: Mapping[str, str]


def notes(spec: ClusterSpec) -> tuple[str, ...]:
    """Return the hints about the cluster that `plan` and `up` show."""
    partitions = (gcp.machine_of(spec, partition) for partition in spec.partitions)
    messages = [*map(network_note, (gcp.controller_machine(spec), *partitions))]
    if gcp.settings_of(spec).shared_disk and not gcp.shared_disk(spec):
        messages.append(
            "provider.shared_disk is ignored, because it requires storage.name and no filestore"
        )
    return tuple(dict.fromkeys(filter(None, messages)))


def job_environment(machine: GcpMachineType, *, gvnic: bool) -> dict[str, str]:
    """Return the environment variables of jobs on this machine type. Empty for types without a
    GPU.
    """
    if machine.gpu is None:
        return {}
    return {**_jobs_data().gpu, **(_jobs_data().gvnic if gvnic else {})}


def network_note(machine: GcpMachineType) -> str | None:
    """Return a note if jobs don't use all network features of this machine's family, otherwise
    None.
    """
    family = "-".join(machine.name.split("-")[:_NAME_PARTS])
    note = _jobs_data().notes.get(family)
    return (
        f"{family}: jobs communicate through gVNIC's sockets; {note} (docs/gcp.md)"
        if note
        else None
    )


def _jobs_data() -> _JobsData:
    return read_table(_DATA / "jobs.yaml", _JobsData)
