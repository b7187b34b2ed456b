"""A double of Google's REST APIs on loopback, held to the discovery documents, and of an instance's
metadata.

    with Google(Store(path)) as google:          # routes, checks and answers; what there is: store.py
        google.environment                       # variables under which clusterctl and google-auth talk to it
        google.fail("compute.instances.delete", 503, times=2)          # refuse the next calls of a method
        google.fail("compute.instances.delete", 403, reason="SERVICE_DISABLED")
        google.operation_fails("stockout_plain")                       # the next operation ends badly
    google.off.add("file")                                         # the project has not enabled this API
    google.silent["file"] = "projects/p/locations/us-east1-b"      # lists are without this place
        google.called("compute.instances.delete")                      # paths, in order
    assert not google.violations                 # what of any request or answer was not as Google documents

Calls count on the project of X-Goog-User-Project, which has the APIs if it is this one.
A page has two items. An operation is done when it was asked for twice, or waited for; with
``google.lasts`` when so many seconds have passed on ``google.clock``, of which a wait takes up to 2
minutes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from clusterctl.util.progress import Clock
from tests.support.google import answers, discovery, guest
from tests.support.google.project import Project
from tests.support.google.provider.store import Store
from tests.support.google.refusals import NUMBER, REFUSALS, error_body

Answer = tuple[int, Any, Mapping[str, str]]  # status, JSON, headers
TOKEN = "double-token"  # noqa: S105
PROJECT = "demo-project"
_DISABLED = "SERVICE_DISABLED"
FACTS = {
    "project": PROJECT,
    "number": NUMBER,
    "zone": "us-central1-a",
    "region": "us-central1",
    "id": "projects/demo-project/zones/us-central1-a/instances/x",
    "name": "x",
    "email": "x@example.com",
    "metric": "CPUS",
}
GCLOUD = "764086051850"  # of gcloud's own project, whose OAuth client a person's login is of
# Calls of these need a project to count on (terraform-provider-google, issues 20644, 24500).
_COUNTED = {"cloudresourcemanager", "file", "iam", "serviceusage"}
_NO_QUOTA_PROJECT = (
    "Your application is authenticating by using local Application Default Credentials. The "
    "{service} API requires a quota project, which is not set by default. To learn how to set "
    "your quota project, see "
    "https://cloud.google.com/docs/authentication/adc-troubleshooting/user-creds ."
)
_OFF = (
    "{service} has not been used in project {consumer} before or it is disabled. Enable it "
    "by visiting "
    "https://console.developers.google.com/apis/api/{service}/overview?project={consumer} "
    "then retry. If you enabled this API recently, wait a few minutes for the action to "
    "propagate to our systems and retry."
)


@dataclass
class Fault:
    """The next ``times`` calls of a method are refused: of several if it is a pattern, as
    `compute.*`.
    """

    method: str
    answer: Answer
    times: int


@dataclass
class Google:
    """The server; its state is the world's, its faults and operations are its own."""

    world: Store
    id: str = PROJECT
    project: Project = field(default_factory=Project)
    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    operations: dict[str, answers.Operation] = field(default_factory=dict)
    failing: list[Mapping[str, str]] = field(default_factory=list)
    lasts: float = 0
    clock: Clock = field(default_factory=Clock)
    off: set[str] = field(default_factory=set)  # services
    silent: dict[str, str] = field(default_factory=dict)  # service -> a place that does not answer

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.double = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Google is here, and a user is logged in to it with a token that lasts."""
        login = self.world.path.with_name("login.json")
        secrets = {"client_id": "played", "client_secret": "played", "refresh_token": "played"}
        until = {"token": TOKEN, "expiry": "2099-01-01T00:00:00Z"}
        login.write_text(json.dumps({"type": "authorized_user", **secrets, **until}))
        return {
            "CLUSTERCTL_GCP_ENDPOINT": f"http://{self.address}/{{service}}",
            "GOOGLE_APPLICATION_CREDENTIALS": str(login),
            "GCE_METADATA_HOST": self.address,
            "NO_PROXY": "127.0.0.1",
        }

    def fail(
        self,
        method: str,
        status: int,
        *,
        reason: str = "",
        message: str = "",
        times: int = 1,
        **headers: str,
    ) -> None:
        """Refuse the next calls of a method."""
        self.faults.append(
            Fault(method, refusal(status, message or "played", reason, headers), times)
        )

    def refuse(self, method: str, name: str, *, times: int = 99) -> None:
        """Refuse the next calls of a method by the rule book, or let what they begin end so."""
        played = REFUSALS[name]
        self.faults.append(Fault(method, (played.status or 200, played.body(FACTS), {}), times))

    def operation_fails(self, name: str) -> None:
        """Let the next operation end with this error of the rule book, and nothing done."""
        self.failing += REFUSALS[name].body(FACTS)["error"]["errors"]

    def called(self, method: str) -> list[str]:
        """The paths of all calls of a method, in order."""
        return [path for name, path in self.calls if name == method]

    def answer(self, verb: str, target: str, headers: Mapping[str, str], body: Any) -> Answer:
        """What a request gets: status, JSON, headers."""
        url = urlsplit(target)
        service, _, rest = url.path.lstrip("/").partition("/")
        found = discovery.find(service, verb, f"/{rest}")
        if found is None:
            self.violations.append(f"no such method: {verb} {url.path}")
            return refusal(404, f"no such method: {verb} {url.path}")
        method, values = found
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        with self._lock:
            self.calls.append((method.id, f"/{rest}"))
            wrong = discovery.wrong_request(method, values, query, body)
            self.violations += [f"{method.id}: {problem}" for problem in wrong]
            if wrong:
                return refusal(400, "; ".join(wrong))
            return self._refused(method, headers) or self._answer(
                method, f"/{rest}", values, query, body
            )

    def _refused(self, method: discovery.Method, headers: Mapping[str, str]) -> Answer | None:
        """What is refused whatever is asked for."""
        if method.verb == "POST" and "content-length" not in headers:
            return refusal(411, "POST requests require a Content-length header")
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return refusal(401, "no valid token")
        counted = headers.get("x-goog-user-project", "")
        if method.service in _COUNTED and not counted:
            return _disabled(_NO_QUOTA_PROJECT, method.service, GCLOUD)
        if counted not in {"", self.id} or method.service in self.off:
            return _disabled(_OFF, method.service, NUMBER if counted == self.id else counted)
        for fault in self.faults:
            if fnmatchcase(method.id, fault.method) and fault.times > 0:
                fault.times -= 1
                return fault.answer
        return None

    def _answer(
        self,
        method: discovery.Method,
        path: str,
        values: Mapping[str, str],
        query: Mapping[str, str],
        body: Any,
    ) -> Answer:
        try:
            is_own_image = method.id == "compute.images.get" and values["project"] == self.id
            content = NotImplemented if is_own_image else self.project.answer(method.id, path)
            if content is NotImplemented:
                content = answers.answer(self, method.id, values, query, body)
        except answers.RefusedError as exc:
            return refusal(exc.status, str(exc), exc.reason)
        if response := method.document.get("response"):
            self.violations += [
                f"answer of {method.id}: {w}"
                for w in discovery.differs(method.service, response, content)
            ]
        return 200, content, {}


def _disabled(message: str, service: str, consumer: str) -> Answer:
    """The refusal of an API that the project, on which the call is counted, has not enabled."""
    name = f"{service}.googleapis.com"
    return refusal(
        403, message.format(service=name, consumer=consumer), _DISABLED, of=(name, consumer)
    )


def refusal(
    status: int,
    message: str,
    reason: str = "",
    headers: Mapping[str, str] = MappingProxyType({}),
    of: tuple[str, str] = ("compute.googleapis.com", PROJECT),
) -> Answer:
    """An error as Google words it; that an API is off is a detail, ``of`` which service and
    project.
    """
    if reason != _DISABLED:
        return status, error_body(status, message, reason), headers
    metadata = {"service": of[0], "consumer": f"projects/{of[1]}"}
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": reason,
        "metadata": metadata,
    }
    return status, error_body(status, message, details=[info]), headers


class _Server(ThreadingHTTPServer):
    double: Google
    request_queue_size = 64  # calls that come at once


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in one piece, or each takes 40 ms

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        asked = {name.lower(): value for name, value in self.headers.items()}
        if self.path.startswith(guest.METADATA):
            self._send(*guest.answer(self._known(), self.path, asked))
            return
        given = json.loads(raw) if raw else None
        status, content, headers = self.server.double.answer(self.command, self.path, asked, given)
        self._send(status, json.dumps(content).encode(), headers)

    def _known(self) -> Mapping[str, Any]:
        """What the metadata server knows of the controller's account."""
        token = json.dumps({"access_token": TOKEN, "expires_in": 3599, "token_type": "Bearer"})
        return {"instance": {"service-accounts": {"default": {"token": token}}}}

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | dict(headers)).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""
