"""Tests of the SSH transports, of OpenSSH and of paramiko, with a real sshd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from clusterctl.errors import (
    CommandError,
    HostKeyError,
    KeyRefusedError,
    TransportError,
    UnreachableError,
)
from clusterctl.transport.base import Transport
from clusterctl.transport.paramiko_ssh import ParamikoTransport
from clusterctl.transport.ssh import SSHTransport
from tests.support.messages import refused
from tests.support.played.batch import HOSTILE
from tests.support.processes import ends_within_a_minute

ARGUMENTS = ["", "-n", *HOSTILE]
pytestmark = pytest.mark.parametrize("transport_class", [SSHTransport, ParamikoTransport])
SHOW_ARGV = "import sys, json; print(json.dumps(sys.argv[1:]))"


@pytest.fixture
def node(sshd, me, reach) -> Transport:
    return reach("node", sshd.config(), user=me)


def test_run_returns_output_and_exit_code(node):
    result = node.run(["sh", "-c", "echo out; echo err >&2; exit 3"], check=False)
    assert (result.rc, result.stdout, result.stderr) == (3, "out\n", "err\n")


def test_run_failed_command_raises_exit_code_and_stderr(node):
    with pytest.raises(CommandError) as caught:
        node.run(["sh", "-c", "echo no such thing >&2; exit 7"])
    assert caught.value.rc == 7
    assert caught.value.why == "no such thing"
    assert caught.value.host == "node"


def test_run_passes_arguments_unchanged(node):
    assert json.loads(node.run([sys.executable, "-c", SHOW_ARGV, *ARGUMENTS]).stdout) == ARGUMENTS


def test_run_passes_the_environment_unchanged(node):
    show = "import os; print(os.environ['A'] + '|' + os.environ['B'])"
    assert (
        node.run([sys.executable, "-c", show], env={"A": "$HOME 'x'", "B": "1"}).stdout
        == "$HOME 'x'|1\n"
    )


def test_run_refuses_nul_in_arguments(node):
    with refused("option-invalid/null-byte", TransportError):
        node.run(["echo", "a\0b"])


def test_run_sends_and_receives_twenty_megabytes(node):
    blob = os.urandom(1 << 20) * 20
    copy = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read().hex().encode())"
    result = node.run([sys.executable, "-c", copy], stdin=blob, timeout_s=120)
    assert bytes.fromhex(result.stdout) == blob


def test_run_reads_stdout_and_stderr_concurrently(node):
    shout = "import os\nfor _ in range(160): os.write(2, b'e' * 65536); os.write(1, b'o' * 65536)"
    result = node.run([sys.executable, "-c", shout], timeout_s=120)
    assert (len(result.stdout), len(result.stderr)) == (160 * 65536, 160 * 65536)


def test_run_keeps_the_end_of_a_long_stderr(sshd, me, reach):
    transport = reach("node", sshd.config(), user=me, max_output=1000)
    with contextlib.closing(transport):
        result = transport.run(["sh", "-c", "yes | head -c 3000000 >&2; echo the end >&2"])
    assert len(result.stderr) == 1000
    assert result.stderr.endswith("the end\n")


def test_run_command_that_ignores_its_stdin_succeeds(node):
    assert node.run(["true"], stdin=b"x" * (4 << 20)).rc == 0


def test_run_limits_the_size_of_output(sshd, me, reach):
    transport = reach("node", sshd.config(), user=me, max_output=1000)
    with contextlib.closing(transport), refused("unreachable/connection", TransportError, "1000"):
        transport.run(["yes"])


def test_run_timeout_keeps_the_connection(node):
    with refused("unreachable", UnreachableError, "sleep 60", "0.2"):
        node.run(["sleep", "60"], timeout_s=0.2)
    assert node.run(["echo", "still here"]).stdout == "still here\n"


def test_run_killed_command_is_no_lost_connection(node):
    with refused("tool-failed/command", CommandError):
        node.run(["sh", "-c", "kill -KILL $$"])
    assert node.run(["sh", "-c", "kill -KILL $$"], check=False).rc == -1


def test_stream_yields_bytes_on_arrival(node, tmp_path):
    go = tmp_path / "go"
    script = f"printf '\\377a'; while [ ! -e {go} ]; do sleep 0.05; done; printf b"
    stream = node.stream(["sh", "-c", script])
    assert next(stream) == b"\xffa"
    go.touch()
    assert b"".join(stream) == b"b"


def test_stream_raises_when_the_command_failed(node):
    with pytest.raises(CommandError) as caught:
        list(node.stream(["sh", "-c", "echo oh >&2; exit 4"]))
    assert (caught.value.rc, caught.value.why) == (4, "oh")


def test_closing_a_stream_ends_the_command(node):
    stream = node.stream(["sh", "-c", "echo $$; sleep 1000; :"])
    pid = int(next(stream))
    stream.close()
    assert ends_within_a_minute(pid)
    assert node.run(["true"]).rc == 0


def test_lost_connection_ends_the_streamed_command(node, sshd):
    stream = node.stream(["sh", "-c", "echo $$; sleep 1000; :"])
    pid = int(next(stream))
    for connection in sshd.connections():
        os.kill(connection, signal.SIGKILL)
    with refused("unreachable", UnreachableError):
        next(stream)
    assert ends_within_a_minute(pid)


def test_run_connection_killed_fails_and_next_run_connects(node, sshd, tmp_path):
    def kill() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        for pid in sshd.connections():
            os.kill(pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        with refused("unreachable", UnreachableError):
            node.run(["sh", "-c", 'touch -- "$1"; sleep 30', "sh", str(tmp_path / "begun")])
        killing.result()
    assert node.run(["echo", "back"]).stdout == "back\n"


def test_close_ends_the_wait_of_another_thread(node, tmp_path):
    def late() -> bool:
        with refused("unreachable", UnreachableError):
            node.run(
                ["sh", "-c", 'touch -- "$1"; sleep 100', "sh", str(tmp_path / "begun")],
                timeout_s=500,
            )
        return True

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(late)
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        node.close()
        assert waiting.result(timeout=60)


def test_ssh_without_a_user_logs_in_as_the_user_of_the_ssh_config(sshd, reach):
    """sshd does not know the user of the config; the other tests give their own."""
    transport = reach("node", sshd.config())
    with refused("login-refused/key", KeyRefusedError):
        transport.run(["true"])


class Booting(paramiko.ServerInterface):
    """Server that hangs up at each login, as sshd does while PAM refuses logins during boot."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport

    def get_allowed_auths(self, _username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, _username: str, _key: paramiko.PKey) -> int:
        self._transport.close()
        return paramiko.AUTH_FAILED


def test_connect_to_a_host_that_hangs_up_at_login_is_retryable(sshd, me, reach):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError, EOFError):  # it is shut down
                while True:
                    with contextlib.closing(paramiko.Transport(server.accept()[0])) as transport:
                        key = paramiko.Ed25519Key.from_private_key_file(str(sshd.folder / "host"))
                        transport.add_server_key(key)
                        # Without an event, start_server may raise the error of the ended
                        # connection.
                        transport.start_server(event=threading.Event(), server=Booting(transport))
                        transport.join(10)

        thread = threading.Thread(target=serve)
        thread.start()
        node = reach("node", sshd.config(port=server.getsockname()[1]), user=me)
        with refused("unreachable", UnreachableError):
            node.run(["true"])
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_wrong_host_key_is_refused(sshd, me, reach):
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJWsqlyNZ2zBT7lD+gy7dPtK9eE3kTvPhPFBEIgEbeJK"
    with refused("host-key", HostKeyError) as caught:
        reach("node", sshd.config(known=f"node {other}\n"), user=me).run(["true"])
    assert not caught.value.retryable


def test_unknown_host_key_is_refused_and_not_added(sshd, me, reach):
    config = sshd.config(known="")
    for _ in range(2):
        with refused("host-key", HostKeyError):
            reach("node", config, user=me).run(["true"])
    assert (config.parent / "known hosts").read_text() == ""


def test_known_hosts_of_the_user_are_ignored(sshd, me, tmp_path, monkeypatch, reach):
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "known_hosts").write_text(f"node {sshd.host_key}\n")
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(HostKeyError):
        reach("node", sshd.config(known=""), user=me).run(["true"])


def test_refused_connection_is_unreachable(sshd, me, reach):
    from_socket = socket.socket()
    from_socket.bind(("127.0.0.1", 0))
    with from_socket, refused("unreachable", UnreachableError) as caught:
        reach("node", sshd.config(port=from_socket.getsockname()[1]), user=me).run(["true"])
    assert caught.value.retryable


def test_port_that_does_not_speak_ssh_is_unreachable(sshd, me, capfd, reach):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = sshd.config(port=mute.getsockname()[1])
        config.write_text(config.read_text() + "    ConnectTimeout 1\n")
        with refused("unreachable", UnreachableError):
            reach("node", config, user=me).run(["true"])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["???\n", None])
def test_invalid_ssh_config_is_an_error(tmp_path: Path, text, reach):
    config = tmp_path / "ssh_config"
    if text is not None:
        config.write_text(text)
    with refused("record-damaged/ssh-config", TransportError):
        reach("node", config).run(["true"])
