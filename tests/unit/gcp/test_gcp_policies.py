"""Policies of an organization with lists of values: what of them forbids a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.preflight import preflight
from clusterctl.spec.load import parse_spec
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google
from tests.support.google.project import FOLDER, ORGANIZATION

SPEC = """\
version: 1
name: demo
provider: {{type: gcp, project: {project}, zone: us-central1-a{more}}}
partitions: [{{name: train, nodes: 2, gpus: {{type: l4}}}}]
"""
IMAGES = "compute.trustedImageProjects"
LOCATIONS = "gcp.resourceLocations"
NAT = "compute.restrictCloudNATUsage"
FLOW_LOGS = "compute.requireVpcFlowLogs"
PEERING = "compute.restrictVpcPeering"
KEYS = "gcp.restrictNonCmekServices"
SERVICES = "gcp.restrictServiceUsage"
CONFIDENTIAL = "compute.restrictNonConfidentialComputing"
ROCKY = "projects/rocky-linux-cloud"
ROCKY_GPU = "projects/rocky-linux-accelerator-cloud"
OWN_NETWORK = ", network: {network: lan, subnetwork: sub}"
FILESTORE = ", filestore: {}"
KMS = ", kms_key: projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
BUCKET = ", bucket: {name: my-data, create: true}"
DENY_ALL = {"allValues": "DENY"}


def found(
    google: Google, constraint: str, policy: dict[str, Any], more: str, *, is_new: bool = True
) -> list[Finding]:
    base = f"projects/{PROJECT}"
    google.world.put("google_compute_network", f"{base}/global/networks/lan")
    sub = f"{base}/regions/us-central1/subnetworks/sub"
    google.world.put("google_compute_subnetwork", sub, region="us-central1")
    google.project.lists[constraint] = policy
    spec = parse_spec(SPEC.format(project=PROJECT, more=more), "cluster.yaml")
    api = Api(PROJECT, clock=Clock(sleep=lambda _: None))
    return [*preflight(spec, None if is_new else "a1b2c3", (), api=api)]


def allow(*values: str) -> dict[str, Any]:
    return {"allowedValues": [*values]}


def deny(*values: str) -> dict[str, Any]:
    return {"deniedValues": [*values]}


@pytest.mark.parametrize(
    ("constraint", "policy", "more", "level"),
    [
        (IMAGES, DENY_ALL, "", "error"),
        (IMAGES, allow(ROCKY, ROCKY_GPU), "", ""),
        (IMAGES, allow(f"is:{ROCKY}", f"is:{ROCKY_GPU}"), "", ""),
        (IMAGES, allow(ROCKY), "", "error"),
        (IMAGES, allow(ROCKY, "under:organizations/1"), "", "warning"),
        (IMAGES, deny(ROCKY_GPU), "", "error"),
        (IMAGES, deny("projects/debian-cloud"), "", ""),
        (LOCATIONS, allow("in:us-central1-locations"), "", ""),
        (LOCATIONS, allow("in:us-locations"), "", ""),
        (LOCATIONS, allow("us-central1", "us-central1-a"), "", ""),
        # A region does not include its zones, nor a zone its region.
        (LOCATIONS, allow("us-central1"), "", "error"),
        (LOCATIONS, allow("us-central1-a"), "", "error"),
        (LOCATIONS, allow("us-central1-a"), OWN_NETWORK, ""),
        (LOCATIONS, allow("us-central1-a"), OWN_NETWORK + BUCKET, "error"),
        (LOCATIONS, allow("europe-west1", "europe-west1-b"), "", "error"),
        (LOCATIONS, allow("in:eu-locations"), "", "warning"),
        (LOCATIONS, deny("in:us-locations"), "", "error"),
        (NAT, DENY_ALL, "", "error"),
        (NAT, DENY_ALL, OWN_NETWORK, ""),
        (NAT, allow(f"under:projects/{PROJECT}"), "", ""),
        (NAT, allow(f"under:folders/{FOLDER}"), "", ""),
        (NAT, allow(f"under:organizations/{ORGANIZATION}"), "", ""),
        (NAT, allow("under:folders/1"), "", "error"),
        (NAT, allow(f"projects/{PROJECT}/regions/us-central1/subnetworks/lan"), "", "error"),
        (FLOW_LOGS, allow("ESSENTIAL", "LIGHT"), "", "error"),
        (FLOW_LOGS, allow("ESSENTIAL", "LIGHT"), OWN_NETWORK, ""),
        (PEERING, DENY_ALL, "", ""),
        (PEERING, DENY_ALL, FILESTORE, "warning"),
        (PEERING, allow("under:organizations/433637338589"), FILESTORE, ""),
        (PEERING, allow(f"under:organizations/{ORGANIZATION}"), FILESTORE, "warning"),
        (KEYS, deny("compute.googleapis.com"), "", "error"),
        (KEYS, deny("compute.googleapis.com"), KMS, ""),
        (KEYS, deny("storage.googleapis.com"), "", ""),
        (KEYS, deny("storage.googleapis.com"), BUCKET, "error"),
        (SERVICES, allow("compute.googleapis.com"), "", ""),
        (SERVICES, allow("storage.googleapis.com"), "", "error"),
        (SERVICES, allow("compute.googleapis.com"), FILESTORE, "error"),
        (SERVICES, deny("file.googleapis.com"), "", ""),
        (CONFIDENTIAL, deny("compute.googleapis.com"), "", "error"),
    ],
)
def test_finding_about_a_list_policy_depends_on_the_values_that_the_cluster_needs(
    google: Google, constraint: str, policy: dict[str, Any], more: str, level: str
) -> None:
    findings = found(google, constraint, policy, more)
    assert [(one.level, one.code) for one in findings] == ([(level, "org-policy")] if level else [])
    assert all(constraint in one.what and constraint in one.fix for one in findings)


@pytest.mark.parametrize(
    ("constraint", "allowed", "named"),
    [
        (IMAGES, ROCKY, f"images of {ROCKY_GPU},"),
        (LOCATIONS, "europe-west1", "resources in us-central1-a and us-central1"),
    ],
)
def test_list_policy_names_the_forbidden_values(
    google: Google, constraint: str, allowed: str, named: str
) -> None:
    (one,) = found(google, constraint, allow(allowed), "")
    assert named in one.why


def test_images_of_the_own_project_need_no_trust(google: Google) -> None:
    image = f"image: {{project: {PROJECT}, name: mine}}"
    more = f", controller: {{{image}}}, partitions: {{train: {{{image}}}}}"
    assert {one.code for one in found(google, IMAGES, DENY_ALL, more)} == {"image-missing"}


@pytest.mark.parametrize("constraint", [NAT, FLOW_LOGS])
def test_policies_on_networks_do_not_concern_a_network_that_exists(
    google: Google, constraint: str
) -> None:
    assert found(google, constraint, DENY_ALL, "", is_new=False) == []


def test_groups_of_values_are_unknown_if_the_login_may_not_read_the_ancestors(
    google: Google,
) -> None:
    google.fail("cloudresourcemanager.projects.getAncestry", 403, reason="forbidden", times=9)
    (one,) = found(google, NAT, allow(f"under:folders/{FOLDER}"), "")
    assert (one.level, one.code) == ("warning", "org-policy")


def test_list_policies_that_the_login_may_not_read_are_ignored(google: Google) -> None:
    google.fail("cloudresourcemanager.projects.getEffectiveOrgPolicy", 403, reason="forbidden",
                times=99)  # fmt: skip
    assert found(google, IMAGES, DENY_ALL, "") == []
