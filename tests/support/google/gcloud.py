"""A stand-in for `gcloud`, as much of it as clusterctl calls: who is logged in, and IAP tunnels.

    bin_folder = install(folder, world_file)    # for PATH; instances are those of the stand-in cloud's file
    (bin_folder / "account").write_text("")     # nobody is logged in

The tunnel leads to the instance's internal address, as IAP's does. As a program:
`python -m tests.support.google.gcloud WORLD_FILE ARGUMENTS...`
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
ACCOUNT = "somebody@example.com"
_CHUNK = 1 << 16


def install(folder: Path, world: Path) -> Path:
    """Put a `gcloud` into a folder of its own."""
    bin_folder = folder / "gcloud bin"
    bin_folder.mkdir()
    (bin_folder / "account").write_text(f"{ACCOUNT}\n")
    program = bin_folder / "gcloud"
    # Often asked, so a shell says it.
    account = shlex.quote(str(bin_folder / "account"))
    argv = [sys.executable, "-m", "tests.support.google.gcloud", str(world)]
    program.write_text(
        f'#!/bin/sh\ncase "$1 $2" in "auth list") exec cat {account} ;; esac\n'
        f'PYTHONPATH={shlex.quote(str(CHECKOUT))} exec {shlex.join(argv)} "$@"\n'
    )
    program.chmod(0o755)
    return bin_folder


def tunnel(world: Path, instance: str, port: int, *, project: str, zone: str) -> int:
    """Carry our streams to a port of an instance until either side is done."""
    rows = json.loads(world.read_text())["resources"].get("google_compute_instance", {}).values()
    there = {(row["name"], row["project"], row["zone"].rpartition("/")[2]): row for row in rows}
    if (found := there.get((instance, project, zone))) is None:
        sys.stderr.write(f"ERROR: (gcloud.compute.start-iap-tunnel) {instance} was not found\n")
        return 1
    try:
        sock = socket.create_connection((found["network_interface"][0]["network_ip"], port), timeout=10)
    except OSError as exc:
        sys.stderr.write(
            f"ERROR: (gcloud.compute.start-iap-tunnel) 4003: failed to connect to backend: {exc}\n"
        )
        return 1
    sock.settimeout(None)

    def back() -> None:
        while data := sock.recv(_CHUNK):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        os._exit(0)

    threading.Thread(target=back, daemon=True).start()
    while data := os.read(0, _CHUNK):
        sock.sendall(data)
    return 0


def main(world: Path, argv: list[str]) -> int:
    """One call of gcloud, but for `auth list`."""
    options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    match [word for word in argv if not word.startswith("--")]:
        case ["compute", "start-iap-tunnel", instance, port] if "listen-on-stdin" in options:
            return tunnel(world, instance, int(port), project=options["project"], zone=options["zone"])
    sys.stderr.write(f"ERROR: (gcloud) Invalid choice: {shlex.join(argv)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
