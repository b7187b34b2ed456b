"""`plan --preflight` on Google Cloud reports all obstacles at once, each with a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from google.auth.exceptions import RefreshError

from clusterctl.hosts.checks import Finding
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.preflight import preflight
from clusterctl.providers.gcp.provider import services
from clusterctl.spec.load import parse_spec
from clusterctl.spec.providers.gcp import settings_of
from clusterctl.util.progress import Clock
from tests.support.google.api import FACTS, PROJECT, TOKEN, Google
from tests.support.google.refusals import REFUSALS, filled
from tests.support.messages import condition

pytestmark = pytest.mark.usefixtures("google")

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
    spec = parse_spec(text, "cluster.yaml")
    api = api or Api(PROJECT, clock=Clock(sleep=lambda _: None))
    return preflight(spec, cluster_id, services(settings_of(spec)), api=api)


Plant = Callable[[Google], object]


def has(google: Google, path: str, **special: Any) -> None:
    """Create a resource with these attributes in the double, or remove it."""
    google.project.has[path] = special or None


def quota(google: Google, metric: str, limit: float, used: float = 0.0) -> None:
    google.project.quotas[metric] = (limit, used)


GPU_IMAGE = "family/rocky-linux-9-optimized-gcp-nvidia-580"
# What is planted: the code of what is found of it, a word of that, and a word of the command that
# removes it.
OBSTACLES: dict[str, tuple[Plant, str, str, str]] = {
    "tunnels": (
        lambda g: g.off.add("iap"),
        "api-off",
        "iap.googleapis.com",
        "services enable iap.goo",
    ),
    "Filestore": (
        lambda g: g.off.add("file"),
        "api-off",
        "file.googleapis.com",
        "services enable file.goo",
    ),
    "GPUs of a region": (
        lambda g: quota(g, "NVIDIA_L4_GPUS", 1),
        *("quota", "needs 2, but only 1 of 1", "--quota-id=NVIDIA-L4-GPUS-per-project-region"),
    ),
    "GPUs everywhere": (
        lambda g: quota(g, "GPUS_ALL_REGIONS", 0),
        *("quota", "needs 3, but only 0 of 0 are free", "--quota-id=GPUS-ALL-REGIONS-per-project "),
    ),
    "processors": (
        lambda g: quota(g, "CPUS", 24, 20),
        "quota",
        "4 of 24 are free",
        "--preferred-value=28",
    ),
    "machine type": (
        lambda g: has(g, "machineTypes/g2-standard-4"),
        *("machine-type", "g2-standard-4", "machine-types list"),
    ),
    "GPU type": (
        lambda g: has(g, "acceleratorTypes/nvidia-tesla-t4"),
        *("machine-type", "nvidia-tesla-t4", "accelerator-types list"),
    ),
    "obsolete image": (
        lambda g: has(g, GPU_IMAGE, deprecated={"state": "OBSOLETE"}),
        *("image-missing", "nvidia-580", "images list"),
    ),
}


def test_preflight_without_obstacles_finds_nothing() -> None:
    assert found(PLAIN) == ()
    assert found(SPEC) == ()


def test_preflight_reports_all_obstacles_and_creates_nothing(google: Google) -> None:
    for plant, *_ in OBSTACLES.values():
        plant(google)
    before = google.world.read()
    findings = found(SPEC)
    assert len(findings) == len(OBSTACLES)
    for _, code, why, fix in OBSTACLES.values():
        hits = [f for f in findings if condition(f) == code and why in str(f) and fix in f.fix]
        assert len(hits) == 1, (code, why, [*map(str, findings)])
    assert google.world.read() == before


@pytest.mark.parametrize("cluster_id", [None, "a1b2c3"])
@pytest.mark.parametrize(
    ("calls", "name", "fix"),
    [
        ("*", "quota_project_denied", f"an owner of {PROJECT}"),
        ("*", "consumer_invalid", "gcloud projects list"),
        ("compute.*", "billing_disabled", f"billing/linkedaccount?project={PROJECT}"),
    ],
)
def test_preflight_reports_a_refusal_of_all_calls_once(
    google: Google, calls: str, name: str, fix: str, cluster_id: str | None
) -> None:
    google.refuse(calls, name)
    (one,) = found(PLAIN, cluster_id)
    assert (one.level, one.code) == ("error", REFUSALS[name].code.rpartition("/")[2])
    assert fix in one.fix
    assert filled(REFUSALS[name].message, FACTS).split(".")[0] in one.why


@pytest.mark.parametrize(
    ("plant", "text", "warning"),
    [
        (
            lambda g: g.fail("compute.regions.get", 400, reason="invalid"),
            PLAIN,
            ("cloud-refused", "quotas"),
        ),
        (
            lambda g: g.fail("serviceusage.services.get", 400, times=99),
            *(PLAIN, ("cloud-refused", "compute.googleapis.com")),
        ),
        (lambda g: g.off.add("compute"), PLAIN, ("api-off", "compute.googleapis.com")),
    ],
    ids=["a new kind of refusal", "Service Usage", "an API that is off"],
)
def test_unanswered_call_is_a_warning_beside_obstacles(
    google: Google, plant: Plant, text: str, warning: tuple[str, str]
) -> None:
    plant(google)
    has(google, "machineTypes/g2-standard-4")
    errors = set() if warning[0] == "api-off" else {"machine-type"}
    # The id of a cluster without hosts: all of them are to be made.
    findings = found(text, "a1b2c3")
    assert {condition(finding) for finding in findings if finding.level == "error"} == errors
    warnings = [
        (condition(finding), finding.host) for finding in findings if finding.level == "warning"
    ]
    assert len(warnings) == 1
    assert warnings[0][0] == warning[0]
    assert warning[1] in warnings[0][1].split(", ")


def test_preflight_project_without_permission_may_not_exist(google: Google) -> None:
    google.fail("cloudresourcemanager.projects.get", 403, reason="forbidden")
    (one,) = found(PLAIN)
    assert (one.level, condition(one), one.host) == ("error", "project", PROJECT)
    google.off.add("cloudresourcemanager")
    (one,) = found(PLAIN)
    assert (one.level, condition(one), one.host) == (
        "warning",
        "api-off",
        "cloudresourcemanager.googleapis.com",
    )


def test_preflight_of_existing_hosts_finds_nothing(google: Google) -> None:
    quota(google, "GPUS_ALL_REGIONS", 1)
    (short,) = found(PLAIN, "a1b2c3")
    assert (condition(short), short.why.split()[3]) == ("quota", "2,")
    for left, name in ((2, "demo-ctl"), (1, "demo-train-1"), (0, "demo-train-2")):
        path = f"projects/{PROJECT}/zones/{ZONE}/instances/{name}"
        google.world.put(
            "google_compute_instance", path, zone=ZONE, labels={"clusterctl-id": "a1b2c3"}
        )
        # A quota of one GPU is enough for one more node.
        codes = {2: {"quota"}, 1: set(), 0: set()}[left]
        assert {condition(finding) for finding in found(PLAIN, "a1b2c3")} == codes


def test_preflight_without_a_login_reports_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    assert_asks_for_a_login(found(PLAIN), "no login")


def assert_asks_for_a_login(findings: tuple[Finding, ...], why: str) -> None:
    (one,) = findings
    assert (one.level, condition(one)) == ("error", "cloud-login")
    assert why in one.what
    assert LOGIN in one.fix


class ExpiredSession(requests.Session):
    """A session of google-auth whose login has expired, with the message of Google's token endpoint
    (google-auth 2.62, oauth2/_client.py).
    """

    def request(self, *_: object, **__: object) -> requests.Response:
        raise RefreshError("invalid_grant: Token has been expired or revoked.")


@pytest.mark.parametrize("cluster_id", [None, "a1b2c3"])
def test_preflight_with_an_expired_login_reports_only_that(cluster_id: str | None) -> None:
    api = Api(PROJECT, session=ExpiredSession())
    assert_asks_for_a_login(found(PLAIN, cluster_id, api), "has expired")


@pytest.mark.parametrize(
    ("image", "software", "codes"),
    [
        ("project: debian-cloud, family: debian-12", "", ["image-driver"]),
        ("project: debian-cloud, family: debian-12", "nvidia: {driver: open}", []),
        (
            "project: deeplearning-platform-release, family: common-cu129-ubuntu-2404-nvidia-580",
            "",
            [],
        ),
        ("project: my-images, family: with-a-driver-of-ours", "", []),
    ],
)
def test_preflight_names_gpus_on_a_public_image_without_a_driver(
    image: str, software: str, codes: list[str]
) -> None:
    text = PLAIN.replace("zone:", f"partitions: {{train: {{image: {{{image}}}}}}}, zone:")
    findings = found(f"{text}software: {{{software}}}\n")
    assert [condition(finding) for finding in findings] == codes
    assert all("software: {nvidia: {driver: open}}" in finding.fix for finding in findings)


class SilentSession(requests.Session):
    """A session in which requests whose URL contains ``part`` time out."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.headers.update({"Authorization": f"Bearer {TOKEN}", "X-Goog-User-Project": PROJECT})
        self.part = part
        self.timeouts = set[float]()

    def request(self, method: str, url: str, **more: Any) -> requests.Response:  # type: ignore[override]
        self.timeouts.update(more["timeout"])
        if self.part in url:
            raise requests.ReadTimeout("Read timed out.")
        return super().request(method, url, **more)


@pytest.mark.parametrize("cluster_id", [None, "a1b2c3"])
def test_preflight_of_a_silent_google_is_one_warning(cluster_id: str | None) -> None:
    session = SilentSession("http")
    api = Api(PROJECT, session=session, answer_s=10.0, tries=2, clock=Clock(sleep=lambda _: None))
    (one,) = found(PLAIN, cluster_id, api)
    assert (one.level, condition(one)) == ("warning", "cloud-silent")
    assert session.timeouts == {10.0}


def test_preflight_continues_if_one_service_is_silent(google: Google) -> None:
    google.off.add("iap")
    api = Api(PROJECT, session=SilentSession("/compute/"), clock=Clock(sleep=lambda _: None))
    findings = found(SPEC, None, api)
    assert [condition(finding) for finding in findings if finding.level == "error"] == ["api-off"]
    assert {condition(finding) for finding in findings if finding.level == "warning"} == {
        "cloud-silent"
    }


C5 = "c5-standard-8"
GOOGLES_C5 = {"guestCpus": 8, "memoryMb": 30720}
L4 = [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": 1}]


@pytest.mark.parametrize(
    ("stated", "there", "level", "word"),
    [
        ("vcpus: 8, memory: 30GiB", GOOGLES_C5, "", ""),
        ("vcpus: 4, memory: 30GiB", GOOGLES_C5, "warning", "vcpus: 8"),
        ("vcpus: 8, memory: 32GiB", GOOGLES_C5, "warning", "memory: 30GiB"),
        (
            "vcpus: 8, memory: 30GiB",
            GOOGLES_C5 | {"accelerators": L4},
            "error",
            "{type: l4, count: 1}",
        ),
        (
            "vcpus: 8, memory: 30GiB",
            {"bundledLocalSsds": {"partitionCount": 2}},
            "warning",
            "bundled_ssds: 2",
        ),
    ],
)
def test_preflight_compares_machine_types_with_google(
    google: Google, stated: str, there: dict[str, Any], level: str, word: str
) -> None:
    has(google, f"machineTypes/{C5}", **there)
    nodes = f"machine_types: {{{C5}: {{{stated}}}}}, partitions: {{train: {{machine_type: {C5}}}}}"
    text = PLAIN.replace("zone:", f"{nodes}, zone:").replace(", gpus: {type: l4}", "")
    # Its processors are counted by family.
    findings = [finding for finding in found(text) if condition(finding) != "quota"]
    assert [(finding.level, condition(finding)) for finding in findings] == (
        [(level, "machine-type-differs")] if level else []
    )
    assert all(word in finding.fix for finding in findings)
