"""The metadata server and the guest agent for local machines that stand for Compute Engine instances.

    with metadata(world, inventory.cluster_id, inventory.network):    # at the real address, in their network
        start_agent(run)                       # ``run`` has a machine's shell run a command

Until Terraform has made the instance with a machine's address, that has no metadata. The agent
(guest_agent.py) removes clusterctl's account, and makes it anew from them once sshd has refused
somebody. tests/e2e/test_guest_agent.py compares it with Debian's package of the real one.
Sources: cloud.google.com/compute/docs/metadata/querying-metadata, of the header, X-Forwarded-For,
`recursive` and `wait_for_change`; .../docs/metadata/manage-guest-attributes, of PUT;
.../docs/troubleshooting/troubleshoot-metadata-server, of 403 and 404 (2026-11).
As root, in that network: `python -m tests.support.google.guest WORLD_FILE BRIDGE SUBNET`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from clusterctl.providers.local.layout import bridge_name, netns_name
from clusterctl.providers.local.system import NETNS_DIR
from tests.support.google.provider.store import Store
from tests.support.google.refusals import NUMBER
from tests.support.processes import ROOT, as_root

_ADDRESS = "169.254.169.254"
_AGENT = Path(__file__).with_name("guest_agent.py")
_PLACE = "/usr/local/bin/google_guest_agent"


@contextmanager
def metadata(world: Store, own: str, network: str) -> Iterator[None]:
    """Serve each instance, known by its address, its metadata.

    own: the id of the cluster or lab that the machines belong to.
    network: their subnet.
    """
    inside = [*as_root(), "nsenter", f"--net={NETNS_DIR / netns_name(own)}"]
    program = [sys.executable, "-m", "tests.support.google.guest"]
    argv = [*inside, *program, str(world.path), bridge_name(own), network]
    with subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        try:
            assert server.stdout.readline() == "ready\n"
            yield
        finally:
            server.stdin.close()  # which ends it


class _Handler(BaseHTTPRequestHandler):
    world: Store

    def do_GET(self) -> None:
        query = dict(parse_qsl(urlsplit(self.path).query))
        deadline = time.monotonic() + float(query.get("timeout_sec", "inf"))
        while True:
            status, body, headers = answer(tree(self._known()), self.path, self._asked())
            is_news = "last_etag" not in query or headers.get("ETag") != query["last_etag"]
            if query.get("wait_for_change") != "true" or is_news or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self._send(status, body, headers)

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        instance, _ = self._known()
        status, body, headers = published(instance, self.path, self._asked())
        namespace, _, key = self.path.removeprefix(GUEST_ATTRIBUTES).partition("/")
        if status == 200 and namespace == "hostkeys":  # nobody reads other attributes of guests
            with self.world.change() as world:
                world.setdefault("guest_attributes", {}).setdefault(instance["name"], {})[key] = (
                    value
                )
        self._send(status, body, headers)

    def _asked(self) -> Mapping[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        with suppress(BrokenPipeError):  # a machine that boots waits no more
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def _known(self) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """The instance that has the caller's address, if there is one, and the project's
        attributes.
        """
        world = self.world.read()
        for one in world["resources"].get("google_compute_instance", {}).values():
            if one["network_interface"][0]["network_ip"] == self.client_address[0]:
                return one, world.get("project_metadata", {})
        return {}, {}

    def log_message(self, *_: object) -> None:
        """Nothing."""


def start_agent(run: Callable[[str], None]) -> None:
    """Have the agent of a machine begin; it ends by itself."""
    program = base64.b64encode(_AGENT.read_bytes()).decode()
    run(f"echo {program} | base64 -d | sudo install -m 0755 /dev/stdin {_PLACE}")
    run(f"sudo systemd-run --quiet --unit=google-guest-agent {_PLACE}")


METADATA = "/computeMetadata/v1/"
GUEST_ATTRIBUTES = f"{METADATA}instance/guest-attributes/"
Answer = tuple[int, bytes, Mapping[str, str]]  # status, body, headers
_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


def tree(known: tuple[Mapping[str, Any], Mapping[str, str]]) -> Mapping[str, Any]:
    """Return the metadata of an instance (Terraform's attributes) in a project with these
    attributes.
    """
    instance, attributes = known
    if not instance:
        return {}
    number = int(hashlib.sha256(instance["id"].encode()).hexdigest()[:15], 16)
    own = {
        "attributes": instance["metadata"] or {},
        "id": number,
        "machine-type": f"projects/{NUMBER}/machineTypes/{instance['machine_type']}",
        "name": instance["name"],
    }
    project = {
        "attributes": attributes,
        "numeric-project-id": int(NUMBER),
        "project-id": instance["project"],
    }
    return {"instance": own, "project": project}


def published(instance: Mapping[str, Any], target: str, headers: Mapping[str, str]) -> Answer:
    """Return the answer to a PUT: only guest attributes can be written, if the instance allows
    it.
    """
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return _MISSING_FLAVOR
    if not target.startswith(GUEST_ATTRIBUTES):
        return _text(405, "Only guest attributes can be written.")
    # Status and text that clients of the metadata server expect (2025).
    if (instance.get("metadata") or {}).get("enable-guest-attributes", "").upper() != "TRUE":
        return _text(403, "Guest attributes endpoint access is disabled.")
    return _text(200, "")


def answer(tree: Mapping[str, Any], target: str, headers: Mapping[str, str]) -> Answer:
    """Return the answer to a GET.

    tree: {"instance": {"attributes": {KEY: TEXT}, ...}, "project": ...}. Empty: there is no such
        instance.
    target: a path with its query.
    headers: by their names in small letters.
    """
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return _MISSING_FLAVOR
    path = urlsplit(target).path
    query = dict(parse_qsl(urlsplit(target).query))
    found: Any = tree or None
    for name in filter(None, path.removeprefix(METADATA).split("/")):
        found = found.get(name) if isinstance(found, Mapping) else None
    if (
        found is None
        or not path.startswith(METADATA)
        or (path.endswith("/") and not isinstance(found, Mapping))
    ):
        return _text(404, f"{path} is not here.")
    if not isinstance(found, Mapping):
        return _text(200, str(found))
    if query.get("recursive") != "true" or query.get("alt", "json") != "json":
        return _text(501, "The stand-in shows folders as JSON, with all that is below them.")
    return _answer(200, json.dumps(_as_json(found, path)), "application/json")


def _as_json(found: Any, name: str) -> Any:
    """Folders as JSON. All names are in camel case there, except names of attributes."""
    if not isinstance(found, Mapping):
        return found
    keeps = name.rstrip("/").endswith("attributes")
    return {
        each if keeps else re.sub("-(.)", lambda part: part[1].upper(), each): _as_json(value, each)
        for each, value in found.items()
    }


def _answer(status: int, text: str, kind: str) -> Answer:
    tag = hashlib.sha256(text.encode()).hexdigest()[:16]
    return status, text.encode(), {**_FLAVOR, "Content-Type": kind, "ETag": tag}


def _text(status: int, text: str) -> Answer:
    return _answer(status, text, "application/text")


_MISSING_FLAVOR = _text(403, "Missing Metadata-Flavor:Google header, or it came through a proxy.")


def main(world: str, bridge: str, subnet: str) -> None:
    """Serve until stdin's end. The address goes with the network, which the machines' provider
    removes.
    """
    for words in (
        f"address replace {_ADDRESS}/32 dev {bridge}",
        f"route replace {subnet} dev {bridge}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    _Handler.world = Store(Path(world))
    server = ThreadingHTTPServer((_ADDRESS, 80), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)  # noqa: T201  (the protocol)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
