"""A login that a site refuses is tried once, and the error has the site's message."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest

from clusterctl.errors import KeyRefusedError, UnreachableError
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import LOGIN_HOST, write_login_files
from clusterctl.transport.ssh import Connections, SSHTransport
from tests.integration.transport.conftest import SSHD, Reach, Sshd, running_sshd, wait_for
from tests.support.messages import refused
from tests.support.processes import eventually

WORDS = "F3 is down for maintenance until 6 pm"
PATIENCE_S = 2.0


class Closing(paramiko.ServerInterface):
    """A server that sends a message and hangs up at the login, as sshd does with PAM and
    /etc/nologin.
    """

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport

    def get_banner(self) -> tuple[str, str]:
        return f"{WORDS}\n", "en-US"

    def get_allowed_auths(self, _username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, _username: str, _key: paramiko.PKey) -> int:
        self._transport.close()
        return paramiko.AUTH_FAILED


class Server:
    """A server in place of sshd. logins: how many connections it has accepted."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.logins = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.logins += 1
                with contextlib.suppress(OSError, EOFError), connection:
                    self._answer(connection)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def config(tmp_path: Path, sshd: Sshd, me: str) -> Path:
    """The ssh_config of a cluster that is attached as `campus`, by an alias of the user."""
    (tmp_path / "known").write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
    (tmp_path / "own").write_text(
        f"Host campus gate\n    HostName 127.0.0.1\n    Port {sshd.port}\n    User {me}\n"
        f"    IdentitiesOnly yes\n    IdentityFile {sshd.folder}/id\n"
        f"    UserKnownHostsFile {tmp_path}/known\n    LogLevel QUIET\n"
    )
    (tmp_path / "own").chmod(0o600)
    workspace = Workspace(tmp_path / "campus")
    workspace.root.mkdir(mode=0o700)
    write_login_files("campus", workspace, str(tmp_path / "own"))
    return workspace.ssh_config


def hang_up_with_words(sshd: Sshd) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        with contextlib.closing(paramiko.Transport(connection)) as transport:
            transport.add_server_key(
                paramiko.Ed25519Key.from_private_key_file(str(sshd.folder / "host"))
            )
            # Without an event, start_server may raise the error of the ended connection.
            transport.start_server(event=threading.Event(), server=Closing(transport))
            transport.join(10)

    return answer


@pytest.fixture
def serve(sshd: Sshd, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Let another server answer in place of sshd."""
    servers: list[Server] = []

    def start(answer: Callable[[socket.socket], None]) -> Server:
        server = Server(answer)
        servers.append(server)
        for name in ("own", "known"):
            path = tmp_path / name
            path.write_text(path.read_text().replace(str(sshd.port), str(server.port)))
        return server

    yield start
    for server in servers:
        server.close()


def ask_twice(config: Path) -> str:
    """Ask for the jobs twice in one command. Return the reason why the login was refused."""
    with Connections(config) as connections:
        slurm = SlurmClient(connections.to(LOGIN_HOST), patience_s=PATIENCE_S)
        for _ in range(2):
            with refused("login-refused", KeyRefusedError, "ssh campus", host="campus") as caught:
                slurm.own_jobs()
    assert not caught.value.retryable
    return caught.value.why


def test_login_closed_with_words_is_tried_once(
    config: Path, sshd: Sshd, serve: Callable[..., Server]
) -> None:
    server = serve(hang_up_with_words(sshd))
    assert WORDS in ask_twice(config)
    assert server.logins == 1


@pytest.mark.parametrize(
    "answer",
    [b"", b"Not allowed at this time\r\n", b"Exceeded MaxStartups\r\n", b"SSH-2.0-OpenSSH_9.9\r\n"],
    ids=["dropped", "penalty", "MaxStartups", "after-version"],
)
def test_dropped_connection_is_tried_once(
    config: Path, serve: Callable[..., Server], answer: bytes
) -> None:
    server = serve(lambda connection: connection.sendall(answer))
    assert "127.0.0.1" in ask_twice(config)
    assert server.logins == 1


@pytest.fixture
def strict(tmp_path: Path, sshd: Sshd) -> Iterator[Path]:
    """Start a real sshd that accepts no login. Return the file with its messages."""
    sshd.process.terminate()
    sshd.process.wait()
    (tmp_path / "words").write_text(f"{WORDS}\n")
    config = tmp_path / "strict"
    log = tmp_path / "log"
    config.write_text(
        f"{(sshd.folder / 'config').read_text()}Banner {tmp_path}/words\n"
        "DenyUsers *\n"
        "LogLevel VERBOSE\n"
    )
    process = subprocess.Popen([SSHD, "-D", "-E", str(log), "-f", str(config)])
    try:
        wait_for(sshd.port, process)
        # That was the first connection, which has no line of an authentication.
        eventually(lambda: "Connection from" in log.read_text())
        yield log
    finally:
        process.terminate()
        process.wait()


def test_denied_login_is_tried_once(config: Path, strict: Path) -> None:
    with Connections(config) as connections:
        slurm = SlurmClient(connections.to(LOGIN_HOST), patience_s=PATIENCE_S)
        for _ in range(2):
            with refused(
                "login-refused/needs-answer", KeyRefusedError, "ssh campus", host="campus"
            ) as caught:
                slurm.own_jobs()
    assert WORDS in caught.value.why
    assert strict.read_text().count("not allowed because listed in DenyUsers") == 1


def test_jump_host_that_refuses_is_shown(
    config: Path, sshd: Sshd, serve: Callable[..., Server], tmp_path: Path
) -> None:
    """A shared connection discards the message of the jump host, so that ssh is started once more."""
    server = serve(hang_up_with_words(sshd))
    user_config = tmp_path / "own"
    user_config.write_text(f"Host campus\n    ProxyJump gate\n{user_config.read_text()}")
    assert WORDS in ask_twice(config)
    assert server.logins == 2


def test_refused_login_is_tried_again_after_a_minute(
    config: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterctl.transport.ssh._REFUSED_S", 0.0)
    server = serve(socket.socket.close)
    ask_twice(config)
    assert server.logins == 2


def test_message_of_the_site_does_not_make_the_login_unreachable(
    config: Path, sshd: Sshd, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.integration.transport.test_refused_login.WORDS",
        "Idle sessions: Connection timed out. Permission denied",
    )
    server = serve(hang_up_with_words(sshd))
    assert "Idle sessions" in ask_twice(config)
    assert server.logins == 1


def test_stopped_server_is_tried_again(config: Path, sshd: Sshd) -> None:
    sshd.process.terminate()
    sshd.process.wait()
    with Connections(config) as connections, refused("unreachable", UnreachableError) as caught:
        connections.to(LOGIN_HOST).run(["true"])
    assert caught.value.retryable


def test_login_that_drops_packets_tells_what_was_tried_and_for_how_long(
    config: Path, sshd: Sshd, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        user_config = tmp_path / "own"
        text = user_config.read_text().replace(str(sshd.port), str(port))
        user_config.write_text(f"{text}    ConnectTimeout 1\n")
        # The kernel drops packets of connections that a full queue has no room for.
        with (
            socket.create_connection(("127.0.0.1", port)),
            Connections(config) as connections,
            refused("unreachable", UnreachableError, "ssh campus") as caught,
        ):
            connections.to(LOGIN_HOST).run(["true"])
    assert f"127.0.0.1 port {port}" in caught.value.why
    assert re.search(r"no answer within \d+ s$", caught.value.why)


def test_threads_that_wait_for_a_login_share_its_error(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for its own time limit, one after the other."""
    waiting = threading.Semaphore(0)
    tries: list[str] = []

    class Lock:
        """Tells that a thread is about to wait for it."""

        lock = threading.Lock()

        def __enter__(self) -> None:
            waiting.release()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def open_master(*_: object, **__: object) -> None:
        for _thread in range(3):
            assert waiting.acquire(timeout=10)
        tries.append("try")
        raise UnreachableError("it drops packets")

    monkeypatch.setattr("clusterctl.transport.ssh.open_master", open_master)
    transport = SSHTransport(LOGIN_HOST, config)
    monkeypatch.setattr(transport, "_lock", Lock())
    with ThreadPoolExecutor(3) as pool:
        errors = [each.exception() for each in [pool.submit(transport.connect) for _ in range(3)]]
    assert tries == ["try"]
    assert all(isinstance(error, UnreachableError) for error in errors)


@pytest.mark.parametrize("setting", ["MaxAuthTries 6", "MaxAuthTries 1"])
def test_login_of_an_account_that_is_gone_is_refused(
    tmp_path: Path, reach: Reach, setting: str
) -> None:
    """`down` waits for this answer. With a single try, sshd says that there were too many failures."""
    with (
        running_sshd(tmp_path / "sshd", setting) as sshd,
        refused("login-refused/key", KeyRefusedError),
    ):
        reach("node", sshd.config()).run(["true"])
