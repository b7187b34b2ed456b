"""The client of Google's REST APIs, for the few calls that clusterctl makes without Terraform.

google-auth finds the user's login (Application Default Credentials). All calls count against the
quota of the cluster's project, because another quota project of the login may lack the APIs or
permissions. Only this module turns Google's refusals into typed errors. ``CLUSTERCTL_GCP_ENDPOINT``
replaces `https://{service}.googleapis.com`, for private access.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import google.auth
import requests
from google.auth.credentials import CredentialsWithQuotaProject
from google.auth.exceptions import (
    DefaultCredentialsError,
    GoogleAuthError,
    RefreshError,
    TransportError,
)
from google.auth.transport.requests import AuthorizedSession

from clusterctl.errors import (
    ApiOffError,
    CloudError,
    CredentialsError,
    Failure,
    MachineError,
    PermissionDeniedError,
    ProvisionError,
)
from clusterctl.util import assets
from clusterctl.util.assets import first_rule, read_table
from clusterctl.util.process import Result, run
from clusterctl.util.progress import SILENT, Clock, Reporter

ENDPOINT: Final = "CLUSTERCTL_GCP_ENDPOINT"
LOG_IN: Final = "log in: `gcloud auth application-default login`"
Json = dict[str, Any]

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_PATHS: Final = {
    "compute": "compute/v1",
    "storage": "storage/v1",
    **dict.fromkeys(("cloudresourcemanager", "file", "iam", "serviceusage"), "v1"),
    "orgpolicy": "v2",
}
_TRIES = 6
_DELAY_S = 0.5
_OPERATION_POLL_S = 2.0
_LONGEST_DELAY_S = 20.0
_CONNECT_S = 10.0
# The method `wait` of an operation answers after up to two minutes.
_LONGEST_ANSWER_S = 150.0
_NOT_FOUND = 404
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
# Reasons for status 403 if calls come too fast.
_TOO_FAST = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_API_OFF = frozenset({"SERVICE_DISABLED", "accessNotConfigured"})
_NO_RIGHT: Final = ("cloud-permission", "")
_ZONE = re.compile(r"/zones/([^/]+)")
_LOCATION: Final = re.compile(r"(?:.*/)?([a-z]+-[a-z]+[0-9]+)(?:-[a-z])?")
_PERMISSION = re.compile(r"'([a-z]+\.[A-Za-z.]+)'|\b(serviceusage\.services\.use)\b")


@dataclass(frozen=True, kw_only=True)
class CloudErrorRule(assets.ErrorRule):
    """An entry of diagnoses.yaml: cause and fix of a kind of error. ``transient``: a retry may
    succeed.
    """

    transient: bool = False


def rules() -> tuple[CloudErrorRule, ...]:
    """Return the rules of diagnoses.yaml, which explain errors of Google's APIs and of
    Terraform.
    """
    return read_table(
        Path(__file__).with_name("data") / "diagnoses.yaml", tuple[CloudErrorRule, ...]
    )


class _BusyError(Exception):
    """Raised so that a call is repeated. ``error``: the error to raise if the last try fails
    too.
    """

    def __init__(self, error: CloudError, response: requests.Response | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.response = response


@dataclass
class Api:
    """Calls Google's APIs for a project. Paths omit the API's version:
    `projects/p/global/networks`.

    answer_s: timeout of a call. tries: number of attempts if Google is busy or does not answer.
    session: HTTP session of the calls. Default: a session with the user's login.
    """

    project: str
    reporter: Reporter = SILENT
    clock: Clock = field(default_factory=Clock)
    answer_s: float = _LONGEST_ANSWER_S
    tries: int = _TRIES
    session: requests.Session | None = None

    def get(self, service: str, path: str, **query: str) -> Json:
        """Return a resource. Raise a CloudError if it is missing (``status`` 404) or access is
        refused.
        """
        return self._call("GET", service, path, query)

    def find(self, service: str, path: str, **query: str) -> Json | None:
        """Return a resource, or None if the resource is missing. Other errors are raised as by
        ``get``.
        """
        return self._unless_missing("GET", service, path, query)

    def pages(self, service: str, path: str, *, region: str = "", **query: str) -> Iterator[Json]:
        """Yield the pages of a list of resources. Raise a CloudError if Google skipped a zone or
        region.

        region: ignore skipped zones and regions outside this region. Empty: ignore none.
        """
        token: dict[str, str] = {}
        while True:
            page = self._call("GET", service, path, query | token)
            skipped = page.get("unreachables") or page.get("unreachable") or ()
            if unreachable := [place for place in skipped if not _is_outside(place, region)]:
                message = "Google could not search all zones and regions"
                reason = f"not searched: {', '.join(unreachable)}"
                fix = "try again later"
                raise CloudError(
                    message,
                    code="unreachable",
                    about="cloud-zones",
                    where=path,
                    why=reason,
                    fix=fix,
                )
            yield page
            if not page.get("nextPageToken"):
                return
            token = {"pageToken": str(page["nextPageToken"])}

    def post(self, service: str, path: str, body: Json | None = None, **query: str) -> Json:
        """Send a POST request with this body, if any, and return the answer. Raise errors like
        ``get``.
        """
        return self._call("POST", service, path, query, body)

    def delete(self, service: str, path: str) -> Json | None:
        """Start a resource's deletion. Return the operation for ``finish``. None: the resource is
        missing.
        """
        return self._unless_missing("DELETE", service, path, {})

    def _unless_missing(
        self, verb: str, service: str, path: str, query: Mapping[str, str]
    ) -> Json | None:
        try:
            return self._call(verb, service, path, query)
        except CloudError as exc:
            if exc.status == _NOT_FOUND:
                return None
            raise

    def is_off(self, service: str) -> bool:
        """Return whether an API is disabled in the project. Then the project has no resources of
        this API.

        A refused call does not tell: the API may be disabled only in the login's quota project.
        """
        path = f"projects/{self.project}/services/{service}.googleapis.com"
        return self.get("serviceusage", path).get("state") == "DISABLED"

    def _call(
        self, verb: str, service: str, path: str, query: Mapping[str, str], body: Json | None = None
    ) -> Json:
        for attempt in itertools.count():
            try:
                return self._once(verb, service, path, query, body)
            except _BusyError as busy:
                if attempt == self.tries - 1:
                    raise busy.error from busy.__cause__
                self.clock.sleep(_delay(attempt, busy.response))
        raise AssertionError("the last try returns or raises")

    def _once(
        self, verb: str, service: str, path: str, query: Mapping[str, str], body: Json | None
    ) -> Json:
        endpoint = os.environ.get(ENDPOINT) or "https://{service}.googleapis.com"
        url = f"{endpoint.replace('{service}', service).rstrip('/')}/{_PATHS[service]}/{path}"
        try:
            session = self.session = self.session or _session(self.project)
            timeout_s = (min(_CONNECT_S, self.answer_s), self.answer_s)
            response = session.request(verb, url, params=dict(query), json=body, timeout=timeout_s)
        except RefreshError as exc:
            raise CredentialsError(
                "the login has expired", why=_first_line(exc), fix=LOG_IN
            ) from exc
        except (requests.ConnectionError, requests.Timeout, TransportError) as exc:
            message = "Google does not answer"
            fix = "check this machine's network, then run the command again"
            error = CloudError(
                message,
                code="unreachable",
                about="cloud-silent",
                where=url,
                why=_first_line(exc),
                fix=fix,
            )
            raise _BusyError(error) from exc
        except (GoogleAuthError, requests.RequestException) as exc:
            message = "the request to Google's API failed"
            reason = _first_line(exc)
            raise CloudError(
                message, code="unreachable", about="cloud", where=url, why=reason
            ) from exc
        if response.ok:
            return _json(response)
        refusal = self._refusal(service, verb, path, response)
        refusal.status = response.status_code
        if response.status_code in _RETRIED or _refused(_json(response))[0] & _TOO_FAST:
            raise _BusyError(refusal, response)
        raise refusal

    def _refusal(
        self, service: str, verb: str, path: str, response: requests.Response
    ) -> CloudError:
        status = response.status_code
        reasons, message = _refused(_json(response))
        reason = f"{(message or response.reason or '').strip()} (HTTP {status})"
        context: dict[str, Any] = {"where": path, "why": reason}
        if "quota project" in reason:
            fix = f"set it: `gcloud auth application-default set-quota-project {self.project}`"
            return CredentialsError("the login has no quota project", fix=fix, **context)
        if status == requests.codes.unauthorized:
            return CredentialsError("Google rejected the login", fix=LOG_IN, **context)
        if reasons & _API_OFF:
            name = f"{service}.googleapis.com"
            fix = (
                f"run `gcloud services enable {name} --project {self.project}`, then wait a minute"
            )
            return ApiOffError(f"the API {name} is not enabled", fix=fix, **context)
        match = first_rule(
            rules(), " ".join([f"Error {status}:", *message.split(), *sorted(reasons)])
        )
        if status == requests.codes.forbidden and (
            match is None or (match[0].code, match[0].about) == _NO_RIGHT
        ):
            permission = _PERMISSION.search(reason)
            missing = (
                f"the permission {permission[1] or permission[2]}" if permission else "a permission"
            )
            fix = (
                f"ask an owner of {self.project} for a role that has it; docs/gcp.md lists the "
                "roles"
            )
            return PermissionDeniedError(f"the login lacks {missing}", fix=fix, **context)
        return self._error(
            match, path, f"Google refused the request to {_VERBS[verb]} a resource", reason
        )

    def finish(self, service: str, scope: str, operation: Json, *, timeout_s: float) -> None:
        """Wait until an operation ends. Raise a CloudError if it fails or takes over ``timeout_s``.

        scope: the start of the operation's path, such as `projects/p/global`. Only Compute Engine
            needs it.
        """
        deadline = self.clock.now() + timeout_s
        name = str(operation.get("name", ""))
        while not _is_done(operation):
            if self.clock.now() >= deadline:
                message = "an operation on Google Cloud took too long"
                fix = "run the same command again"
                reason = f"it did not end within {timeout_s:.0f} s"
                raise CloudError(
                    message,
                    code="unreachable",
                    about="cloud-slow",
                    where=scope,
                    why=reason,
                    fix=fix,
                )
            if service == "compute":
                operation = self.post(service, f"{scope}/operations/{name}/wait")
            else:
                self.clock.sleep(_OPERATION_POLL_S)
                operation = self.get(service, name)
        self._check(scope, operation)

    def _check(self, path: str, operation: Json) -> None:
        error = operation.get("error") or {}
        if errors := error.get("errors", [error] if error else []):
            reason = "; ".join(f"{row.get('code')}: {row.get('message')}" for row in errors)
            raise self._error(
                first_rule(rules(), reason), path, "an operation on Google Cloud failed", reason
            )

    def _error(
        self,
        match: tuple[CloudErrorRule, Mapping[str, str]] | None,
        path: str,
        message: str,
        reason: str,
    ) -> CloudError:
        if match is None:
            return CloudError(message, where=path, why=reason)
        zone = _ZONE.search(path)
        words = {"project": self.project, "zone": zone[1] if zone else "ZONE", **match[1]}
        failure = match[0].failure(
            {"region": words["zone"].rsplit("-", 1)[0], **words}, host=None, phase="provision"
        )
        return CloudError(
            failure.cause,
            code=failure.code,
            about=failure.about,
            fix=failure.fix,
            failures=(failure,),
            where=path,
            why=reason,
        )


def _is_outside(place: str, region: str) -> bool:
    """Return whether a place is a zone or region outside ``region``.

    place: as `unreachables` of Compute Engine and `unreachable` of Filestore have it, such as
        projects/p/locations/us-east1-b.
    """
    match = _LOCATION.fullmatch(place)
    return bool(region) and match is not None and match[1] != region


_VERBS = {"GET": "read", "POST": "change", "DELETE": "delete"}


def _session(project: str) -> requests.Session:
    try:
        with warnings.catch_warnings():
            # google-auth warns of a missing quota project, which is set below.
            warnings.simplefilter("ignore")
            credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as exc:
        message = "this machine has no login to Google Cloud"
        raise CredentialsError(message, why=_first_line(exc), fix=LOG_IN) from exc
    if isinstance(credentials, CredentialsWithQuotaProject):
        credentials = credentials.with_quota_project(project)  # type: ignore[no-untyped-call]  # google-auth's
    return AuthorizedSession(credentials)  # type: ignore[no-untyped-call]  # google-auth's


def _is_done(operation: Json) -> bool:
    """Return whether an operation has ended. IAM and Cloud Storage finish at once, without an
    operation.
    """
    return (
        not operation.get("name")
        or operation.get("status") == "DONE"
        or operation.get("done") is True
    )


def _delay(attempt: int, response: requests.Response | None = None) -> float:
    retry_after = response.headers.get("Retry-After", "") if response is not None else ""
    delay_s = float(retry_after) if retry_after.isdigit() else _DELAY_S * 2**attempt
    return min(delay_s, _LONGEST_DELAY_S)


def _refused(answer: Json) -> tuple[set[str], str]:
    error = answer.get("error")
    error = error if isinstance(error, dict) else {}
    rows = [*error.get("errors", ()), *error.get("details", ())]
    reasons = {str(row["reason"]) for row in rows if isinstance(row, dict) and "reason" in row}
    return reasons, str(error.get("message") or "")


def _json(response: requests.Response) -> Json:
    try:
        answer = response.json() if response.content else {}
    except ValueError:
        # A proxy answered with a web page.
        return {}
    return answer if isinstance(answer, dict) else {}


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]


KIND = "ssh-ed25519"
_HIDES_KEYS: Final = (
    "compute.disableGuestAttributesAccess",
    "compute.managed.disableGuestAttributesAccess",
)
# The largest machines take minutes before their operating system starts.
WAIT_S = 600.0
_LOOK_EVERY_S = 3.0
_KEY = re.compile(r"AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/=]+")


def host_keys(
    api: Api, zone: str, names: Iterable[str], *, timeout_s: float = WAIT_S
) -> dict[str, str]:
    """Return host -> public host key, as `ssh-ed25519 AAAA...`. Wait for instances that have just
    started.

    Raise a ProvisionError that lists the hosts without a published key after ``timeout_s``.
    """
    missing = list(dict.fromkeys(names))
    keys: dict[str, str] = {}
    for _ in api.clock.polls(timeout_s, first_s=_LOOK_EVERY_S, longest_s=_LOOK_EVERY_S):
        for name in missing:
            if key := _published_key(api, zone, name):
                keys[name] = f"{KIND} {key}"
        missing = [name for name in missing if name not in keys]
        if not missing:
            return keys
        total = len(missing) + len(keys)
        api.reporter.progress(f"waiting for the host keys of {len(missing)} of {total} hosts")
    raise _late_keys_error(api.project, zone, missing, timeout_s)


def _published_key(api: Api, zone: str, name: str) -> str | None:
    path = f"projects/{api.project}/zones/{zone}/instances/{name}/getGuestAttributes"
    # The answer is empty until the instance publishes its keys.
    answer = api.find("compute", path, queryPath="hostkeys/") or {}
    items = answer.get("queryValue", {}).get("items", [])
    key = next((str(item["value"]) for item in items if item.get("key") == KIND), "")
    return key if _KEY.fullmatch(key) else None


def _late_keys_error(project: str, zone: str, names: list[str], timeout_s: float) -> ProvisionError:
    failures = []
    for name in names:
        command = (
            f"gcloud compute instances get-serial-port-output {name} --zone {zone} --project "
            f"{project}"
        )
        fix = f"read the host's boot messages: `{command}`"
        cause = f"{name} has not published its SSH host key"
        failures.append(Failure("host-key", cause, name, fix=fix, retryable=True, about="late"))
    return ProvisionError(
        f"{', '.join(names)} did not publish an SSH host key within {timeout_s:.0f} s",
        code="host-key",
        about="late",
        where=zone,
        why=failures[0].cause,
        fix=f"{failures[0].fix}, then run `clusterctl up` again; or check whether a policy of your "
        f"organization hides the keys ({' or '.join(_HIDES_KEYS)})",
        failures=tuple(failures),
    )


_ANSWER_S: Final = 25.0
_LOG_IN_AGAIN: Final = "gcloud auth login"
_INSTALL: Final = (
    "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then: gcloud "
    "auth login"
)


def iap_tunnel(instance: str, *, project: str, zone: str) -> tuple[str, ...]:
    """Return the words of the ssh ProxyCommand that reaches an instance. ssh replaces `%p` by the
    port.
    """
    return (
        "gcloud",
        "compute",
        "start-iap-tunnel",
        instance,
        "%p",
        "--listen-on-stdin",
        f"--project={project}",
        f"--zone={zone}",
        "--verbosity=error",
    )


def check_gcloud() -> None:
    """Raise a MachineError unless `gcloud`, which tunnels all SSH connections, is installed and
    logged in.
    """
    reason = "clusterctl reaches hosts without a public address through gcloud"
    if shutil.which("gcloud") is None:
        message = "gcloud is not installed on this machine"
        raise MachineError(message, code="tool-missing", why=reason, fix=_INSTALL)
    # This command asks Google for a token. The list of logins also has logins that have expired.
    argv = ["gcloud", "auth", "print-access-token"]
    try:
        result = run(argv, timeout_s=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        result = Result(1, "", str(exc))
    if result.rc != 0 and _LOG_IN_AGAIN in result.stderr:
        message = "gcloud is not logged in, or its login has expired"
        fix = f"log in: `{_LOG_IN_AGAIN}`"
        first_line = result.stderr.partition("\n")[0]
        raise MachineError(
            message, code="cloud-login", about="gcloud", why=f"{reason}\n{first_line}", fix=fix
        )
    if result.rc != 0:
        fix = f"check this machine's network; or repair gcloud: {_INSTALL}"
        raise MachineError(
            f"`{' '.join(argv)}` failed",
            about="gcloud",
            why=result.reason,
            fix=fix,
        )
