"""Tests of connections to the login of an attached cluster, by the user's own SSH configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from clusterctl.errors import HostKeyError, KeyRefusedError, TransportError, UnreachableError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import HERE, LOGIN_HOST, calls_of_last_hour, write_login_files
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.openssh import OpenSSH
from clusterctl.transport.ssh import Connections
from tests.support.messages import refused
from tests.support.processes import eventually
from tests.support.terminal import Terminal, on_terminal

WORDS = "correct horse"
PROMPT = "Enter passphrase for key"
# Prints what a command on the login prints, or the error's code.
VERB = """
import sys
from pathlib import Path
from clusterctl.errors import ClusterctlError
from clusterctl.transport.ssh import Connections
try:
    with Connections(Path(sys.argv[1])) as connections:
        print(connections.to("login", sys.argv[2]).run(["echo", "it is", "there"]).stdout.strip())
except ClusterctlError as exc:
    sys.exit(f"{exc.code}/{exc.about}")
"""
ANSWER = "it is there"


class UserSsh:
    """A user's own SSH configuration with an alias `campus`, and the workspace of the cluster
    there.
    """

    def __init__(self, folder: Path, sshd, me: str) -> None:
        self.folder = folder
        self.sshd = sshd
        self.path = folder / "own"
        (folder / "known").write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key}\n")
        self.entry = (
            "    HostName 127.0.0.1\n"
            f"    Port {sshd.port}\n"
            f"    User {me}\n"
            "    IdentitiesOnly yes\n"
            f"    IdentityFile {sshd.folder}/id\n"
            f"    UserKnownHostsFile {folder}/known\n"
            "    LogLevel QUIET\n"
        )
        self.write(f"Host campus\n{self.entry}")
        self.workspace = Workspace(folder / "campus")
        self.workspace.root.mkdir(mode=0o700)
        write_login_files("campus", self.workspace, str(self.path))

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.path.chmod(0o600)

    @property
    def config(self) -> Path:
        return self.workspace.ssh_config

    def protect_key(self) -> None:
        """Give the key a passphrase, for which ssh asks as it does for a password or a code."""
        words = [
            "ssh-keygen",
            "-q",
            "-p",
            "-P",
            "",
            "-N",
            WORDS,
            "-f",
            str(self.sshd.folder / "id"),
        ]
        subprocess.run(words, check=True)

    def verb(self, user: str = "hpc") -> list[str]:
        return [sys.executable, "-c", VERB, str(self.config), user]

    def run(self, user: str = "hpc") -> subprocess.CompletedProcess[str]:
        """Run a verb without a terminal."""
        return subprocess.run(
            self.verb(user),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture
def user_ssh(tmp_path: Path, sshd, me: str) -> Iterator[UserSsh]:
    found = UserSsh(tmp_path, sshd, me)
    yield found
    end_all_connections(found.config)


def log_in(user_ssh: UserSsh, window: Terminal) -> None:
    window.read_until(PROMPT)
    window.type(f"{WORDS}\n")
    window.read_until(ANSWER)
    assert window.end() == 0


def test_connection_uses_an_alias_of_the_users_ssh_config(user_ssh, sshd) -> None:
    """Admin and job user are the same account, so that all commands share a connection."""
    with Connections(user_ssh.config) as connections:
        admin = connections.to(LOGIN_HOST)
        user = connections.to(LOGIN_HOST, "hpc")
        assert admin is user
        assert user.run(["echo", "there"]).stdout == "there\n"
    served = sshd.connections()
    assert user_ssh.run().stdout.strip() == ANSWER
    assert user_ssh.run("clusterctl").stdout.strip() == ANSWER
    assert sshd.connections() == served
    assert len(served) == 1


def test_master_connection_of_the_user_is_used_and_not_ended(user_ssh, sshd) -> None:
    """It is not ended when clusterctl ends all its connections."""
    user_ssh.write(f"Host campus\n{user_ssh.entry}    ControlPath {user_ssh.folder}/m\n")
    subprocess.run(
        ["ssh", "-F", user_ssh.path, "-fNM", "campus"], check=True, stdin=subprocess.DEVNULL
    )
    user_ssh.protect_key()
    (served,) = sshd.connections()
    assert user_ssh.run().stdout.strip() == ANSWER
    end_all_connections(user_ssh.config)
    assert user_ssh.run().stdout.strip() == ANSWER
    assert sshd.connections() == [served]
    subprocess.run(
        ["ssh", "-F", user_ssh.path, "-O", "exit", "campus"], check=True, capture_output=True
    )


def test_passphrase_is_asked_once_on_the_terminal(user_ssh, sshd, tmp_path) -> None:
    user_ssh.protect_key()
    with on_terminal(user_ssh.verb(), os.environ, tmp_path) as window:
        log_in(user_ssh, window)
    assert window.shown.count(PROMPT) == 1
    # Neither a command without a terminal nor one on a terminal asks again.
    assert user_ssh.run().stdout.strip() == ANSWER
    with on_terminal(user_ssh.verb(), os.environ, tmp_path) as window:
        window.read_until(ANSWER)
        assert window.end() == 0
    assert PROMPT not in window.shown
    assert len(sshd.connections()) == 1


def test_command_without_a_terminal_asks_no_passphrase(user_ssh, sshd) -> None:
    """Neither a program with a window asks, nor a thread while the terminal shows progress."""
    user_ssh.protect_key()
    asked_file = user_ssh.folder / "asked"
    (program := user_ssh.folder / "askpass").write_text(f"#!/bin/sh\ntouch {asked_file}\n")
    program.chmod(0o700)
    environ = {
        **os.environ,
        "DISPLAY": ":0",
        "SSH_ASKPASS": str(program),
        "SSH_ASKPASS_REQUIRE": "force",
    }
    ran = subprocess.run(
        user_ssh.verb(),
        stdin=subprocess.DEVNULL,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.strip() == "login-refused/needs-answer"
    assert not asked_file.exists()
    user_ssh.workspace.inventory.touch()
    with refused(
        "login-refused/needs-answer", KeyRefusedError, "ssh --cluster campus -- true", host="campus"
    ):
        Connections(user_ssh.config).to(LOGIN_HOST).run(["true"])


def test_advice_before_attach_has_ended_names_the_login(user_ssh, tmp_path) -> None:
    """The host key is unknown at a first `attach`, and the workspace has a temporary name."""
    (tmp_path / "known").write_text("")
    with refused(
        "login-refused/needs-answer", KeyRefusedError, "`ssh campus`", host="campus"
    ) as caught:
        Connections(user_ssh.config).to(LOGIN_HOST).run(["true"])
    assert "--cluster" not in caught.value.fix


def test_commands_on_the_login_are_counted(user_ssh) -> None:
    with Connections(user_ssh.config) as connections:
        login = connections.to(LOGIN_HOST)
        login.run(["true"])
        assert b"".join(login.stream(["echo", "there"])) == b"there\n"
    user_ssh.run()
    assert len(calls_of_last_hour(user_ssh.workspace.calls)) == 3
    times = user_ssh.workspace.calls.read_text()
    user_ssh.workspace.calls.write_text("1000000000\n" * 6000 + times)
    user_ssh.run()
    assert len(calls_of_last_hour(user_ssh.workspace.calls)) == 4
    assert user_ssh.workspace.calls.stat().st_size == 4 * len("1000000000\n")


def test_command_in_the_background_of_a_terminal_asks_no_passphrase(user_ssh, tmp_path) -> None:
    user_ssh.protect_key()
    words = ["bash", "-ic", '"$@" & wait $!; echo "exit $?"', "bash", *user_ssh.verb()]
    with on_terminal(words, os.environ, tmp_path) as window:
        window.read_until("exit 1")
        window.end()
    assert "login-refused/needs-answer" in window.shown
    assert PROMPT not in window.shown


@pytest.mark.parametrize("key", ["\x03", "\x1a"], ids=["Ctrl-C", "Ctrl-Z"])
def test_ctrl_c_at_the_passphrase_prompt_ends_ssh(user_ssh, sshd, tmp_path, key: str) -> None:
    """The terminal is restored."""
    user_ssh.protect_key()
    words = ["bash", "-c", '"$@"; read -r line; echo "read $line"', "bash", *user_ssh.verb()]
    with on_terminal(words, os.environ, tmp_path) as window:
        window.read_until(PROMPT)
        # Between its prompt and its read, ssh loses a signal.
        eventually(lambda: stat_of(int(stat_of(window.process.pid)[5]))[0] == "S")
        window.type(key)
        window.read_until("KeyboardInterrupt")
        window.type("on\n")
        window.read_until("read on")
        window.end()
    assert not sshd.connections() or eventually(lambda: not sshd.connections())


def test_wrong_passphrase_three_times_is_login_refused(user_ssh, tmp_path) -> None:
    user_ssh.protect_key()
    with on_terminal(user_ssh.verb(), os.environ, tmp_path) as window:
        for _ in range(3):
            window.read_until(PROMPT)
            window.shown = ""
            window.type("wrong\n")
        window.read_until("login-refused")
        assert window.end() == 1


@pytest.fixture
def jump(user_ssh, sshd, me: str) -> None:
    """Put the login behind a jump host, whose key has a passphrase."""
    user_ssh.protect_key()
    other = sshd.folder / "id2"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    with (sshd.folder / "authorized_keys").open("a") as keys:
        keys.write(other.with_suffix(".pub").read_text())
    behind = user_ssh.entry.replace(f"{sshd.folder}/id", str(other))
    user_ssh.write(f"Host campus\n    ProxyJump gate\n{behind}Host gate\n{user_ssh.entry}")


@pytest.mark.usefixtures("jump")
def test_jump_host_asks_a_passphrase_only_on_the_terminal(user_ssh, sshd, tmp_path) -> None:
    with on_terminal(
        ["bash", "-ic", '"$@" & wait $!', "bash", *user_ssh.verb()], os.environ, tmp_path
    ) as window:
        window.end()
    assert "login-refused/needs-answer" in window.shown
    assert PROMPT not in window.shown
    with on_terminal(user_ssh.verb(), os.environ, tmp_path) as window:
        log_in(user_ssh, window)
    assert user_ssh.run().stdout.strip() == ANSWER
    assert len(sshd.connections()) == 2


@pytest.mark.usefixtures("jump")
def test_ctrl_c_ends_no_connection_through_a_jump_host(user_ssh, sshd, tmp_path) -> None:
    """ssh to the jump host got its own process group, although it had the terminal."""
    verb = VERB.replace("print(", "print('ready', flush=True), sys.stdin.readline(), print(")
    with on_terminal(
        [sys.executable, "-c", verb, str(user_ssh.config), "me"], os.environ, tmp_path
    ) as window:
        window.read_until(PROMPT)
        window.type(f"{WORDS}\n")
        window.read_until("ready")
        window.type("\x03")
        window.read_until("KeyboardInterrupt")
    assert user_ssh.run().stdout.strip() == ANSWER


def test_connection_to_a_compute_node_is_refused(user_ssh) -> None:
    with (
        Connections(user_ssh.config) as connections,
        refused("unreachable/not-the-login", TransportError, host="c1"),
    ):
        connections.to("c1").run(["true"])
    with refused("unreachable/not-the-login", TransportError):
        OpenSSH(user_ssh.config).argv("c1")


def test_interactive_ssh_shares_the_connection(user_ssh, sshd) -> None:
    """The path of the socket is short even if the path of the workspace is long."""
    with Connections(user_ssh.config) as connections:
        connections.to(LOGIN_HOST).run(["true"])
    (served,) = sshd.connections()
    user_ssh.protect_key()
    for words in (
        OpenSSH(user_ssh.config).argv(LOGIN_HOST, ["echo", "there"]),
        OpenSSH(user_ssh.config).alone(LOGIN_HOST, "echo there"),
    ):
        ran = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        assert ran.stdout == "there\n"
    assert sshd.connections() == [served]


def test_stopped_sshd_is_unreachable(user_ssh, sshd) -> None:
    sshd.process.terminate()
    sshd.process.wait()
    with refused("unreachable", UnreachableError, "ssh campus", host="campus"):
        Connections(user_ssh.config).to(LOGIN_HOST).run(["true"])


def test_changed_host_key_is_refused(user_ssh, sshd, tmp_path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True
    )
    key = (tmp_path / "other.pub").read_text()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{sshd.port} {key}")
    with refused("host-key", HostKeyError, host="campus"):
        Connections(user_ssh.config).to(LOGIN_HOST).run(["true"])


@pytest.fixture
def local_login(tmp_path: Path) -> Iterator[Connections]:
    """Connections of a cluster whose login node is this machine."""
    workspace = Workspace(tmp_path / "campus")
    workspace.root.mkdir()
    write_login_files(HERE, workspace)
    with Connections(workspace.ssh_config) as connections:
        yield connections


def test_clusterctl_on_the_login_node_uses_no_ssh(local_login, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    login = local_login.to(LOGIN_HOST, "hpc")
    assert login.run(["pwd"], env={"A": "b"}).stdout == f"{Path.home()}\n"
    assert login.run(["cat"], stdin=b"\xc3\xa4").stdout == "ä"
    seen = login.run(["env"], env={"A": "b"}).stdout.splitlines()
    assert "A=b" in seen
    assert "PATH=/usr/bin:/bin" in seen
    # A job would inherit it.
    assert not [line for line in seen if line.startswith("SLURM_")]
    assert login.run(["sh", "-c", "kill $$"], check=False).rc == -1
    assert login.run(["sh", "-c", "exit 255"], check=False).rc == 255
    with login.converse(["cat"]) as talk:
        talk.send(b"one")
        assert talk.receive() == b"one"
        talk.finish()
    with refused("unreachable/not-the-login", TransportError):
        local_login.to("c1").run(["true"])


def test_command_on_this_machine_ends_with_its_stream(local_login) -> None:
    stream = local_login.to(LOGIN_HOST).stream(["sh", "-c", "echo $$; sleep 1000 & wait"])
    pid = int(next(stream))
    children = [
        int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]
    stream.close()
    eventually(lambda: not [one for one in (pid, *children) if is_running(one)])


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name. The terminal's process group is the
    sixth.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return stat_of(pid)[0] != "Z"
    return False
