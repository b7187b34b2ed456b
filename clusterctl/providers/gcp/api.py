"""Google's REST APIs: the few calls that clusterctl makes itself, as the user who is logged in.

Who calls is found by google-auth (Application Default Credentials). All calls count on the cluster's project,
whichever quota project the login names: another one may lack the APIs, or the right to use them. Refusals
become typed errors here, and only here. ``CLUSTERCTL_GCP_ENDPOINT`` replaces
`https://{service}.googleapis.com`, for private access.
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
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, RefreshError, TransportError
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
from clusterctl.util.assets import first_rule, table
from clusterctl.util.process import Result, run
from clusterctl.util.progress import SILENT, Clock, Reporter

ENDPOINT: Final = "CLUSTERCTL_GCP_ENDPOINT"
LOG_IN: Final = "log in: `gcloud auth application-default login`"
Json = dict[str, Any]

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_PATHS: Final = {
    **{"compute": "compute/v1", "storage": "storage/v1"},
    **dict.fromkeys(("cloudresourcemanager", "file", "iam", "serviceusage"), "v1"),
    "orgpolicy": "v2",
}
_TRIES = 6
_DELAY_S = 0.5
_OPERATION_POLL_S = 2.0
_LONGEST_DELAY_S = 20.0
_CONNECT_S = 10.0
_LONGEST_ANSWER_S = 150.0  # an operation is waited for by up to two minutes
_NOT_FOUND = 404
_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_TOO_FAST = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})  # with status 403
_API_OFF = frozenset({"SERVICE_DISABLED", "accessNotConfigured"})
_NO_RIGHT: Final = "permission"
_ZONE = re.compile(r"/zones/([^/]+)")
_PERMISSION = re.compile(r"'([a-z]+\.[A-Za-z.]+)'|\b(serviceusage\.services\.use)\b")


@dataclass(frozen=True, kw_only=True)
class Rule(assets.Rule):
    """One entry of diagnoses.yaml. ``transient``: it goes away by itself, and is waited for."""

    transient: bool = False


def rules() -> tuple[Rule, ...]:
    """What the refusals of Google's APIs mean, whoever was refused: we or Terraform."""
    return table(Path(__file__).with_name("data") / "diagnoses.yaml", tuple[Rule, ...])


class _BusyError(Exception):
    """Asking again may help; else it is this error."""

    def __init__(self, error: CloudError, response: requests.Response | None = None) -> None:
        super().__init__(error)
        self.error, self.response = error, response


@dataclass
class Api:
    """The APIs of one project. Paths lack the service's own prefix: `projects/p/global/networks`.

    answer_s: how long an answer may take. tries: how often a busy or silent Google is asked.
    session: makes the calls. Default: as the user who is logged in.
    """

    project: str
    reporter: Reporter = SILENT
    clock: Clock = field(default_factory=Clock)
    answer_s: float = _LONGEST_ANSWER_S
    tries: int = _TRIES
    session: requests.Session | None = None

    def get(self, service: str, path: str, **query: str) -> Json:
        """One resource.

        Raises:
            CloudError: it was refused, is not there (``status`` 404), or Google does not answer.
        """
        return self._call("GET", service, path, query)

    def find(self, service: str, path: str, **query: str) -> Json | None:
        """What is at a path, or None where there is nothing; other errors as of ``get``."""
        return self._unless_missing("GET", service, path, query)

    def pages(self, service: str, path: str, **query: str) -> Iterator[Json]:
        """Every page of a list; a CloudError also when a part of the cloud could not be asked."""
        token: dict[str, str] = {}
        while True:
            page = self._call("GET", service, path, query | token)
            if missed := page.get("unreachables") or page.get("unreachable"):
                what, why = "Google could not look everywhere", ", ".join(missed)
                raise CloudError(what, code="cloud-incomplete", where=path, why=why, fix="try again later")
            yield page
            if not page.get("nextPageToken"):
                return
            token = {"pageToken": str(page["nextPageToken"])}

    def post(self, service: str, path: str, body: Json | None = None, **query: str) -> Json:
        """A method, with the body that it takes, if any; errors as of ``get``."""
        return self._call("POST", service, path, query, body)

    def delete(self, service: str, path: str) -> Json | None:
        """Delete a resource: the operation that does it, or None where it was not there any more."""
        return self._unless_missing("DELETE", service, path, {})

    def _unless_missing(self, verb: str, service: str, path: str, query: Mapping[str, str]) -> Json | None:
        try:
            return self._call(verb, service, path, query)
        except CloudError as exc:
            if exc.status == _NOT_FOUND:
                return None
            raise

    def is_off(self, service: str) -> bool:
        """Whether an API is off in this very project, which then has nothing of it.

        Only Service Usage can say so: a refusal may be about a project on which the call was counted.
        """
        path = f"projects/{self.project}/services/{service}.googleapis.com"
        return self.get("serviceusage", path).get("state") == "DISABLED"

    def _call(
        self, verb: str, service: str, path: str, query: Mapping[str, str], body: Json | None = None
    ) -> Json:
        """Ask, and again with growing patience while Google is busy."""
        for attempt in itertools.count():
            try:
                return self._once(verb, service, path, query, body)
            except _BusyError as busy:
                if attempt == self.tries - 1:
                    raise busy.error from busy.__cause__
                self.clock.sleep(_delay(attempt, busy.response))
        raise AssertionError("the last try returns or raises")

    def _once(self, verb: str, service: str, path: str, query: Mapping[str, str], body: Json | None) -> Json:
        endpoint = os.environ.get(ENDPOINT) or "https://{service}.googleapis.com"
        url = f"{endpoint.replace('{service}', service).rstrip('/')}/{_PATHS[service]}/{path}"
        try:
            session = self.session = self.session or _session(self.project)
            timeout_s = (min(_CONNECT_S, self.answer_s), self.answer_s)
            response = session.request(verb, url, params=dict(query), json=body, timeout=timeout_s)
        except RefreshError as exc:
            raise CredentialsError("the login has expired", why=_first_line(exc), fix=LOG_IN) from exc
        except (requests.ConnectionError, requests.Timeout, TransportError) as exc:
            silent = CloudError(
                "Google does not answer", code="cloud-silent", where=url, why=_first_line(exc)
            )
            raise _BusyError(silent) from exc
        except (GoogleAuthError, requests.RequestException) as exc:
            what, why = "Google could not be asked", _first_line(exc)
            raise CloudError(what, code="cloud-unreachable", where=url, why=why) from exc
        if response.ok:
            return _json(response)
        refusal = self._refusal(service, verb, path, response)
        refusal.status = response.status_code
        if response.status_code in _RETRIED or _refused(_json(response))[0] & _TOO_FAST:
            raise _BusyError(refusal, response)
        raise refusal

    def _refusal(self, service: str, verb: str, path: str, response: requests.Response) -> CloudError:
        """A refusal as one of our errors."""
        status, (reasons, message) = response.status_code, _refused(_json(response))
        why = f"{(message or response.reason or '').strip()} (HTTP {status})"
        said: dict[str, Any] = {"where": path, "why": why}
        if "quota project" in why:
            fix = f"name one: `gcloud auth application-default set-quota-project {self.project}`"
            return CredentialsError("the login names no project to count calls on", fix=fix, **said)
        if status == requests.codes.unauthorized:
            return CredentialsError("Google does not take the login", fix=LOG_IN, **said)
        if reasons & _API_OFF:
            name = f"{service}.googleapis.com"
            fix = f"`gcloud services enable {name} --project {self.project}`, and wait a minute"
            return ApiOffError(f"the API {name} is off", fix=fix, **said)
        known = first_rule(rules(), " ".join([f"Error {status}:", *message.split(), *sorted(reasons)]))
        if status == requests.codes.forbidden and (known is None or known[0].code == _NO_RIGHT):
            found = _PERMISSION.search(why)
            right = found[1] or found[2] if found else "a right"
            fix = f"ask an owner of {self.project} for a role with it; docs/gcp.md lists them"
            return PermissionDeniedError(f"the login lacks {right}", fix=fix, **said)
        return self._known(known, path, f"Google refused to {_VERBS[verb]} something", why)

    def finish(self, service: str, scope: str, operation: Json, *, timeout_s: float) -> None:
        """Wait for the end of an operation.

        scope: what an operation of Compute Engine is below: `projects/p/global`.

        Raises:
            CloudError: it failed, or does not end.
        """
        until, name = self.clock.now() + timeout_s, str(operation.get("name", ""))
        while not _is_done(operation):
            if self.clock.now() >= until:
                what = "Google is not done in time"
                raise CloudError(what, code="cloud-slow", where=scope, why=f"within {timeout_s:.0f} s")
            if service == "compute":
                operation = self.post(service, f"{scope}/operations/{name}/wait")
            else:
                self.clock.sleep(_OPERATION_POLL_S)
                operation = self.get(service, name)
        self._check(scope, operation)

    def _check(self, path: str, operation: Json) -> None:
        """That an operation, of whichever API, did not end in an error; CloudError if it did."""
        error = operation.get("error") or {}
        if errors := error.get("errors", [error] if error else []):
            why = "; ".join(f"{one.get('code')}: {one.get('message')}" for one in errors)
            raise self._known(first_rule(rules(), why), path, "Google began, and failed", why)

    def _known(
        self, known: tuple[Rule, Mapping[str, str]] | None, path: str, what: str, why: str
    ) -> CloudError:
        """The error that an entry of the table of diagnoses makes of it; without one, ``what`` it is."""
        if known is None:
            return CloudError(what, code="cloud-refused", where=path, why=why)
        place = _ZONE.search(path)
        words = {"project": self.project, "zone": place[1] if place else "ZONE", **known[1]}
        failure = known[0].failure(
            {"region": words["zone"].rsplit("-", 1)[0], **words}, host=None, phase="provision"
        )
        return CloudError(
            failure.cause, code=failure.code, fix=failure.fix, failures=(failure,), where=path, why=why
        )


_VERBS = {"GET": "show", "POST": "do", "DELETE": "delete"}


def _session(project: str) -> requests.Session:
    """Who calls, with this project as the one that calls are counted on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a login without a quota project: it gets one below
            credentials, _ = google.auth.default(scopes=[_SCOPE])
    except DefaultCredentialsError as exc:
        raise CredentialsError("no login to Google Cloud", why=_first_line(exc), fix=LOG_IN) from exc
    if isinstance(credentials, CredentialsWithQuotaProject):
        credentials = credentials.with_quota_project(project)  # type: ignore[no-untyped-call]  # google-auth's
    return AuthorizedSession(credentials)  # type: ignore[no-untyped-call]  # google-auth's


def _is_done(operation: Json) -> bool:
    """Compute Engine says ``status``, Filestore ``done``; IAM and Cloud Storage answer with nothing."""
    return not operation.get("name") or operation.get("status") == "DONE" or operation.get("done") is True


def _delay(attempt: int, response: requests.Response | None = None) -> float:
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    wanted = float(asked) if asked.isdigit() else _DELAY_S * 2**attempt
    return min(wanted, _LONGEST_DELAY_S)


def _refused(answer: Json) -> tuple[set[str], str]:
    """Why Google refuses, in its words for programs and for people."""
    error = answer.get("error")
    error = error if isinstance(error, dict) else {}
    rows = [*error.get("errors", ()), *error.get("details", ())]
    reasons = {str(row["reason"]) for row in rows if isinstance(row, dict) and "reason" in row}
    return reasons, str(error.get("message") or "")


def _json(response: requests.Response) -> Json:
    try:
        answer = response.json() if response.content else {}
    except ValueError:  # a proxy's page
        return {}
    return answer if isinstance(answer, dict) else {}


def _first_line(exc: BaseException) -> str:
    return str(exc).partition("\n")[0]


def org_policy(api: Api, constraint: str) -> Json:
    """The policy of the organization, such as `compute.requireOsLogin`, that holds in the project.

    Only the Organization Policy API knows a managed constraint, such as `compute.managed.requireOsLogin`
    (github.com/terraform-google-modules/terraform-google-org-policy/issues/183).

    Raises:
        CloudError: it can't be told; the login may lack `orgpolicy.policy.get`.
    """
    if _MANAGED in constraint:
        return api.get("orgpolicy", f"projects/{api.project}/policies/{constraint}:getEffectivePolicy")
    path = f"projects/{api.project}:getEffectiveOrgPolicy"
    return api.post("cloudresourcemanager", path, {"constraint": f"constraints/{constraint}"})


def enforces(policy: Mapping[str, Any]) -> bool:
    """Whether it is a boolean policy that is on, or a managed one that is on for resources without tags."""
    managed = any(
        one.get("enforce") and not one.get("condition") for one in policy.get("spec", {}).get("rules", ())
    )
    return managed or policy.get("booleanPolicy", {}).get("enforced") is True


KIND = "ssh-ed25519"
_MANAGED: Final = ".managed."
_HIDES_KEYS: Final = ("compute.disableGuestAttributesAccess", "compute.managed.disableGuestAttributesAccess")
WAIT_S = 600.0  # the largest machines take minutes before their system starts
_LOOK_EVERY_S = 3.0
_KEY = re.compile(r"AAAAC3NzaC1lZDI1NTE5AAAAI[A-Za-z0-9+/=]+")


def host_keys(api: Api, zone: str, names: Iterable[str], *, timeout_s: float = WAIT_S) -> dict[str, str]:
    """Host -> its public key, as `ssh-ed25519 AAAA...`; waits for instances that have just started.

    Raises:
        ProvisionError: some did not publish theirs in time; ``failures`` names each.
    """
    missing = list(dict.fromkeys(names))
    found: dict[str, str] = {}
    for _ in api.clock.polls(timeout_s, first_s=_LOOK_EVERY_S, longest_s=_LOOK_EVERY_S):
        for name in missing:
            if key := _published(api, zone, name):
                found[name] = f"{KIND} {key}"
        missing = [name for name in missing if name not in found]
        if not missing:
            return found
        of = len(missing) + len(found)
        api.reporter.progress(f"waiting for the host keys of {len(missing)} of {of} hosts")
    raise _silent(api.project, zone, missing, timeout_s)


def _published(api: Api, zone: str, name: str) -> str | None:
    path = f"projects/{api.project}/zones/{zone}/instances/{name}/getGuestAttributes"
    answer = api.find("compute", path, queryPath="hostkeys/") or {}  # it may have published nothing yet
    items = answer.get("queryValue", {}).get("items", [])
    key = next((str(item["value"]) for item in items if item.get("key") == KIND), "")
    return key if _KEY.fullmatch(key) else None


def _silent(project: str, zone: str, names: list[str], timeout_s: float) -> ProvisionError:
    failures = []
    for name in names:
        fix = f"`gcloud compute instances get-serial-port-output {name} --zone {zone} --project {project}`"
        cause = f"{name} has not published its host key"
        failures.append(Failure("host-keys-late", cause, name, fix=fix, retryable=True))
    return ProvisionError(
        f"{', '.join(names)}: no host key after {timeout_s:.0f} s",
        code="host-keys-late",
        where=zone,
        why=failures[0].cause,
        fix=f"look at what it said while it started, {failures[0].fix}, then run `clusterctl up` again; "
        f"or a policy of your organization hides the keys ({' or '.join(_HIDES_KEYS)})",
        failures=tuple(failures),
    )


_ANSWER_S: Final = 25.0
_INSTALL: Final = (
    "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then: gcloud auth login"
)


def iap_tunnel(instance: str, *, project: str, zone: str) -> tuple[str, ...]:
    """The program that leads to an instance's SSH port; `%p` is that port."""
    return (
        *("gcloud", "compute", "start-iap-tunnel", instance, "%p", "--listen-on-stdin"),
        *(f"--project={project}", f"--zone={zone}", "--verbosity=error"),
    )


def check_gcloud() -> None:
    """That `gcloud` is installed and logged in.

    Raises:
        MachineError: it is not; no host could be reached.
    """
    why = "it carries SSH to hosts without a public address"
    if shutil.which("gcloud") is None:
        raise MachineError("missing tool: gcloud", code="tool-missing", why=why, fix=_INSTALL)
    argv = ["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)"]
    try:
        done = run(argv, timeout_s=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        done = Result(1, "", str(exc))
    if done.rc != 0:
        raise MachineError("gcloud does not run", code="gcloud-broken", why=done.reason, fix=_INSTALL)
    if not done.stdout.strip():
        fix = "log in: gcloud auth login"
        raise MachineError("gcloud is not logged in", code="gcloud-login", why=why, fix=fix)
