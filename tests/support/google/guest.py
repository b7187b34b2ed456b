"""Machines of this one, taken for Compute Engine instances: their metadata, and the guest agent's part.

    with metadata(world, inventory):           # at the real address, in the network of these machines
        start_agent(run)                       # ``run`` has a machine's shell run a command

Until Terraform has made the instance with a machine's address, that has no metadata. The agent
(guest_agent.py) removes clusterctl's account, and makes it anew from them once sshd has refused somebody.
As root, in that network: `python -m tests.support.google.guest WORLD_FILE BRIDGE SUBNET`.
"""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from clusterctl.providers.local.layout import bridge_name, netns_name
from clusterctl.providers.local.system import NETNS_DIR
from clusterctl.state.inventory import Inventory
from tests.support.google.metadata import answer
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
