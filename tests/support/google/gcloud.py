"""A stand-in for the commands of `gcloud` that clusterctl calls: tokens of the login, IAP tunnels.

    bin_folder = install(folder, world_file)    # for PATH; instances are those of the stand-in cloud's file
    (bin_folder / "login").write_text("expired")    # or "none"
    (bin_folder / "iap").write_text("4033")     # a refusal of REFUSALS for all tunnels

The tunnel leads to the instance's internal address, as IAP's does. Messages and exit statuses were
recorded from gcloud 528 at a relay that speaks IAP's protocol. Sources:
command_lib/compute/iap_tunnel.py (RunReceiveLocalData logs an error and exits with 0), and
core/credentials/exceptions.py.
As a program: `python -m tests.support.google.gcloud BIN_FOLDER WORLD_FILE ARGUMENTS...`
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
# Answers of IAP's relay to a connection, by code, with the text that gcloud adds.
REFUSALS = {
    "4033": "[4033: 'not authorized'].",
    "4003": "[4003: 'failed to connect to backend']. (Failed to connect to port 22)",
    "4047": "[4047: 'Failed to lookup instance'].",
    "403": "[Handshake status 403 Forbidden]. (May be due to missing permissions)",
}
_TRACEBACK = """\
Traceback (most recent call last):
  File "googlecloudsdk/command_lib/compute/iap_tunnel.py", line 775, in ...
    websocket_conn = self._InitiateConnection(
                     ^^^^^^^^^^^^^^^^^^^^^^^^^
googlecloudsdk.api_lib.compute.iap_tunnel_websocket.ConnectionCreationError: """
LOGINS = {
    "none": "You do not currently have an active account selected.",
    "expired": "There was a problem refreshing your current auth tokens: ('invalid_grant: Token has "
    "been expired or revoked.', {'error': 'invalid_grant', 'error_description': 'Token has "
    "been expired or revoked.'})",
    "reauth": "There was a problem refreshing your current auth tokens: Reauthentication failed. "
    "cannot prompt during non-interactive execution.",
}
_ADVICE = """
Please run:

  $ gcloud auth login

to obtain new credentials.

If you have already logged in with a different account, run:

  $ gcloud config set account ACCOUNT

to select an already authenticated account to use.
"""
_CHUNK = 1 << 16


def install(folder: Path, world: Path) -> Path:
    """Put a `gcloud` into a folder of its own."""
    bin_folder = folder / "gcloud bin"
    bin_folder.mkdir()
    program = bin_folder / "gcloud"
    login = shlex.quote(str(bin_folder / "login"))
    argv = [sys.executable, "-m", "tests.support.google.gcloud", str(bin_folder), str(world)]
    # Often asked, so a shell says it.
    token = f'"auth print-access-token") [ -s {login} ] || exec echo ya29.token ;;'
    program.write_text(
        f'#!/bin/sh\ncase "$1 $2" in {token} esac\n'
        f'PYTHONPATH={shlex.quote(str(CHECKOUT))} exec {shlex.join(argv)} "$@"\n'
    )
    program.chmod(0o755)
    return bin_folder


def login_text(state: str, command: str) -> str:
    """What gcloud says if its login is of no use."""
    return f"ERROR: (gcloud.{command}) {LOGINS[state]}{_ADVICE}"


def login_error(bin_folder: Path, command: str) -> str:
    """The same of the login in the folder. Empty: it is of use."""
    file = bin_folder / "login"
    state = file.read_text() if file.is_file() else ""
    return login_text(state, command) if state else ""


def refusal_text(code: str) -> str:
    """What gcloud says if IAP refuses a connection so."""
    error = f"Error while connecting {REFUSALS[code]}"
    return f"ERROR: [0] Error during local connection to [stdin]: {error}\n{_TRACEBACK}{error}\n"


def refuse(code: str) -> int:
    sys.stderr.write(refusal_text(code))
    return 0


def tunnel(
    bin_folder: Path, world: Path, instance: str, port: int, *, project: str, zone: str
) -> int:
    """Carry our streams to a port of an instance until either side is done."""
    if error := login_error(bin_folder, "compute.start-iap-tunnel"):
        sys.stderr.write(error)
        return 1
    refusal = bin_folder / "iap"
    if refusal.is_file() and (code := refusal.read_text()):
        return refuse(code)
    rows = json.loads(world.read_text())["resources"].get("google_compute_instance", {}).values()
    there = {(row["name"], row["project"], row["zone"].rpartition("/")[2]): row for row in rows}
    if (found := there.get((instance, project, zone))) is None:
        return refuse("4047")
    try:
        sock = socket.create_connection(
            (found["network_interface"][0]["network_ip"], port), timeout=10
        )
    except OSError:
        return refuse("4003")
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


def main(bin_folder: Path, world: Path, argv: list[str]) -> int:
    """One call of gcloud, but for a token of a login that is of use."""
    options = dict(word[2:].partition("=")[::2] for word in argv if word.startswith("--"))
    match [word for word in argv if not word.startswith("--")]:
        case ["compute", "start-iap-tunnel", instance, port] if "listen-on-stdin" in options:
            place = {name: options[name] for name in ("project", "zone")}
            return tunnel(bin_folder, world, instance, int(port), **place)
        case ["auth", "print-access-token"]:
            sys.stderr.write(login_error(bin_folder, "auth.print-access-token"))
            return 1
    sys.stderr.write(f"ERROR: (gcloud) Invalid choice: {shlex.join(argv)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
