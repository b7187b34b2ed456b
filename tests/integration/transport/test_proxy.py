"""Tests of connections to a real sshd through a ProxyCommand, such as an IAP tunnel."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import (
    HostKeyError,
    TunnelError,
    TunnelRefusedError,
    UnreachableError,
)
from clusterctl.state.inventory import Host
from clusterctl.state.workspace import Workspace
from clusterctl.transport.master import end_all_connections, socket_of
from clusterctl.transport.openssh import ssh_config_text
from clusterctl.transport.refusals import proxy_of
from clusterctl.transport.ssh import Connections, SSHTransport
from clusterctl.util.process import call_on_hosts
from tests.support.google import gcloud
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import codes, condition, refused
from tests.support.processes import ends_within_a_minute
from tests.support.verbs import Clusterctl

# ProxyCommand that connects its streams to a local port, as gcloud does, and records its pid.
CARRIER = """\
import os, socket, sys, threading
notes, port, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(notes, "a") as file:
    print(os.getpid(), file=file)
if mode.endswith(".txt"):
    sys.exit(open(mode).read())
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


# Hosts behind a jump host are reached by OpenSSH, or by paramiko.
BOTH = pytest.mark.parametrize("fans_out", [False, True])
NODES = tuple(f"train-{number}" for number in range(1, 7))


@pytest.fixture
def behind(sshd, me, tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Path]]]:
    """Write the ssh_config of `node`, behind a ProxyCommand, and of NODES behind `node`.

    Return it and the file of pids.
    """

    def write(mode: str = "plain") -> tuple[Path, Path]:
        folder = tmp_path / 'it\'s "a" $HOME; folder'
        folder.mkdir(exist_ok=True)
        carrier = folder / "carrier.py"
        gcloud_program = folder / "gcloud"
        notes = folder / "pids"
        carrier.write_text(CARRIER)
        gcloud_program.write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, str(carrier)])} "$@"\n'
        )
        gcloud_program.chmod(0o755)
        notes.touch()
        host = Host(
            name="node",
            address="192.0.2.1",  # which nobody has: only the program leads there
            port=sshd.port,
            user=me,
            roles=("controller",),
            host_key=sshd.host_key,
            proxy_command=(str(gcloud_program), str(notes), "%p", mode),
        )
        one = replace(host, address="127.0.0.1", proxy_command=(), jump="node")
        nodes = (replace(one, name=name, roles=("compute",)) for name in NODES)
        inventory = inventory_of(provider="gcp", hosts=(host, *nodes))
        # Too long for the path of a socket.
        place = tmp_path / ("long folder" * 10)
        place.mkdir(exist_ok=True)
        workspace = Workspace(place)
        workspace.known_hosts.write_text(inventory.known_hosts())
        config = workspace.ssh_config
        config.write_text(ssh_config_text(inventory, workspace, sshd.folder / "id"))
        workspace.inventory.write_text(inventory.text)
        written.append(config)
        return config, notes

    written: list[Path] = []
    yield write
    for config in written:
        end_all_connections(config)


def pids(notes: Path) -> list[int]:
    return [int(pid) for pid in notes.read_text().split()]


def test_proxy_command_ends_with_its_connection(behind):
    config, notes = behind()
    transport = SSHTransport("node", config)
    assert transport.run(["cat"], stdin=b"x" * (1 << 20)).stdout == "x" * (1 << 20)
    assert transport.run(["echo", "again"]).stdout == "again\n"
    (pid,) = pids(notes)  # one connection
    transport.close()
    assert ends_within_a_minute(pid)


def test_ssh_config_with_a_proxy_command_works_with_plain_ssh(behind):
    config, notes = behind()
    done = subprocess.run(
        ["ssh", "-F", config, "node", "echo there"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "there\n", done.stderr
    end_all_connections(config)
    assert all(map(ends_within_a_minute, pids(notes)))


def test_proxy_command_stderr_is_the_cause(behind):
    config, notes = behind("silent")
    config.write_text(config.read_text().replace(" silent\n", " says-nothing.txt\n"))
    with pytest.raises(UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert "says-nothing.txt" in caught.value.why
    assert all(map(ends_within_a_minute, pids(notes)))


def test_missing_proxy_command_is_named(behind):
    config, notes = behind()
    program = shlex.quote(str(notes.parent / "gcloud"))
    config.write_text(config.read_text().replace(program, "/no/such/gcloud"))
    with pytest.raises(UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert "/no/such/gcloud" in caught.value.why


def test_proxy_command_that_ends_at_once_has_its_stderr_as_cause(behind, tmp_path, monkeypatch):
    """OpenSSH 9.2 then prints nothing for a persistent connection in one of six runs on busy
    cores.
    """
    config, _ = behind()
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/sh\ncase "$*" in *"-S none"*) echo "gcloud: not found" >&2 ;; esac\nexit 255\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert caught.value.why == "gcloud: not found"


def test_proxy_command_that_ignores_sigterm_is_ended(behind):
    config, notes = behind("stubborn")
    transport = SSHTransport("node", config)
    transport.run(["true"])
    transport.close()
    assert all(map(ends_within_a_minute, pids(notes)))


def test_connection_through_a_proxy_command_outlives_a_killed_clusterctl(behind):
    """It ends when it is idle for too long."""
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
    assert SSHTransport("node", config).run(["echo", "there"]).stdout == "there\n"
    assert len(pids(notes)) == 1
    end_all_connections(config)
    assert all(map(ends_within_a_minute, pids(notes)))


def test_proxy_command_without_an_answer_times_out(behind):
    config, notes = behind("silent")
    config.write_text(config.read_text().replace("ConnectTimeout 60", "ConnectTimeout 1"))
    with refused("unreachable/tunnel-slow", TunnelError, has_grace=False):
        SSHTransport("node", config).run(["true"])
    assert all(map(ends_within_a_minute, pids(notes)))


def test_staying_proxied_connection_outlives_its_verb(behind):
    """The ProxyCommand belongs to the connection and does not end with the command that opened
    it.
    """
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
    assert ends_within_a_minute(pid)


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        (gcloud.refusal_text("4033"), "cloud-permission/tunnel", TunnelRefusedError),
        (gcloud.refusal_text("403"), "cloud-permission/tunnel", TunnelRefusedError),
        (gcloud.refusal_text("4047"), "unreachable/tunnel-host", TunnelError),
        (gcloud.refusal_text("4003"), "unreachable/tunnel-port", TunnelError),
        *(
            (
                gcloud.login_text(state, "compute.start-iap-tunnel"),
                "cloud-login/gcloud",
                TunnelRefusedError,
            )
            for state in gcloud.LOGINS
        ),
    ],
    ids=["4033", "HTTP 403", "4047", "4003", *gcloud.LOGINS],
)
def test_refusal_of_the_tunnel_has_a_code(behind, tmp_path, text, code, kind):
    message_file = tmp_path / "said.txt"
    message_file.write_text(text)
    config, _ = behind(str(message_file))
    with refused(code, kind, host="node") as caught:
        SSHTransport("node", config).run(["true"])
    assert caught.value.has_grace is (code != "cloud-login/gcloud")
    # The traceback and the advice are left out.
    assert caught.value.why.split("\n")[1:] == [text.partition("\n")[0]]
    assert type(caught.value) is kind


def test_gcloud_rules_do_not_apply_to_other_proxy_commands(behind, tmp_path):
    """Another proxy command is ssh -W, which reaches on-prem hosts behind a jump host."""
    message_file = tmp_path / "said.txt"
    message_file.write_text("ssh: Could not resolve hostname gate: Name or service not known\n")
    config, notes = behind(str(message_file))
    with refused("unreachable/tunnel-offline", TunnelError, has_grace=False):
        SSHTransport("node", config).run(["true"])
    (notes.parent / "gcloud").rename(notes.parent / "other")
    config.write_text(config.read_text().replace("folder/gcloud", "folder/other"))
    with refused("unreachable", UnreachableError) as caught:
        SSHTransport("node", config).run(["true"])
    assert type(caught.value) is UnreachableError


def check_plain_ssh(config: Path) -> None:
    """Run a command on the first node with ssh alone."""
    argv = ["ssh", "-F", config, NODES[0], "echo there"]
    plain = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert plain.stdout == "there\n", plain.stderr


@BOTH
def test_hosts_behind_a_jump_host_share_one_tunnel(behind, fans_out):
    config, notes = behind()
    with Connections(config, fans_out=fans_out) as connections:
        answers, failed = call_on_hosts(
            NODES, lambda name: connections.to(name).run(["echo", name]).stdout
        )
        assert (answers, failed) == ({name: f"{name}\n" for name in NODES}, {})
        check_plain_ssh(config)
        (pid,) = pids(notes)
    end_all_connections(config)
    assert ends_within_a_minute(pid)


def test_plain_ssh_through_a_jump_host_needs_no_clusterctl(behind):
    config, notes = behind()
    for _ in range(2):
        check_plain_ssh(config)
    (pid,) = pids(notes)
    end_all_connections(config)
    assert ends_within_a_minute(pid)


def test_jump_host_is_reached_without_a_socket_folder(behind):
    """As if another account has taken the name of the folder."""
    config, notes = behind()
    Workspace(config.parent).connections.touch()
    check_plain_ssh(config)
    with Connections(config) as connections:
        assert connections.to(NODES[0]).run(["echo", "there"]).stdout == "there\n"
    assert all(map(ends_within_a_minute, pids(notes)))
    Workspace(config.parent).connections.unlink()


@BOTH
def test_refused_jump_host_is_asked_once_for_all_hosts_behind_it(behind, tmp_path, fans_out):
    message_file = tmp_path / "said.txt"
    message_file.write_text(gcloud.refusal_text("4033"))
    config, notes = behind(str(message_file))
    with Connections(config, fans_out=fans_out) as connections:
        _, failed = call_on_hosts(NODES, lambda name: connections.to(name).run(["true"]))
    assert {(name, error.host, condition(error)) for name, error in failed.items()} == {
        (name, name, "cloud-permission/tunnel") for name in NODES
    }
    # A persistent ssh discards its program's messages, so each try starts the program twice.
    assert len(pids(notes)) == 2


def test_ssh_behind_a_refused_jump_host_has_the_code_tunnel_refused(behind, me, tmp_path):
    message_file = tmp_path / "said.txt"
    message_file.write_text(gcloud.refusal_text("4033"))
    config, _ = behind(str(message_file))
    (tmp_path / "demo").symlink_to(config.parent)
    cli = Clusterctl(tmp_path, tmp_path)
    argv = ("-o", "json", "--cluster", "demo", "ssh", "--user", me, NODES[0], "--", "echo there")
    assert codes(cli(*argv, rc=1)) == ["cloud-permission/tunnel"]
    config.write_text(config.read_text().replace(str(message_file), "plain"))
    assert cli(*argv).json["stdout"] == "there\n"
    end_all_connections(config)


@BOTH
def test_host_that_is_down_behind_a_jump_host_is_named(behind, sshd, fans_out):
    config, _ = behind()
    head, found, rest = config.read_text().partition(f"Host {NODES[0]}\n")
    config.write_text(head + found + rest.replace(f"Port {sshd.port}\n", "Port 1\n", 1))
    with Connections(config, fans_out=fans_out) as connections:
        with refused(
            "unreachable/jump-host", TunnelError, NODES[0], host=NODES[0], has_grace=False
        ):
            connections.to(NODES[0]).run(["true"])
        assert connections.to(NODES[1]).run(["echo", "there"]).stdout == "there\n"
    end_all_connections(config)


@BOTH
def test_host_behind_a_jump_host_that_drops_packets_is_named(behind, sshd, fans_out):
    config, _ = behind()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        head, found, rest = config.read_text().partition(f"Host {NODES[0]}\n")
        rest = rest.replace(f"Port {sshd.port}\n", f"Port {silent.getsockname()[1]}\n", 1)
        config.write_text(
            head + found + rest.replace("ConnectTimeout 30\n", "ConnectTimeout 1\n", 1)
        )
        with (
            Connections(config, fans_out=fans_out) as connections,
            refused("unreachable/jump-host", TunnelError, host=NODES[0], has_grace=False),
        ):
            connections.to(NODES[0]).run(["true"])
    end_all_connections(config)


@BOTH
def test_host_key_behind_a_jump_host_is_checked(behind, fans_out):
    config, _ = behind()
    known = config.parent / "known_hosts"
    known.write_text(
        "".join(line for line in known.read_text().splitlines(True) if NODES[0] not in line)
    )
    with Connections(config, fans_out=fans_out) as connections, pytest.raises(HostKeyError):
        connections.to(NODES[0]).run(["true"])
    end_all_connections(config)


def test_recreated_jump_host_gets_a_new_connection(behind, me):
    """The connection to the machine that is gone may be found dead only after a minute."""
    config, _ = behind()
    used = socket_of(config, "node", None)
    hosts = (
        host_of("node", "controller", host_key="ssh-ed25519 other", user=me),
        host_of(NODES[0], jump="node"),
    )
    config.write_text(ssh_config_text(inventory_of(hosts=hosts), Workspace(config.parent), config))
    proxies = [proxy_of(host, config) for host in (NODES[0], "node", "elsewhere")]
    assert [proxy.jump for proxy in proxies] == ["node", None, None]
    assert socket_of(config, "node", None) != used
