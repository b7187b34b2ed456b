"""Machines of this one, taken for Compute Engine instances: their metadata, and the guest agent's part.

    with metadata(world, inventory):           # at the real address, in the network of these machines
        start_agent(run)                       # ``run`` has a machine's shell run a command

Until Terraform has made the instance with a machine's address, that has no metadata. The agent
(guest_agent.py) removes clusterctl's account, and makes it anew from them once sshd has refused somebody.
Sources: cloud.google.com/compute/docs/metadata/querying-metadata, of the header, X-Forwarded-For and
`recursive`; .../docs/troubleshooting/troubleshoot-metadata-server, of 403 and 404 (2026-11).
As root, in that network: `python -m tests.support.google.guest WORLD_FILE BRIDGE SUBNET`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from clusterctl.providers.local.layout import bridge_name, netns_name
from clusterctl.providers.local.system import NETNS_DIR
from clusterctl.state.inventory import Inventory
from tests.support.google.provider.store import Store
from tests.support.processes import ROOT, as_root

_ADDRESS = "169.254.169.254"
_AGENT = Path(__file__).with_name("guest_agent.py")
_PLACE = "/usr/local/bin/google_guest_agent"


@contextmanager
def metadata(world: Store, inventory: Inventory) -> Iterator[None]:
    """Serve each instance, known by its address, the attributes of its metadata."""
    own = inventory.cluster_id
    inside = [*as_root(), "nsenter", f"--net={NETNS_DIR / netns_name(own)}"]
    program = [sys.executable, "-m", "tests.support.google.guest"]
    argv = [*inside, *program, str(world.path), bridge_name(own), inventory.network]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
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
        asked = {name.lower(): value for name, value in self.headers.items()}
        status, body, headers = answer(self._known(), self.path, asked)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _known(self) -> Mapping[str, Any]:
        """What there is of the instance that has the caller's address."""
        world = self.world.read()
        for one in world["resources"].get("google_compute_instance", {}).values():
            if one["network_interface"][0]["network_ip"] == self.client_address[0]:
                project = {"attributes": world.get("project_metadata", {})}
                return {"instance": {"attributes": one["metadata"] or {}}, "project": project}
        return {}

    def log_message(self, *_: object) -> None:
        """Nothing."""


def start_agent(run: Callable[[str], None]) -> None:
    """Have the agent of a machine begin; it ends by itself."""
    program = base64.b64encode(_AGENT.read_bytes()).decode()
    run(f"echo {program} | base64 -d | sudo install -m 0755 /dev/stdin {_PLACE}")
    run(f"sudo systemd-run --quiet --unit=google-guest-agent {_PLACE}")


METADATA = "/computeMetadata/v1/"
Answer = tuple[int, bytes, Mapping[str, str]]  # status, body, headers
_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


def answer(tree: Mapping[str, Any], target: str, headers: Mapping[str, str]) -> Answer:
    """Return the answer to a GET.

    tree: {"instance": {"attributes": {KEY: TEXT}, ...}, "project": ...}. Empty: there is no such instance.
    target: a path with its query.
    headers: by their names in small letters.
    """
    if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
        return _text(403, "Missing Metadata-Flavor:Google header, or it came through a proxy.")
    path, query = urlsplit(target).path, dict(parse_qsl(urlsplit(target).query))
    found: Any = tree or None
    for name in filter(None, path.removeprefix(METADATA).split("/")):
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None or not path.startswith(METADATA) or (isinstance(found, str) and path.endswith("/")):
        return _text(404, f"{path} is not here.")
    if isinstance(found, str):
        return _text(200, found)
    if query != {"recursive": "true"}:
        return _text(501, "The stand-in shows folders as JSON, with all that is below them.")
    return 200, json.dumps(found).encode(), {**_FLAVOR, "Content-Type": "application/json"}


def _text(status: int, text: str) -> Answer:
    return status, text.encode(), {**_FLAVOR, "Content-Type": "application/text"}


def main(world: str, bridge: str, subnet: str) -> None:
    """Serve until stdin's end. The address goes with the network, which the machines' provider removes."""
    for words in (f"address replace {_ADDRESS}/32 dev {bridge}", f"route replace {subnet} dev {bridge}"):
        subprocess.run(["ip", *words.split()], check=True)
    _Handler.world = Store(Path(world))
    server = ThreadingHTTPServer((_ADDRESS, 80), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)  # noqa: T201  (the protocol)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
