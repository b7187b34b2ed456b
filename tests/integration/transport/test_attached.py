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
    sys.exit(exc.code)
"""
ANSWER = "it is there"


class Own:
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
def own(tmp_path: Path, sshd, me: str) -> Iterator[Own]:
    found = Own(tmp_path, sshd, me)
    yield found
    end_all_connections(found.config)


def log_in(own: Own, window: Terminal) -> None:
    window.read_until(PROMPT)
    window.type(f"{WORDS}\n")
    window.read_until(ANSWER)
    assert window.end() == 0


def test_an_alias_of_the_user_leads_to_the_login(own, sshd) -> None:
    """The admin and the job user are one account, so one connection serves both, and later
    commands.
    """
    with Connections(own.config) as connections:
        admin = connections.to(LOGIN_HOST)
        user = connections.to(LOGIN_HOST, "hpc")
        assert admin is user
        assert user.run(["echo", "there"]).stdout == "there\n"
    served = sshd.connections()
    assert own.run().stdout.strip() == ANSWER
    assert own.run("clusterctl").stdout.strip() == ANSWER
    assert sshd.connections() == served
    assert len(served) == 1


def test_a_connection_of_the_users_own_is_used(own, sshd) -> None:
    """It is not ended when clusterctl ends all its connections."""
    own.write(f"Host campus\n{own.entry}    ControlPath {own.folder}/m\n")
    subprocess.run(["ssh", "-F", own.path, "-fNM", "campus"], check=True, stdin=subprocess.DEVNULL)
    own.protect_key()
    (served,) = sshd.connections()
    assert own.run().stdout.strip() == ANSWER
    end_all_connections(own.config)
    assert own.run().stdout.strip() == ANSWER
    assert sshd.connections() == [served]
    subprocess.run(["ssh", "-F", own.path, "-O", "exit", "campus"], check=True, capture_output=True)


def test_the_user_is_asked_once_on_the_terminal(own, sshd, tmp_path) -> None:
    own.protect_key()
    with on_terminal(own.verb(), os.environ, tmp_path) as window:
        log_in(own, window)
    assert window.shown.count(PROMPT) == 1
    # Neither a command without a terminal nor one on a terminal asks again.
    assert own.run().stdout.strip() == ANSWER
    with on_terminal(own.verb(), os.environ, tmp_path) as window:
        window.read_until(ANSWER)
        assert window.end() == 0
    assert PROMPT not in window.shown
    assert len(sshd.connections()) == 1


def test_a_command_without_a_terminal_asks_nothing(own, sshd) -> None:
    """Not even by a program with a window, and not in a thread while the terminal shows
    progress.
    """
    own.protect_key()
    asked = own.folder / "asked"
    (program := own.folder / "askpass").write_text(f"#!/bin/sh\ntouch {asked}\n")
    program.chmod(0o700)
    environ = {
        **os.environ,
        "DISPLAY": ":0",
        "SSH_ASKPASS": str(program),
        "SSH_ASKPASS_REQUIRE": "force",
    }
    ran = subprocess.run(
        own.verb(),
        stdin=subprocess.DEVNULL,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.strip() == "login-needed"
    assert not asked.exists()
    own.workspace.inventory.touch()
    with refused("login-needed", KeyRefusedError, "ssh --cluster campus -- true", host="campus"):
        Connections(own.config).to(LOGIN_HOST).run(["true"])


def test_advice_before_attach_has_ended_names_the_login(own, tmp_path) -> None:
    """The host key is unknown at a first `attach`, and the workspace has a temporary name."""
    (tmp_path / "known").write_text("")
    with refused("login-needed", KeyRefusedError, "`ssh campus`", host="campus") as caught:
        Connections(own.config).to(LOGIN_HOST).run(["true"])
    assert "--cluster" not in caught.value.fix


def test_commands_on_the_login_are_counted(own) -> None:
    with Connections(own.config) as connections:
        login = connections.to(LOGIN_HOST)
        login.run(["true"])
        assert b"".join(login.stream(["echo", "there"])) == b"there\n"
    own.run()
    assert len(calls_of_last_hour(own.workspace.calls)) == 3
    times = own.workspace.calls.read_text()
    own.workspace.calls.write_text("1000000000\n" * 6000 + times)
    own.run()
    assert len(calls_of_last_hour(own.workspace.calls)) == 4
    assert own.workspace.calls.stat().st_size == 4 * len("1000000000\n")


def test_a_command_in_the_background_of_a_terminal_asks_nothing(own, tmp_path) -> None:
    own.protect_key()
    words = ["bash", "-ic", '"$@" & wait $!; echo "exit $?"', "bash", *own.verb()]
    with on_terminal(words, os.environ, tmp_path) as window:
        window.read_until("exit 1")
        window.end()
    assert "login-needed" in window.shown
    assert PROMPT not in window.shown


@pytest.mark.parametrize("key", ["\x03", "\x1a"], ids=["Ctrl-C", "Ctrl-Z"])
def test_the_question_can_be_interrupted(own, sshd, tmp_path, key: str) -> None:
    """The terminal is left in order, and no ssh."""
    own.protect_key()
    words = ["bash", "-c", '"$@"; read -r line; echo "read $line"', "bash", *own.verb()]
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


def test_a_refused_answer_is_one_error(own, tmp_path) -> None:
    own.protect_key()
    with on_terminal(own.verb(), os.environ, tmp_path) as window:
        for _ in range(3):
            window.read_until(PROMPT)
            window.shown = ""
            window.type("wrong\n")
        window.read_until("login-refused")
        assert window.end() == 1


@pytest.fixture
def jump(own, sshd, me: str) -> None:
    """The login is behind a jump host, whose key has a passphrase."""
    own.protect_key()
    other = sshd.folder / "id2"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    with (sshd.folder / "authorized_keys").open("a") as keys:
        keys.write(other.with_suffix(".pub").read_text())
    behind = own.entry.replace(f"{sshd.folder}/id", str(other))
    own.write(f"Host campus\n    ProxyJump gate\n{behind}Host gate\n{own.entry}")


@pytest.mark.usefixtures("jump")
def test_a_jump_host_asks_only_on_the_terminal(own, sshd, tmp_path) -> None:
    with on_terminal(
        ["bash", "-ic", '"$@" & wait $!', "bash", *own.verb()], os.environ, tmp_path
    ) as window:
        window.end()
    assert "login-needed" in window.shown
    assert PROMPT not in window.shown
    with on_terminal(own.verb(), os.environ, tmp_path) as window:
        log_in(own, window)
    assert own.run().stdout.strip() == ANSWER
    assert len(sshd.connections()) == 2


@pytest.mark.usefixtures("jump")
def test_ctrl_c_ends_no_connection_through_a_jump_host(own, sshd, tmp_path) -> None:
    """ssh to the jump host got its own process group, although it had the terminal."""
    verb = VERB.replace("print(", "print('ready', flush=True), sys.stdin.readline(), print(")
    with on_terminal(
        [sys.executable, "-c", verb, str(own.config), "me"], os.environ, tmp_path
    ) as window:
        window.read_until(PROMPT)
        window.type(f"{WORDS}\n")
        window.read_until("ready")
        window.type("\x03")
        window.read_until("KeyboardInterrupt")
    assert own.run().stdout.strip() == ANSWER


def test_only_the_login_is_reached(own) -> None:
    with (
        Connections(own.config) as connections,
        refused("not-the-login", TransportError, host="c1"),
    ):
        connections.to("c1").run(["true"])
    with refused("not-the-login", TransportError):
        OpenSSH(own.config).argv("c1")


def test_interactive_ssh_shares_the_connection(own, sshd) -> None:
    """The path of its socket is short, however long that of the workspace is."""
    with Connections(own.config) as connections:
        connections.to(LOGIN_HOST).run(["true"])
    (served,) = sshd.connections()
    own.protect_key()
    for words in (
        OpenSSH(own.config).argv(LOGIN_HOST, ["echo", "there"]),
        OpenSSH(own.config).alone(LOGIN_HOST, "echo there"),
    ):
        ran = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        assert ran.stdout == "there\n"
    assert sshd.connections() == [served]


def test_a_login_that_does_not_answer_is_unreachable(own, sshd) -> None:
    sshd.process.terminate()
    sshd.process.wait()
    with refused("unreachable", UnreachableError, "ssh campus", host="campus"):
        Connections(own.config).to(LOGIN_HOST).run(["true"])


def test_a_changed_host_key_is_not_accepted(own, sshd, tmp_path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True
    )
    key = (tmp_path / "other.pub").read_text()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{sshd.port} {key}")
    with refused("host-key", HostKeyError, host="campus"):
        Connections(own.config).to(LOGIN_HOST).run(["true"])


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Connections]:
    """Connections of a cluster whose login node is this machine."""
    workspace = Workspace(tmp_path / "campus")
    workspace.root.mkdir()
    write_login_files(HERE, workspace)
    with Connections(workspace.ssh_config) as connections:
        yield connections


def test_a_login_node_needs_no_ssh(here, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    login = here.to(LOGIN_HOST, "hpc")
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
    with refused("not-the-login", TransportError):
        here.to("c1").run(["true"])


def test_a_command_on_this_machine_ends_with_its_stream(here) -> None:
    stream = here.to(LOGIN_HOST).stream(["sh", "-c", "echo $$; sleep 1000 & wait"])
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
