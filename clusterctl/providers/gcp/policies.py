"""The policies of an organization that forbid a cluster, as Google applies them to the project.

preflight.yaml lists the constraints, and why they concern a cluster. Sources:
cloud.google.com/resource-manager/docs/organization-policy (org-policy-constraints,
understanding-hierarchy, defining-locations, restricting-resources),
cloud.google.com/compute/docs/images/restricting-image-access, 2026-11.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterctl.errors import CloudError
from clusterctl.providers.gcp.api import Api, Json
from clusterctl.providers.gcp.images import HostGroup
from clusterctl.spec.providers.gcp import GcpSettings

_MANAGED: Final = ".managed."
# Google's own organization, whose networks Filestore peers with.
_GOOGLE: Final = "under:organizations/433637338589"
# The types of getAncestry's answer -> the names of their groups of values.
_ANCESTORS: Final = {"folder": "folders", "organization": "organizations"}


def effective_policy(api: Api, constraint: str) -> Json:
    """Return the effective policy for a constraint, such as `compute.requireOsLogin`, in the
    project.

    Only the Organization Policy API knows managed constraints, such as
    `compute.managed.requireOsLogin`
    (github.com/terraform-google-modules/terraform-google-org-policy/issues/183). Raise a CloudError
    if the login may not read the policy.
    """
    if _MANAGED in constraint:
        return api.get(
            "orgpolicy", f"projects/{api.project}/policies/{constraint}:getEffectivePolicy"
        )
    path = f"projects/{api.project}:getEffectiveOrgPolicy"
    return api.post("cloudresourcemanager", path, {"constraint": f"constraints/{constraint}"})


def enforces(policy: Mapping[str, Any]) -> bool:
    """Return whether a boolean policy is enforced. Ignore rules that apply only to some tags."""
    managed = any(
        rule.get("enforce") and not rule.get("condition")
        for rule in policy.get("spec", {}).get("rules", ())
    )
    return managed or policy.get("booleanPolicy", {}).get("enforced") is True


@dataclass(frozen=True, slots=True)
class Use:
    """A value that the cluster uses and that the policy of a list constraint may forbid.

    groups: groups of values that contain the value, as policies name them: `in:us-locations`.
    may_be_in_others: whether other groups may also contain it.
    is_of_project: whether the groups of the project, its folders and its organization contain it.
    is_certain: whether Google documents that the constraint concerns this value.
    """

    constraint: str
    value: str
    groups: tuple[str, ...] = ()
    may_be_in_others: bool = False
    is_of_project: bool = False
    is_certain: bool = True

    def is_forbidden_by(self, policy: Mapping[str, Any]) -> bool | None:
        """Return whether an effective policy forbids the value. None: its groups don't tell."""
        rules = policy.get("listPolicy", {})
        names = {self.value, *self.groups}
        allowed, denied = (
            {value.removeprefix("is:") for value in rules.get(key, ())}
            for key in ("allowedValues", "deniedValues")
        )
        if rules.get("allValues") == "DENY" or names & denied:
            return True
        if allowed and not names & allowed:
            return None if self._unknown_groups(allowed) else True
        return None if self._unknown_groups(denied) else False

    def _unknown_groups(self, values: Collection[str]) -> bool:
        return self.may_be_in_others and any(
            value.startswith(("in:", "under:")) and value not in self.groups for value in values
        )


def uses(
    settings: GcpSettings, groups: Collection[HostGroup], *, is_new: bool
) -> Mapping[str, tuple[Use, ...]]:
    """Return list constraint -> values that the creation of the hosts uses.

    is_new: whether the cluster has no network, NAT and Filestore yet.
    """
    found = defaultdict[str, list[Use]](list)
    for use in (
        *_image_uses(settings, groups),
        *_location_uses(settings, is_new=is_new),
        *_service_uses(settings),
        *(_network_uses(settings) if is_new else ()),
    ):
        found[use.constraint].append(use)
    return {constraint: tuple(dict.fromkeys(values)) for constraint, values in found.items()}


def with_project_groups(use: Use, api: Api) -> Use:
    """Return a value of the project with the groups that contain the project, such as
    `under:organizations/1`, unless the login may not read them.
    """
    if not use.is_of_project:
        return use
    try:
        answer = api.post("cloudresourcemanager", f"projects/{api.project}:getAncestry", {})
    except CloudError:
        return use
    ancestors = (row["resourceId"] for row in answer.get("ancestor", ()))
    groups = (
        f"under:{_ANCESTORS[one['type']]}/{one['id']}"
        for one in ancestors
        if one["type"] in _ANCESTORS
    )
    return replace(use, groups=(*use.groups, *groups), may_be_in_others=False)


def _image_uses(settings: GcpSettings, groups: Collection[HostGroup]) -> Iterator[Use]:
    for group in groups:
        # "Trusted image policies do not restrict access to [...] custom images in your local
        # project."
        if group.image.project != settings.project:
            value = f"projects/{group.image.project}"
            yield Use("compute.trustedImageProjects", value, may_be_in_others=True)


def _location_uses(settings: GcpSettings, *, is_new: bool) -> Iterator[Use]:
    # "Allowing or denying a multi-region or region does not imply that all included sub-locations
    # should also be allowed or denied." Google's groups of a continent begin like its regions.
    constraint = "gcp.resourceLocations"
    region = settings.region_name
    groups = (f"in:{region}-locations", f"in:{region.partition('-')[0]}-locations")
    yield Use(
        constraint,
        settings.zone,
        (f"in:{settings.zone}-locations", *groups),
        may_be_in_others=True,
    )
    makes_bucket = settings.bucket is not None and settings.bucket.create
    makes_network = is_new and settings.network.network is None
    is_regional = settings.filestore is not None and settings.filestore.tier == "REGIONAL"
    if makes_network or makes_bucket or is_regional:
        yield Use(constraint, region, groups, may_be_in_others=True)


def _service_uses(settings: GcpSettings) -> Iterator[Use]:
    # The constraint on the use of services ignores IAM, Logging and Monitoring.
    makes_bucket = settings.bucket is not None and settings.bucket.create
    used = {
        "compute.googleapis.com": True,
        "file.googleapis.com": settings.filestore is not None,
        "storage.googleapis.com": settings.bucket is not None or settings.state is not None,
    }
    encrypted = {**used, "storage.googleapis.com": makes_bucket}
    for service, is_used in used.items():
        if is_used:
            yield Use("gcp.restrictServiceUsage", service)
        if encrypted[service] and settings.kms_key is None:
            yield Use("gcp.restrictNonCmekServices", service)
    yield Use("compute.restrictNonConfidentialComputing", "compute.googleapis.com")


def _network_uses(settings: GcpSettings) -> Iterator[Use]:
    if settings.network.network is None:
        # A policy can't name the new subnetwork, whose name contains the cluster's random id.
        path = f"projects/{settings.project}/regions/{settings.region_name}/subnetworks/new"
        yield Use(
            "compute.restrictCloudNATUsage",
            path,
            (f"under:projects/{settings.project}",),
            may_be_in_others=True,
            is_of_project=True,
        )
        # The values are the minimums of sampling: ESSENTIAL, LIGHT, COMPREHENSIVE.
        yield Use("compute.requireVpcFlowLogs", "none")
    if settings.has_shared_vpc:
        host = settings.network_project
        groups = (f"under:projects/{host}",)
        yield Use(
            "compute.restrictSharedVpcSubnetworks",
            settings.subnetwork_path,
            groups,
            may_be_in_others=True,
        )
    # In a Shared VPC, the peering exists.
    elif settings.filestore:
        yield Use(
            "compute.restrictVpcPeering",
            "networks of Google",
            (_GOOGLE,),
            may_be_in_others=True,
            is_certain=False,
        )
