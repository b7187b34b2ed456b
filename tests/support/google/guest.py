"""Machines of this one, taken for Compute Engine instances: their metadata, and the guest agent's part.

    with metadata(world, at="10.1.2.1") as url:        # an address that the machines reach
        start_agent(url, run)                          # ``run`` has a machine's shell run a command

Until Terraform has made the instance with a machine's address, that has no metadata. The agent
(guest-agent.sh) removes clusterctl's account, and makes it anew from them once sshd has refused somebody.
"""

from __future__ import annotations

import base64
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.google.world import World

_AGENT = Path(__file__).with_name("guest-agent.sh")
_PATH = "/computeMetadata/v1/instance/attributes/"
_PLACE = "/usr/local/bin/google_guest_agent"


@contextmanager
def metadata(world: World, at: str) -> Iterator[str]:
    """Serve each instance, known by its address, the attributes of its metadata; where that is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = _attribute(world, self.client_address[0], self.path)
            # The real one refuses whoever does not say that it is asked for on purpose.
            refused = self.headers.get("Metadata-Flavor") != "Google"
            self.send_response(403 if refused else 404 if text is None else 200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write(b"" if refused or text is None else text.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Nothing."""

    server = ThreadingHTTPServer((at, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{at}:{server.server_port}/computeMetadata/v1"
    finally:
        server.shutdown()
        server.server_close()


def _attribute(world: World, address: str, path: str) -> str | None:
    there = world.read()["resources"].get("google_compute_instance", {}).values()
    mine: Iterator[dict[str, str]] = (
        one["metadata"] for one in there if one["network_interface"][0]["network_ip"] == address
    )
    return next(mine, {}).get(path.removeprefix(_PATH))


def start_agent(url: str, run: Callable[[str], None]) -> None:
    """Have the agent of a machine begin; it goes on by itself."""
    program = base64.b64encode(_AGENT.read_bytes()).decode()
    run(f"echo {program} | base64 -d | sudo install -m 0755 /dev/stdin {_PLACE}")
    run(f"sudo systemd-run --quiet --unit=google-guest-agent {_PLACE} {shlex.quote(url)}")
