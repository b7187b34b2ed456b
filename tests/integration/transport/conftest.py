"""Fixtures: an sshd on loopback as the current user, a remote home, a folder of unusual files."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.openssh import IDLE_S
from clusterctl.transport.ssh import SSHTransport
from clusterctl.util.assets import digest
from tests.support.hostile import HOSTILE_NAMES
from tests.support.processes import eventually
from tests.support.sshd import allow_sshd, reserved_port

MIB = 1 << 20
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin") or "/usr/sbin/sshd"


def keypair(path: Path) -> str:
    """Make a key pair and return its public half as `ssh-ed25519 AAAA...`."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True
    )
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


@dataclass
class Sshd:
    """A running sshd; ``host_key`` is its public key."""

    folder: Path
    port: int
    host_key: str
    process: subprocess.Popen[bytes]

    def config(
        self,
        *,
        known: str | None = None,
        port: int | None = None,
        where: Path | None = None,
        alive_s: int = 20,
    ) -> Path:
        """Write an ssh_config and known_hosts. Default: the correct values for this sshd.

        alive_s: ssh gives an sshd up that is silent for three times as long.
        """
        where = where or self.folder / f"client-{len(list(self.folder.iterdir()))}"
        where.mkdir(exist_ok=True)
        known_hosts = where / "known hosts"
        known_hosts.write_text(f"node {self.host_key}\n" if known is None else known)
        config = where / "ssh_config"
        sockets = Workspace(where).connections
        config.write_text(
            f"Host node\n    HostName 127.0.0.1\n    Port {port or self.port}\n    User nobody-at-all\n"
            f"    HostKeyAlias node\n    ControlPath {sockets}/{digest(known or '')}-%r\n"
            f"Host *\n    ControlMaster auto\n    ControlPersist {IDLE_S}\n"
            f'    IdentityFile "{self.folder / "id"}"\n    UserKnownHostsFile "{known_hosts}"\n'
            "    IdentitiesOnly yes\n    GlobalKnownHostsFile /dev/null\n    StrictHostKeyChecking yes\n"
            f"    ServerAliveInterval {alive_s}\n    ServerAliveCountMax 3\n    LogLevel ERROR\n"
        )
        return config

    def connections(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@pytest.fixture(scope="session")
def me() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with running_sshd(tmp_path / "sshd") as server:
        yield server


@contextmanager
def running_sshd(folder: Path, *settings: str) -> Iterator[Sshd]:
    """Run an sshd on loopback that admits the key ``id`` in ``folder``. settings: lines of its
    sshd_config.
    """
    allow_sshd()
    folder.mkdir(mode=0o700)
    host_key = keypair(folder / "host")
    (folder / "authorized_keys").write_text(keypair(folder / "id") + "\n")
    with reserved_port() as port:
        yield from _serve(folder, port, host_key, settings)


def _serve(folder: Path, port: int, host_key: str, settings: Iterable[str]) -> Iterator[Sshd]:
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nUsePAM no\nStrictModes no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        + "".join(f"{line}\n" for line in settings)
    )
    process = subprocess.Popen(
        [SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.PIPE
    )
    try:
        server = Sshd(folder, port, host_key, process)
        wait_for(port, process)
        # Tests count the connections of the sshd.
        eventually(lambda: not server.connections())
        yield server
    finally:
        process.terminate()
        process.communicate()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until an sshd has greeted a connection, for which it has a process then."""

    def greets() -> bool:
        assert process.poll() is None, process.communicate()[1]
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as one:
            one.settimeout(60)
            return one.recv(4) == b"SSH-"
        return False

    eventually(greets)


Reach = Callable[..., Transport]


@pytest.fixture
def transport_class() -> Callable[..., Transport]:
    """The class of the connections of ``reach``. Tests may be parametrized by others."""
    return SSHTransport


@pytest.fixture
def reach(transport_class: Callable[..., Transport]) -> Iterator[Reach]:
    """Return a function that connects to a host. The connections are closed after the test."""
    made: list[tuple[Transport, Path]] = []

    def make(host: str, config: Path, **settings: Any) -> Transport:
        made.append((transport_class(host, config, **settings), config))
        return made[-1][0]

    yield make
    for transport, config in made:
        transport.close()
        end_all_connections(config)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "remote home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub" / "empty").mkdir(parents=True)
    for name in HOSTILE_NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)
    (folder / "sub" / "nothing").touch()
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o751)
    (folder / "large").write_bytes(os.urandom(3 * MIB))
    (folder / "link").symlink_to("sub/run.sh")
    (folder / "dangling").symlink_to("/no/such\nplace")
    os.utime(folder / "large", ns=(1, 1_234_567_890_123_456_789))
    os.utime(folder / "sub", ns=(1, 1_111_111_111_000_000_000))
    return folder
