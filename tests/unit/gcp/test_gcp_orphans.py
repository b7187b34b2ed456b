"""All resources of a cluster at Google are found and removed, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import ApiOffError, CloudError, PermissionDeniedError, ProvisionError
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.orphans import (
    SearchArea,
    find_resources,
    orphan_ids,
    remove_resources,
)
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.spec.providers.gcp import GcpSettings
from tests.support.google.api import PROJECT, Google
from tests.support.google.refusals import REFUSALS
from tests.support.messages import condition, refused
from tests.support.terraform import RecordingReporter
from tests.unit.gcp.clusters import workspace_in
from tests.unit.gcp.module import VARIABLES, description, labels

OURS = "aaaaaa"
THEIRS = "bbbbbb"
GLOBAL = f"projects/{PROJECT}/global"
REGION = f"projects/{PROJECT}/regions/us-central1"
ZONE = f"projects/{PROJECT}/zones/us-central1-a"
EVERYTHING = [
    *("instance demo-ctl", "instance demo-train-1", "instance demo-train-2", "disk demo-scratch"),
    *("shared folder demo-aaaaaa-shared", "address demo-nat", "placement policy demo-aaaaaa-train"),
    *("firewall rule demo-aaaaaa-iap", "router demo-aaaaaa-router", "subnetwork demo-aaaaaa-nodes"),
    *("network demo-aaaaaa", "service account demo-aaaaaa-ctl", "bucket demo-results"),
]


def make(google: Google, cluster: str = "demo", cluster_id: str = OURS) -> None:
    """Create a cluster with resources of every type."""
    put = google.world.put
    name = f"{cluster}-{cluster_id}"
    marked = {"labels": labels(cluster, cluster_id)}
    in_words = {"description": f"made by clusterctl; {description(cluster, cluster_id)}"}
    at = {"zone": "us-central1-a"}
    near = {"region": "us-central1"}
    net = f"{GLOBAL}/networks/{name}"
    put("google_compute_network", net, **in_words)
    put(
        "google_compute_subnetwork",
        f"{REGION}/subnetworks/{name}-nodes",
        network=net,
        **near,
        **in_words,
    )
    put("google_compute_firewall", f"{GLOBAL}/firewalls/{name}-iap", network=net, **in_words)
    put("google_compute_router", f"{REGION}/routers/{name}-router", network=net, **near, **in_words)
    put(
        "google_compute_resource_policy",
        f"{REGION}/resourcePolicies/{name}-train",
        **near,
        **in_words,
    )
    put("google_compute_address", f"{REGION}/addresses/{cluster}-nat", **near, **marked)
    put(
        "google_compute_disk",
        f"{ZONE}/disks/{cluster}-scratch",
        size=730,
        type="pd-standard",
        **at,
        **marked,
    )
    for host in ("ctl", "train-1", "train-2"):
        uses = {
            "subnetwork": f"{name}-nodes",
            "resource_policies": [f"{name}-train"],
            "disk": f"{cluster}-scratch",
        }
        put(
            "google_compute_instance",
            f"{ZONE}/instances/{cluster}-{host}",
            uses=uses,
            **at,
            **marked,
        )
    account = f"{name}-ctl@{PROJECT}.iam.gserviceaccount.com"
    put(
        "google_service_account",
        f"projects/{PROJECT}/serviceAccounts/{account}",
        email=account,
        **in_words,
    )
    put(
        "google_filestore_instance",
        f"projects/{PROJECT}/locations/us-central1-a/instances/{name}-shared",
        location="us-central1-a",
        file_shares=[{"name": "share", "capacity_gb": 1024}],
        **marked,
    )
    put("google_storage_bucket", f"{cluster}-results", **marked)


def whats(api: Api, cluster_id: str = OURS) -> list[str]:
    return [resource.what.partition(" in ")[0] for resource in find_resources(api, cluster_id)]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


class TestFinding:
    def test_find_resources_lists_everything_in_deletion_order(
        self, google: Google, api: Api
    ) -> None:
        """Each resource has its cost, or is marked as unknown."""
        make(google, "other", THEIRS)
        assert find_resources(api, OURS) == ()
        make(google)
        assert whats(api) == EVERYTHING
        costs = {
            resource.what.partition(" in ")[0]: resource.usd_per_hour
            for resource in find_resources(api, OURS)
        }
        assert costs["instance demo-ctl"] == pytest.approx(0.134, rel=1e-3)
        assert costs["disk demo-scratch"] == pytest.approx(0.04)
        assert costs["shared folder demo-aaaaaa-shared"] == pytest.approx(0.16 * 1024 / 730)
        assert costs["address demo-nat"] == pytest.approx(0.005)
        assert costs["network demo-aaaaaa"] == 0
        assert costs["bucket demo-results"] is None

    def test_find_resources_of_a_disabled_api_is_empty(self, google: Google, api: Api) -> None:
        make(google)
        google.off.add("file")
        assert whats(api) == [what for what in EVERYTHING if not what.startswith("shared folder")]
        google.off.add("compute")
        assert not any("instance" in what for what in whats(api))

    def test_find_resources_with_another_quota_project_finds_all(
        self, google: Google, api: Api
    ) -> None:
        make(google)
        path = google.world.path.with_name("login.json")
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"quota_project_id": "elsewhere"})
        )
        assert whats(api) == EVERYTHING
        assert orphan_ids(api, "demo") == (OURS,)

    @pytest.mark.parametrize("method", ["compute.instances.aggregatedList", "storage.buckets.list"])
    def test_find_resources_with_an_api_disabled_in_the_quota_project_is_an_error(
        self, google: Google, api: Api, method: str
    ) -> None:
        make(google)
        google.fail(method, 403, reason="SERVICE_DISABLED", times=9)
        with pytest.raises(ApiOffError):
            find_resources(api, OURS)
        with pytest.raises(ApiOffError):
            orphan_ids(api, "demo")

    def test_find_resources_without_permission_is_an_error(self, google: Google, api: Api) -> None:
        google.fail("iam.projects.serviceAccounts.list", 403, message="no")
        with pytest.raises(PermissionDeniedError):
            find_resources(api, OURS)

    def test_find_resources_with_unknown_api_state_is_an_error(
        self, google: Google, api: Api
    ) -> None:
        make(google)
        google.off.update({"file", "serviceusage"})
        with refused("api-off", CloudError, "enable serviceusage.googleapis.com"):
            find_resources(api, OURS)

    @pytest.mark.parametrize("name", ["train", "train-202611"])
    def test_find_resources_ignores_names_that_could_be_of_another_cluster(
        self, google: Google, api: Api, name: str
    ) -> None:
        """`train-202611-bbbbbb` may be a cluster `train-202611`, or one `train` with the id
        202611.
        """
        make(google, "train-202611", THEIRS)
        google.world.put(
            "google_compute_network", f"{GLOBAL}/networks/train-{OURS}-mine", description="by hand"
        )
        assert find_resources(api, "202611") == ()
        assert find_resources(api, OURS) == ()
        assert orphan_ids(api, name) == ((THEIRS,) if name == "train-202611" else ())

    def test_cluster_id_of_digits_is_not_read_as_a_number(self, google: Google, api: Api) -> None:
        make(google, "demo", "202611")
        assert [what.replace("202611", OURS) for what in whats(api, "202611")] == EVERYTHING

    def test_find_resources_ignores_copied_descriptions(self, google: Google, api: Api) -> None:
        text = description("demo", OURS)
        google.world.put(
            "google_compute_network", f"{GLOBAL}/networks/demo-{OURS}2", description=text
        )
        assert find_resources(api, OURS) == ()
        assert orphan_ids(api, "demo") == ()

    def test_orphan_ids_has_all_clusters_of_a_name(self, google: Google, api: Api) -> None:
        make(google)
        make(google, "demo", "cccccc")
        make(google, "demo-2", THEIRS)
        network = f"{GLOBAL}/networks/demo-dddddd"
        google.world.put(
            "google_compute_network", network, description=description("demo", "dddddd")
        )
        assert orphan_ids(api, "demo") == (OURS, "cccccc", "dddddd")
        assert orphan_ids(api, "never") == ()


class TestRemoving:
    def test_remove_resources_keeps_other_clusters(self, google: Google, api: Api) -> None:
        make(google)
        make(google, "other", THEIRS)
        before = whats(api, THEIRS)
        api.reporter = recorder = RecordingReporter()
        found = find_resources(api, OURS)
        remove_resources(api, found)
        remove_resources(api, found)  # what is gone already is fine
        assert find_resources(api, OURS) == ()
        assert whats(api, THEIRS) == before
        assert recorder.lines[0] == "deleting 3 x instance"
        assert recorder.lines[-1] == "deleting 1 x bucket"

    def test_remove_resources_keeps_and_names_a_filled_bucket(
        self, google: Google, api: Api
    ) -> None:
        make(google)
        with google.world.change() as state:
            state["filled"] = ["demo-results"]
        remove_resources(api, find_resources(api, OURS))
        (bucket,) = find_resources(api, OURS)
        assert (bucket.what, bucket.kept) == ("bucket demo-results", "it contains objects")

    @pytest.mark.parametrize(
        ("play", "reason"),
        [
            (
                lambda g: g.fail(
                    "compute.disks.delete", 403, message="Required 'compute.disks.delete'"
                ),
                "403",
            ),
            (lambda g: g.operation_fails("stockout_plain"), "ZONE_RESOURCE_POOL_EXHAUSTED"),
        ],
    )
    def test_remove_resources_names_failures_and_deletes_the_rest(
        self, google: Google, api: Api, play: Callable[[Google], None], reason: str
    ) -> None:
        make(google)
        play(google)
        with refused("leftovers/orphans", ProvisionError, reason):
            remove_resources(api, find_resources(api, OURS))
        left = whats(api)
        assert 0 < len(left) < len(EVERYTHING)
        remove_resources(api, find_resources(api, OURS))
        assert find_resources(api, OURS) == ()

    def test_remove_resources_retries_busy_and_lost_answers(self, google: Google, api: Api) -> None:
        make(google)
        for method in (
            "compute.instances.delete",
            "compute.zoneOperations.wait",
            "compute.networks.delete",
        ):
            google.fail(method, 503, times=2)
        remove_resources(api, find_resources(api, OURS))
        assert find_resources(api, OURS) == ()

    @pytest.mark.parametrize(
        ("name", "code", "what"),
        [
            ("internal_error_of_operation", "cloud-refused/server-error", "instance demo-ctl"),
            ("key_not_delegated", "cloud-permission/kms", "shared folder demo-aaaaaa-shared"),
        ],
    )
    def test_late_error_of_an_operation_is_reported(
        self, google: Google, api: Api, name: str, code: str, what: str
    ) -> None:
        make(google)
        google.clock = api.clock
        google.lasts = 500
        found = [
            resource
            for resource in find_resources(api, OURS)
            if resource.kind == what.rpartition(" ")[0]
        ]
        google.operation_fails(name)
        with refused("leftovers/orphans", ProvisionError, f"1 of {len(found)}") as caught:
            remove_resources(api, found)
        (failure,) = caught.value.failures
        assert condition(failure) == code
        assert failure.cause.startswith(what)
        assert REFUSALS[name].message in failure.cause
        assert REFUSALS[name].fix in failure.fix
        assert 500 <= api.clock.now() <= 502
        assert [
            resource.what
            for resource in find_resources(api, OURS)
            if resource.kind == found[0].kind
        ] == [found[0].what]

    def test_remove_resources_limits_its_wait(self, google: Google, api: Api) -> None:
        make(google)
        google.clock = api.clock
        google.lasts = 10_000
        with refused("leftovers/orphans", ProvisionError) as caught:
            remove_resources(api, find_resources(api, OURS)[:3])
        assert [condition(failure) for failure in caught.value.failures] == [
            "unreachable/cloud-slow"
        ] * 3
        assert len(google.called("compute.zoneOperations.wait")) == 600 / 120


@pytest.mark.parametrize(
    ("service", "place"),
    [
        ("file", f"projects/{PROJECT}/locations/us-east1-b"),
        ("file", f"projects/{PROJECT}/locations/us-central12"),
        ("compute", "zones/us-east1-b"),
    ],
)
def test_place_elsewhere_that_does_not_answer_does_not_stop_down(
    google: Google, tmp_path: Path, service: str, place: str
) -> None:
    """Nor its proof that nothing is left. Without its records, the cluster may be anywhere."""
    google.silent[service] = place
    workspace = workspace_in(tmp_path)
    workspace.terraform.mkdir()
    (workspace.terraform / VARIABLES).write_text(json.dumps({"region": "us-central1"}))
    provider = GcpProvider(GcpSettings.of_project(PROJECT))
    with refused("unreachable/cloud-zones", CloudError, place):
        provider.destroy(OURS, workspace=None)
    provider.destroy(OURS, workspace=workspace)
    assert provider.leftovers(OURS, workspace=workspace) == ()


@pytest.mark.parametrize(
    ("service", "place"),
    [
        ("file", f"projects/{PROJECT}/locations/us-central1"),
        ("file", f"projects/{PROJECT}/locations/us-central1-b"),
        ("compute", "zones/us-central1-a"),
        # Neither a zone nor a region.
        ("compute", "global"),
    ],
)
def test_place_of_the_cluster_that_does_not_answer_stops_the_search(
    google: Google, api: Api, service: str, place: str
) -> None:
    google.silent[service] = place
    with refused("unreachable/cloud-zones", CloudError, place):
        find_resources(api, OURS, SearchArea("us-central1"))


def test_rules_of_a_shared_vpc_are_removed_from_its_host_project(
    google: Google, tmp_path: Path
) -> None:
    rule = "projects/net-host/global/firewalls/demo-aaaaaa-iap"
    other = "projects/net-host/global/firewalls/lets-all-in"
    said = {"description": description("demo", OURS)}
    google.world.put("google_compute_firewall", rule, **said)
    google.world.put("google_compute_firewall", other)
    workspace = workspace_in(tmp_path)
    workspace.terraform.mkdir()
    recorded = {"region": "us-central1", "network": {"host_project": "net-host"}}
    (workspace.terraform / VARIABLES).write_text(json.dumps(recorded))
    GcpProvider(GcpSettings.of_project(PROJECT)).destroy(OURS, workspace=workspace)
    assert google.world.names("google_compute_firewall") == ["lets-all-in"]
