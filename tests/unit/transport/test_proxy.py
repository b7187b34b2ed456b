"""Tests of connections to a real sshd through a ProxyCommand, such as an IAP tunnel."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import UnreachableError
from clusterctl.state.inventory import Host
from clusterctl.transport.ssh import SSHTransport, end_all_connections
from tests.support.inventories import inventory_of
from tests.support.processes import gone

# ProxyCommand that connects its streams to a local port, as gcloud does, and records its pid.
CARRIER = """\
import os, socket, sys, threading
notes, port, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(notes, "a") as file:
    print(os.getpid(), file=file)
if mode == "refused":
    sys.exit("ERROR: (gcloud.compute.start-iap-tunnel) You do not currently have an active account selected.")
os.set_blocking(0, False)  # as gcloud does
os.set_blocking(0, True)
if mode == "silent":
    threading.Event().wait()
sock = socket.create_connection(("127.0.0.1", port))
def down():
    while data := sock.recv(65536):
        os.write(1, data)
    os._exit(0)
threading.Thread(target=down, daemon=True).start()
while data := os.read(0, 65536):
    sock.sendall(data)
if mode == "stubborn":
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()
"""


@pytest.fixture
def behind(sshd, me, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Write the ssh_config of a host behind a ProxyCommand. Return it and the file of pids."""

    def write(mode: str = "plain") -> tuple[Path, Path]:
        folder = tmp_path / 'it\'s "a" $HOME; folder'
        folder.mkdir(exist_ok=True)
        carrier, notes = folder / "carrier.py", folder / "pids"
        carrier.write_text(CARRIER)
        notes.touch()
        host = Host(
            name="node",
            address="192.0.2.1",  # which nobody has: only the program leads there
            port=sshd.port,
            user=me,
            roles=("controller",),
            host_key=sshd.host_key,
            proxy_command=(sys.executable, str(carrier), str(notes), "%p", mode),
        )
        inventory = inventory_of(provider="gcp", hosts=(host,))
        config, known_hosts = tmp_path / "ssh_config", tmp_path / "known_hosts"
        known_hosts.write_text(inventory.known_hosts())
        config.write_text(inventory.ssh_config(key=sshd.folder / "id", known_hosts=known_hosts))
        return config, notes

    return write


def pids(notes: Path) -> list[int]:
    return [int(pid) for pid in notes.read_text().split()]


def test_proxy_command_ends_with_its_connection(behind):
    config, notes = behind()
    transport = SSHTransport("node", config)
    assert transport.run(["cat"], stdin=b"x" * (1 << 20)).stdout == "x" * (1 << 20)
    assert transport.run(["echo", "again"]).stdout == "again\n"
    (pid,) = pids(notes)  # one connection
    transport.close()
    assert gone(pid)


def test_plain_ssh_reads_the_same_file(behind):
    config, notes = behind()
    done = subprocess.run(
        ["ssh", "-F", config, "node", "echo there"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "there\n", done.stderr
    assert all(map(gone, pids(notes)))


def test_what_the_program_says_is_the_reason(behind):
    config, notes = behind("refused")
    with pytest.raises(UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert "active account" in caught.value.why
    assert all(map(gone, pids(notes)))


def test_a_program_that_is_not_there_is_said(behind):
    config, _ = behind()
    config.write_text(config.read_text().replace(shlex.quote(sys.executable), "/no/such/gcloud"))
    with pytest.raises(UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert "/no/such/gcloud" in caught.value.why


def test_a_program_is_heard_that_ends_before_ssh_writes_to_it(behind, tmp_path, monkeypatch):
    """OpenSSH 9.2 then prints nothing for a persistent connection in one of six runs on busy cores."""
    config, _ = behind()
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\ncase "$*" in *ControlPersist*) ;; *) echo "gcloud: not found" >&2 ;; esac\nexit 255\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert caught.value.why == "gcloud: not found"


def test_a_stubborn_program_ends_all_the_same(behind):
    config, notes = behind("stubborn")
    transport = SSHTransport("node", config)
    transport.run(["true"])
    transport.close()
    assert all(map(gone, pids(notes)))


def test_the_program_ends_when_we_are_killed(behind):
    config, notes = behind()
    code = (
        "import sys, time; from pathlib import Path; from clusterctl.transport.ssh import SSHTransport\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "t = SSHTransport('node', Path(sys.argv[1]))\n"
        "with ThreadPoolExecutor(1) as pool: pool.submit(t.run, ['true']).result()\n"  # its thread ends
        "t.run(['true']); print('connected', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, config], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        process.kill()
    assert all(map(gone, pids(notes)))
    assert len(pids(notes)) == 1


def test_a_program_that_never_answers_is_given_up(behind):
    config, notes = behind("silent")
    config.write_text(config.read_text().replace("ConnectTimeout 60", "ConnectTimeout 1"))
    with pytest.raises(UnreachableError):
        SSHTransport("node", config).run(["true"])
    assert all(map(gone, pids(notes)))


def test_proxied_connection_that_stays_outlives_its_verb(behind):
    """The ProxyCommand belongs to the connection and does not end with the command that opened it."""
    config, notes = behind()
    code = (
        "import sys; from pathlib import Path; from clusterctl.transport.ssh import SSHTransport\n"
        "t = SSHTransport('node', Path(sys.argv[1]), stays=True); t.run(['true']); t.close()\n"
    )
    try:
        for _ in range(2):
            subprocess.run([sys.executable, "-c", code, config], check=True)
            time.sleep(0.2)
        (pid,) = pids(notes)
    finally:
        end_all_connections(config)
    assert gone(pid)
