"""`plan --preflight` on Google Cloud: all obstacles in one look, each with its command; else nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from google.auth.exceptions import RefreshError

from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.notes import ahead
from clusterctl.providers.gcp.preflight import preflight
from clusterctl.providers.gcp.provider import services
from clusterctl.spec.gcp import settings_of
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.util.progress import Limit
from tests.support.google import discovery, gcloud
from tests.support.google.api import FACTS, PROJECT, Google
from tests.support.google.refusals import REFUSALS, filled
from tests.support.messages import shows
from tests.unit.gcp import recorded
from tests.unit.gcp.clusters import provider_of, silent, workspace_in

ZONE = "us-central1-a"
LOGIN = "`gcloud auth application-default login`"
SPEC = f"""\
version: 1
name: demo
provider:
  type: gcp
  project: {PROJECT}
  zone: {ZONE}
  enable_apis: false
  network: {{network: lan, subnetwork: sub}}
  bucket: {{name: my-data}}
  filestore: {{}}
  partitions:
    held: {{reservation: mine}}
    own: {{image: {{project: debian-cloud, family: debian-12}}}}
partitions:
  - {{name: train, nodes: 2, gpus: {{type: l4}}}}
  - {{name: held, nodes: 3, gpus: {{type: a100}}}}
  - {{name: own, nodes: 1, gpus: {{type: t4}}}}
software: {{nvidia: {{driver: open}}}}
"""
PLAIN = f"""\
version: 1
name: demo
provider: {{type: gcp, project: {PROJECT}, zone: {ZONE}}}
partitions: [{{name: train, nodes: 2, gpus: {{type: l4}}}}]
"""


def found(text: str, cluster_id: str | None = None, api: Api | None = None) -> tuple[Finding, ...]:
    return look(parse_spec(text, "cluster.yaml"), cluster_id, api)


def look(spec: ClusterSpec, cluster_id: str | None, api: Api | None = None) -> tuple[Finding, ...]:
    api = api or Api(PROJECT, limit=Limit.within(300))
    return preflight(spec, cluster_id, services(settings_of(spec)), api=api)


LAN, SUB = (
    f"projects/{PROJECT}/global/networks/lan",
    f"projects/{PROJECT}/regions/us-central1/subnetworks/sub",
)


@pytest.fixture(autouse=True)
def logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, google: Google) -> Path:
    """The folder of `gcloud`; somebody is logged in."""
    discovery.methods("compute")  # which takes seconds to read
    folder = gcloud.install(tmp_path, google.world.path)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    google.world.put("google_compute_network", LAN)
    google.world.put("google_compute_subnetwork", SUB, region="us-central1")
    return folder


Plant = Callable[[Google], object]


def has(google: Google, path: str, **special: Any) -> None:
    """Something is there, and special; or not there."""
    google.project.has[path] = special or None


def deny(google: Google, *rights: str) -> None:
    google.project.denied |= set(rights)


def only(google: Google, constraint: str, *allowed: str) -> None:
    google.project.allowed[constraint] = [*allowed]


def quota(google: Google, metric: str, limit: float, used: float = 0.0) -> None:
    google.project.quotas[metric] = (limit, used)


RULE = {"name": "no-ssh", "priority": 10, "sourceRanges": ["0.0.0.0/0"], "denied": [{"IPProtocol": "tcp"}]}
GPU_IMAGE = "family/rocky-linux-9-optimized-gcp-nvidia-580"
# What is planted: the code of what is found of it, a word of that, and a word of the command that removes it.
OBSTACLES: dict[str, tuple[Plant, str, str, str]] = {
    "tunnels": (lambda g: g.off.add("iap"), "api-off", "iap.googleapis.com", "services enable iap.goo"),
    "Filestore": (lambda g: g.off.add("file"), "api-off", "file.googleapis.com", "services enable file.goo"),
    "right to tunnels": (
        lambda g: deny(g, "iap.tunnelInstances.accessViaIAP"),
        *("permission", "roles/iap.tunnelResourceAccessor", "--role roles/iap.tunnelResourceAccessor"),
    ),
    "right to act as": (
        lambda g: deny(g, "iam.serviceAccounts.actAs"),
        *("permission", "iam.serviceAccounts.actAs", "--role roles/iam.serviceAccountUser"),
    ),
    "right to count calls": (
        lambda g: deny(g, "serviceusage.services.use"),
        *("permission", "serviceusage.services.use", "--role roles/serviceusage.serviceUsageConsumer"),
    ),
    "GPUs of a region": (
        lambda g: quota(g, "NVIDIA_L4_GPUS", 1),
        *("quota", "2 are needed, 1 of 1 are left", "--quota-id=NVIDIA-L4-GPUS-per-project-region"),
    ),
    "GPUs everywhere": (
        lambda g: quota(g, "GPUS_ALL_REGIONS", 0),
        *("quota", "3 are needed, 0 of 0 are left", "--quota-id=GPUS-ALL-REGIONS-per-project "),
    ),
    "processors": (lambda g: quota(g, "CPUS", 24, 20), "quota", "4 of 24 are left", "--preferred-value=28"),
    "disks": (
        lambda g: quota(g, "SSD_TOTAL_GB", 500, 300),
        *("quota", "SSD_TOTAL_GB", "--dimensions=region=us-central1"),
    ),
    "zone": (lambda g: has(g, f"zones/{ZONE}", status="DOWN"), "stockout", "DOWN", "provider.zone"),
    "machine type": (
        lambda g: has(g, "machineTypes/g2-standard-4"),
        *("machine-type-unavailable", "g2-standard-4", "machine-types list"),
    ),
    "GPU type": (
        lambda g: has(g, "acceleratorTypes/nvidia-tesla-t4"),
        *("machine-type-unavailable", "nvidia-tesla-t4", "accelerator-types list"),
    ),
    "obsolete image": (
        lambda g: has(g, GPU_IMAGE, deprecated={"state": "OBSOLETE"}),
        *("image-missing", "OBSOLETE", "images list"),
    ),
    "large image": (
        lambda g: has(g, "family/debian-12", diskSizeGb="80"),
        *("boot-disk", "needs 80 GiB", "size: 80GiB"),
    ),
    "image for ARM": (
        lambda g: has(g, "family/rocky-linux-9-optimized-gcp", architecture="ARM64"),
        *("image-architecture", "ARM64", "name an image for x86_64"),
    ),
    "reservation": (
        lambda g: has(g, "reservations/mine", specificReservation={"count": "4", "inUseCount": "2"}),
        *("reservation", "3 are asked for, and 2 of 4 are free", "reservations describe mine"),
    ),
    "images of others": (
        lambda g: only(
            g, "compute.trustedImageProjects", "is:projects/rocky-linux-cloud", "projects/debian-cloud"
        ),
        *("org-policy", "images of rocky-linux-accelerator-cloud", "describe compute.trustedImageProjects"),
    ),
    "places": (
        lambda g: only(g, "gcp.resourceLocations", "in:eu-locations"),
        *("org-policy", f"does not allow {ZONE}", "describe gcp.resourceLocations"),
    ),
    "subnetwork": (
        lambda g: g.world.put("google_compute_subnetwork", SUB, network="other", region="us-central1"),
        *("network-missing", "in the network other", "networks subnets list"),
    ),
    "firewall": (
        lambda g: has(g, "lan/getEffectiveFirewalls", firewalls=[RULE]),
        *("iap-firewall", "no-ssh drops", "firewall-rules update no-ssh"),
    ),
    "bucket": (lambda g: has(g, "b/my-data"), "bucket-missing", "my-data", "buckets create gs://my-data"),
}

# What a policy that is enforced forbids, and what to do with the policy.
POLICIES = {
    "compute.disableGuestAttributesAccess": ("SSH host keys", "describe"),
    "compute.managed.disableGuestAttributesAccess": ("SSH host keys", "describe"),
    "compute.requireOsLogin": ("rejects instances with OS Login off", "delete"),
    "compute.managed.requireOsLogin": ("rejects instances with OS Login off", "delete"),
    "iam.managed.disableServiceAccountCreation": ("service accounts", "describe"),
    "compute.managed.restrictNonConfidentialComputing": ("no Confidential VMs", "describe"),
    "compute.requireShieldedVm": ("Secure Boot", "describe"),
}
OBSTACLES |= {
    policy: (lambda g, policy=policy: g.project.enforced.add(policy), "org-policy", why, f"{verb} {policy}")
    for policy, (why, verb) in POLICIES.items()
}


def test_in_a_project_where_nothing_stands_in_the_way_nothing_is_found() -> None:
    assert found(PLAIN) == ()
    assert found(SPEC) == ()


def test_rules_that_keep_no_ssh_out_are_no_obstacle(google: Google) -> None:
    """Of some senders, for some hosts, or of a policy that comes after the rules."""
    deny_all = {"direction": "INGRESS", "action": "deny", "priority": 1}
    everything = {"srcIpRanges": ["0.0.0.0/0"], "layer4Configs": [{"ipProtocol": "all"}]}
    policies = [
        {"type": "NETWORK", "shortName": "after", "rules": [{**deny_all, "match": everything}]},
        *(
            {"type": "HIERARCHY", "rules": [{**deny_all, "match": everything, key: [one]}]}
            for key, one in (
                ("targetResources", "x"),
                ("targetSecureTags", {"name": "tagValues/1"}),
                ("targetServiceAccounts", "x"),
            )
        ),
        {
            "type": "HIERARCHY",
            "rules": [{**deny_all, "match": {**everything, "destIpRanges": ["10.0.0.0/8"]}}],
        },
    ]
    some = {key: value for key, value in RULE.items() if key != "sourceRanges"}
    rules = [{**some, "sourceTags": ["x"]}, {**some, "sourceServiceAccounts": ["x"]}]
    has(google, "lan/getEffectiveFirewalls", firewalls=rules, firewallPolicys=policies)
    assert found(SPEC) == ()
    has(google, "lan/getEffectiveFirewalls", firewallPolicys=[{**policies[0], "type": "HIERARCHY"}])
    assert [one.code for one in found(SPEC)] == ["iap-firewall"]


def test_a_network_of_the_clusters_own_that_is_there_needs_no_quota(google: Google) -> None:
    """As after an `up` that failed; what it did not come to is still needed."""

    def lacks(text: str, cluster_id: str | None = None) -> set[str]:
        short = found(text, cluster_id)
        assert {one.code for one in short} <= {"quota"}
        return {one.what.rpartition(" ")[2] for one in short}

    full = {"NETWORKS", "SUBNETWORKS", "ROUTERS"}
    for metric in full:
        quota(google, metric, 5, 5)
    assert lacks(PLAIN) == full
    region = f"projects/{PROJECT}/regions/us-central1"
    google.world.put("google_compute_network", f"projects/{PROJECT}/global/networks/demo-a1b2c3-network")
    subnetwork = f"{region}/subnetworks/demo-a1b2c3-subnetwork"
    google.world.put("google_compute_subnetwork", subnetwork, region="us-central1")
    assert lacks(PLAIN, "a1b2c3") == {"ROUTERS"}
    google.world.put("google_compute_router", f"{region}/routers/demo-a1b2c3-router", region="us-central1")
    assert found(PLAIN, "a1b2c3") == ()
    assert lacks(PLAIN) == full


def test_on_a_network_that_is_there_nobody_needs_the_right_to_make_one(google: Google) -> None:
    deny(google, "compute.networks.create", "compute.routers.create", "compute.subnetworks.create")
    assert found(SPEC) == ()
    (one,) = found(PLAIN)
    assert one.why == (
        "the login lacks compute.networks.create, compute.subnetworks.create, compute.routers.create"
    )


# What a login lacks that may make instances and disks, and act as service accounts, but nothing else.
ONCE = ("compute.networks.create", "compute.subnetworks.create", "compute.routers.create",
        "compute.firewalls.create", "iam.serviceAccounts.create", "iam.serviceAccounts.delete",
        "resourcemanager.projects.setIamPolicy")  # fmt: skip


def test_one_more_node_needs_no_right_to_make_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As real Terraform makes it; where some of it is missing, the right to that is needed."""
    text = PLAIN.replace("zone:", "enable_apis: false, zone:")
    spec, asked = (parse_spec(text.replace("nodes: 2", f"nodes: {count}"), "") for count in (1, 2))
    workspace = workspace_in(tmp_path)
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=True) as (_, google):
        provider_of(spec).apply(spec, workspace, keep={}, report=silent)
        cluster_id = workspace.cluster_id()
        deny(google, *ONCE)
        assert lacking(asked, cluster_id) == set()
        assert lacking(asked, None) == set(ONCE), "of another cluster"
        for kind, one in (
            ("google_compute_network", "compute.networks.create"),
            ("google_compute_subnetwork", "compute.subnetworks.create"),
            ("google_compute_router", "compute.routers.create"),
            ("google_compute_firewall", "compute.firewalls.create"),
            ("google_project_iam_member", "resourcemanager.projects.setIamPolicy"),
        ):
            with google.world.change() as state:
                path, gone = state["resources"][kind].popitem()
            assert lacking(asked, cluster_id) == {one}
            with google.world.change() as state:
                state["resources"][kind][path] = gone
        with google.world.change() as state:
            state["resources"]["google_service_account"].popitem()
        assert lacking(asked, cluster_id) == {"iam.serviceAccounts.create", "iam.serviceAccounts.delete"}


def lacking(spec: ClusterSpec, cluster_id: str | None) -> set[str]:
    errors = [one for one in look(spec, cluster_id) if one.level == "error"]
    said = [one.why.removeprefix("the login lacks ") for one in errors]
    return {name for text in said for name in text.split(", ")}


def test_a_right_that_may_be_given_under_a_condition_keeps_nobody_from_up(google: Google) -> None:
    """testIamPermissions of a project does not show it, nor one on the instances."""
    deny(google, "iap.tunnelInstances.accessViaIAP")
    (one,) = found(SPEC)
    assert one.level == "warning"
    assert "IAM condition" in one.why
    assert "roles/iap.tunnelResourceAccessor" in one.fix


def test_all_obstacles_are_named_at_once_and_nothing_is_made(google: Google, logged_in: Path) -> None:
    (logged_in / "account").write_text("")
    for plant, *_ in OBSTACLES.values():
        plant(google)
    before = google.world.read()
    findings = found(SPEC)
    assert len(findings) == len(OBSTACLES) + 1
    for _, code, why, fix in (*OBSTACLES.values(), (None, "gcloud", "not logged in", "gcloud auth login")):
        hits = [f for f in findings if f.code == code and why in str(f) and fix in f.fix]
        assert len(hits) == 1, (code, why, [*map(str, findings)])
    assert google.world.read() == before


@pytest.mark.parametrize("cluster_id", [None, "a1b2c3"])
@pytest.mark.parametrize(
    ("calls", "name", "fix"),
    [
        ("*", "quota_project_denied", "--role roles/serviceusage.serviceUsageConsumer"),
        ("*", "consumer_invalid", "gcloud projects list"),
        ("compute.*", "billing_disabled", f"billing/linkedaccount?project={PROJECT}"),
    ],
)
def test_what_has_google_refuse_all_calls_is_one_finding(
    google: Google, calls: str, name: str, fix: str, cluster_id: str | None
) -> None:
    google.refuse(calls, name)
    (one,) = found(PLAIN, cluster_id)
    assert (one.level, one.code) == ("error", REFUSALS[name].code)
    assert fix in one.fix
    assert filled(REFUSALS[name].message, FACTS).split(".")[0] in one.why


def test_without_a_login_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    assert_asks_for_a_login(found(PLAIN), "no login")


def assert_asks_for_a_login(findings: tuple[Finding, ...], why: str) -> None:
    (one,) = findings
    assert (one.level, one.code) == ("error", "credentials")
    assert why in one.what
    assert LOGIN in one.fix


class ExpiredSession(requests.Session):
    """As google-auth's: what Google's token endpoint says (google-auth 2.62, oauth2/_client.py)."""

    def request(self, *_: object, **__: object) -> requests.Response:
        raise RefreshError("invalid_grant: Token has been expired or revoked.")


@pytest.mark.parametrize("cluster_id", [None, "a1b2c3"])
def test_of_a_login_that_has_expired_nothing_else_is_said(cluster_id: str | None) -> None:
    api = Api(PROJECT, session=ExpiredSession())
    assert_asks_for_a_login(found(PLAIN, cluster_id, api), "has expired")


@pytest.mark.parametrize(
    ("image", "software", "codes"),
    [
        ("project: debian-cloud, family: debian-12", "", ["image-driver"]),
        ("project: debian-cloud, family: debian-12", "nvidia: {driver: open}", []),
        ("project: deeplearning-platform-release, family: common-cu129-ubuntu-2204-nvidia-580", "", []),
        ("project: my-images, family: with-a-driver-of-ours", "", []),
    ],
)
def test_gpus_on_a_public_image_without_a_driver(image: str, software: str, codes: list[str]) -> None:
    text = PLAIN.replace("zone:", f"partitions: {{train: {{image: {{{image}}}}}}}, zone:")
    findings = found(f"{text}software: {{{software}}}\n")
    assert [one.code for one in findings] == codes
    assert all("software: {nvidia: {driver: open}}" in one.fix for one in findings)


def test_managed_policies_that_can_not_be_looked_at_are_one_warning(google: Google) -> None:
    """Of an API that most projects never enabled; a project without an organization has no policies."""
    google.off.add("orgpolicy")
    google.project.enforced.add("compute.managed.requireOsLogin")
    (one,) = found(PLAIN)
    assert (one.level, one.code) == ("warning", "org-policy")
    assert "services enable orgpolicy.googleapis.com" in one.fix
    google.project.has_parent = False
    assert found(PLAIN) == ()


@pytest.mark.parametrize("unseen", ["the managed policy", "all policies"])
def test_os_login_of_the_project_is_named_where_its_policy_can_not_be_looked_at(
    google: Google, unseen: str
) -> None:
    """Google turns it on in new projects of an organization that requires it: instances would be rejected."""
    google.project.metadata["enable-oslogin"] = "TRUE"
    # The instances have it off, and no policy forbids that.
    assert found(PLAIN) == ()
    google.off.add("orgpolicy")
    if unseen == "all policies":
        why = {"reason": "forbidden", "message": "The caller does not have permission"}
        google.fail("cloudresourcemanager.projects.getEffectiveOrgPolicy", 403, times=100, **why)
    named = [one for one in found(PLAIN) if "OS Login" in one.what]
    assert [(one.level, one.code) for one in named] == [("warning", "org-policy")]
    assert "compute.requireOsLogin" in named[0].fix
    google.project.metadata["enable-oslogin"] = "FALSE"
    assert not [one for one in found(PLAIN) if "OS Login" in one.what]


def test_an_image_of_the_nodes_needs_rights_and_a_project_that_is_trusted(google: Google) -> None:
    bakes = PLAIN.replace("zone:", "image: {bake: true}, zone:")
    deny(google, "compute.images.create")
    only(
        google,
        "compute.trustedImageProjects",
        "projects/rocky-linux-cloud",
        "projects/rocky-linux-accelerator-cloud",
    )
    # It is not asked for.
    assert not found(PLAIN)
    said = {one.code: str(one) for one in found(bakes)}
    assert set(said) == {"permission", "org-policy"}
    assert "compute.images.create" in said["permission"]
    assert f"images of {PROJECT}" in said["org-policy"]


@pytest.mark.parametrize(
    ("gpus", "software", "codes"),
    [
        ("{type: a100, count: 2}", "", ["fabric-manager"]),
        ("{type: h100, count: 8}", "", ["fabric-manager"]),
        ("{type: h100, count: 8}", "software: {nvidia: {driver: open}}\n", []),
        ("{type: a100}", "", []),
        ("{type: l4, count: 8}", "", []),
    ],
)
def test_gpus_behind_nvswitches_are_told_of_where_their_fabric_manager_is_left_to_the_image(
    gpus: str, software: str, codes: list[str]
) -> None:
    """By `plan --preflight` and `up`, and by `plan` of the hosts that are to be made."""
    text = PLAIN.replace("nodes: 2, gpus: {type: l4}", f"nodes: 2, gpus: {gpus}") + software
    findings = [one for one in found(text) if one.code != "quota"]
    assert [(one.host, one.level, one.code) for one in findings] == [
        ("partition train", "warning", code) for code in codes
    ]
    spec = parse_spec(text, "cluster.yaml")
    assert [*ahead(spec, ["demo-train-2"])] == [*map(str, findings)]
    assert not [*ahead(spec, ["demo-ctl"])]


@pytest.mark.parametrize(("release", "said"), [("2204", True), ("2404", False)])
def test_nodes_whose_slurm_will_do_without_control_groups_are_told_of(release: str, said: bool) -> None:
    image = f"{{project: ubuntu-os-cloud, family: ubuntu-{release}-lts}}"
    nodes = f"controller: {{image: {image}}}, partitions: {{train: {{image: {image}}}}}, zone:"
    text = PLAIN.replace("zone:", nodes).replace(", gpus: {type: l4}", "")
    spec = parse_spec(text, "cluster.yaml")
    notes = [*ahead(spec, ["demo-train-1"])]
    assert [shows(note, "no-cgroups") for note in notes] == [True] * said
    assert not [*ahead(spec, [])]
    without = spec.model_copy(update={"scheduler": "none"})
    assert not [*ahead(without, ["demo-train-1"])]
