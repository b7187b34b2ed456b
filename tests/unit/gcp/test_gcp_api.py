"""The client of Google's API: logins, retries, operations, and the errors of refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import requests
from google.auth.exceptions import RefreshError
from google.oauth2.credentials import Credentials

from clusterctl.errors import (
    ApiOffError,
    CloudError,
    CredentialsError,
    PermissionDeniedError,
    ProvisionError,
)
from clusterctl.providers.gcp.api import Api, host_keys
from tests.support.google.answers import HOST_KEY
from tests.support.google.api import PROJECT, TOKEN, Google
from tests.support.messages import refused
from tests.support.terraform import RecordingReporter

pytestmark = pytest.mark.platform("stand-in", "google-api")

NETWORKS = f"projects/{PROJECT}/global/networks"
ZONE = "us-central1-a"
LOGIN = "`gcloud auth application-default login`"
# As Google's token endpoint says it (google-auth 2.62, oauth2/_client.py).
EXPIRED = "invalid_grant: Token has been expired or revoked."
INSTANCE = f"projects/{PROJECT}/zones/{ZONE}/instances"


def instance(google: Google, name: str, **more: object) -> None:
    google.world.put("google_compute_instance", f"{INSTANCE}/{name}", zone=ZONE, **more)


class TestCalls:
    def test_pages_yields_every_page(self, google: Google, api: Api) -> None:
        for number in range(5):
            google.world.put("google_compute_network", f"{NETWORKS}/net-{number}")
        names = [row["name"] for page in api.pages("compute", NETWORKS) for row in page["items"]]
        assert names == [f"net-{n}" for n in range(5)]
        assert len(google.called("compute.networks.list")) == 3

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_api_retries_busy_answers_with_growing_pauses(
        self, google: Google, api: Api, naps: list[float], status: int
    ) -> None:
        google.fail("compute.networks.list", status, times=3)
        assert list(api.pages("compute", NETWORKS))
        assert naps == [0.5, 1.0, 2.0]

    def test_api_honours_retry_after(self, google: Google, api: Api, naps: list[float]) -> None:
        google.fail("compute.networks.list", 429, Retry_After="7")
        google.fail("compute.networks.list", 403, reason="rateLimitExceeded", Retry_After="3600")
        assert list(api.pages("compute", NETWORKS))
        assert naps == [7.0, 20.0]

    def test_api_retries_end(self, google: Google, api: Api, naps: list[float]) -> None:
        google.fail("compute.networks.list", 503, times=99)
        with refused("cloud-refused/unavailable", CloudError, "503"):
            list(api.pages("compute", NETWORKS))
        assert len(naps) == 5

    def test_api_without_an_answer_is_cloud_silent(
        self, api: Api, naps: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CLUSTERCTL_GCP_ENDPOINT", "http://127.0.0.1:9/{service}")
        with refused("unreachable/cloud-silent", CloudError):
            api.get("compute", NETWORKS)
        assert len(naps) == 5

    def test_api_delete_of_a_missing_resource_succeeds(self, api: Api) -> None:
        assert api.delete("compute", f"{NETWORKS}/never-was") is None

    def test_api_pages_with_an_unreachable_zone_is_an_error(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        response = requests.Response()
        response.status_code = 200
        response._content = json.dumps({"items": {}, "unreachables": ["zones/us-west1-a"]}).encode()
        monkeypatch.setattr(requests.Session, "request", lambda *_, **__: response)
        with refused("unreachable/cloud-zones", CloudError, why="not searched: zones/us-west1-a"):
            list(api.pages("compute", f"projects/{PROJECT}/aggregated/disks"))


class TestRefusals:
    def test_api_without_a_login_has_the_command(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nothing = {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path), "NO_GCE_CHECK": "true"}
        for name, value in nothing.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        with refused(
            "cloud-login", CredentialsError, LOGIN, what="this machine has no login to Google Cloud"
        ):
            Api(PROJECT).get("compute", NETWORKS)

    def test_api_with_a_rejected_login_has_the_command(
        self, google: Google, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Credentials, "refresh", lambda *_: None)
        google.fail("compute.networks.list", 401, times=9)
        with refused("cloud-login", CredentialsError, "rejected"):
            api.get("compute", NETWORKS)

    def test_api_with_an_expired_login_has_the_command(
        self, google: Google, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refresh(*_: object) -> None:
            raise RefreshError(f"{EXPIRED}\nand more")

        monkeypatch.setattr(Credentials, "refresh", refresh)
        google.fail("compute.networks.list", 401)
        with refused("cloud-login", CredentialsError, what="the login has expired", why=EXPIRED):
            api.get("compute", NETWORKS)

    def test_api_names_an_invalid_credentials_file(
        self, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "key.json").write_text("{}")
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
        with refused("cloud-login", CredentialsError, "key.json"):
            api.get("compute", NETWORKS)

    def test_api_names_the_missing_permission(self, google: Google, api: Api) -> None:
        google.fail(
            "compute.networks.list", 403, message="Required 'compute.networks.list' permission"
        )
        with refused(
            "cloud-permission", PermissionDeniedError, "lacks the permission compute.networks.list"
        ) as caught:
            api.get("compute", NETWORKS)
        assert PROJECT in caught.value.fix

    def test_api_disabled_service_has_the_command(self, google: Google, api: Api) -> None:
        google.fail("compute.networks.list", 403, reason="SERVICE_DISABLED")
        with refused("api-off", ApiOffError, f"enable compute.googleapis.com --project {PROJECT}`"):
            api.get("compute", NETWORKS)

    def test_login_without_quota_project_is_not_a_disabled_api(
        self, google: Google, api: Api
    ) -> None:
        text = "The file.googleapis.com API requires a quota project, which is not set by default."
        google.fail("compute.networks.list", 403, reason="SERVICE_DISABLED", message=text)
        with refused("cloud-login", CredentialsError, "set-quota-project"):
            api.get("compute", NETWORKS)

    def test_api_answer_of_a_proxy_is_an_error(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        response = requests.Response()
        response.status_code = 404
        response._content = b"<html>"
        response.reason = "Not Found"
        monkeypatch.setattr(requests.Session, "request", lambda *_, **__: response)
        with refused("cloud-refused", CloudError, why="Not Found (HTTP 404)"):
            api.get("compute", NETWORKS)


class TestOperations:
    def deleting(self, google: Google, api: Api, lasts: float) -> dict[str, Any]:
        instance(google, "demo-ctl")
        google.clock = api.clock
        google.lasts = lasts
        return api.delete("compute", f"{INSTANCE}/demo-ctl") or {}

    def test_finish_waits_for_long_operations(self, google: Google, api: Api) -> None:
        api.finish(
            "compute",
            f"projects/{PROJECT}/zones/{ZONE}",
            self.deleting(google, api, 1000),
            timeout_s=1800,
        )
        assert google.world.names("google_compute_instance") == []
        assert len(google.called("compute.zoneOperations.wait")) == 9  # of 2 minutes

    def test_finish_reports_an_operation_that_fails_late(self, google: Google, api: Api) -> None:
        google.operation_fails("stockout_plain")
        operation = self.deleting(google, api, 1000)
        with refused("stockout", CloudError, ZONE):
            api.finish("compute", f"projects/{PROJECT}/zones/{ZONE}", operation, timeout_s=1800)
        assert api.clock.now() == 1000

    def test_finish_gives_up_after_its_timeout(self, google: Google, api: Api) -> None:
        operation = self.deleting(google, api, 10_000)
        with refused("unreachable/cloud-slow", CloudError):
            api.finish("compute", f"projects/{PROJECT}/zones/{ZONE}", operation, timeout_s=1800)
        assert 1800 <= api.clock.now() <= 1800 + 120


class TestHostKeys:
    def test_host_keys_are_waited_for(self, google: Google, api: Api, naps: list[float]) -> None:
        for name in ("demo-ctl", "demo-train-1"):
            instance(google, name)
        google.fail("compute.instances.getGuestAttributes", 404, reason="notFound", times=3)
        api.reporter = recorder = RecordingReporter()
        keys = host_keys(api, ZONE, ["demo-ctl", "demo-train-1"])
        assert keys == dict.fromkeys(("demo-ctl", "demo-train-1"), f"ssh-ed25519 {HOST_KEY}")
        assert recorder.lines == [
            "waiting for the host keys of 2 of 2 hosts",
            "waiting for the host keys of 1 of 2 hosts",
        ]
        assert len(naps) == 2

    def test_host_keys_names_a_silent_host_and_its_console(self, google: Google, api: Api) -> None:
        instance(google, "demo-ctl")
        instance(google, "demo-train-1")
        with google.world.change() as state:
            state["guest_attributes"] = {"demo-train-1": {"ecdsa-sha2-nistp256": "AAAAother"}}
        console = f"get-serial-port-output demo-train-1 --zone {ZONE}"
        policy = "compute.disableGuestAttributesAccess"
        with refused("host-key/late", ProvisionError, "within 30 s", console, policy) as caught:
            host_keys(api, ZONE, ["demo-ctl", "demo-train-1"], timeout_s=30)
        assert [failure.host for failure in caught.value.failures] == ["demo-train-1"]

    def test_host_keys_rejects_a_malformed_key(self, google: Google, api: Api) -> None:
        instance(google, "demo-ctl")
        with google.world.change() as state:
            state["guest_attributes"] = {"demo-ctl": {"ssh-ed25519": "AAAA\nevil ssh-rsa AAAA"}}
        with refused("host-key/late", ProvisionError):
            host_keys(api, ZONE, ["demo-ctl"], timeout_s=1)


class TestTheDouble:
    """The double refuses requests that Google does not document."""

    @pytest.mark.parametrize(
        ("verb", "path", "body", "problem"),
        [
            (
                "GET",
                f"compute/v1/{NETWORKS}?maxresults=1",
                None,
                "unknown query parameter maxresults",
            ),
            ("GET", f"compute/v1/{NETWORKS}?maxResults=many", None, "does not match"),
            ("GET", "compute/v1/projects/NO_PROJECT/global/networks", None, "does not match"),
            ("GET", "storage/v1/b", None, "project is required"),
            (
                "DELETE",
                f"compute/v1/{NETWORKS}/net-1",
                {"force": True},
                "a body where none belongs",
            ),
            ("POST", f"compute/v1/{NETWORKS}", {"nane": "net-1"}, "$.nane is unknown"),
            ("PUT", f"compute/v1/{NETWORKS}", None, "no such method"),
        ],
    )
    def test_google_double_refuses_and_records_wrong_requests(
        self, google: Google, verb: str, path: str, body: object, problem: str
    ) -> None:
        service = path.partition("/")[0]
        request = Request(
            f"http://{google.address}/{service}/{path}",
            method=verb,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        with pytest.raises(HTTPError, check=lambda error: error.code in {400, 404}):
            urlopen(request)  # noqa: S310
        assert problem in google.violations.pop()
