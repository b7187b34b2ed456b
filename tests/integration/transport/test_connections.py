"""Tests of shared ssh connections: their owner, their end, and commands without a shared
connection.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from socket import AF_UNIX
from socket import socket as connect

import pytest

from clusterctl.errors import HostKeyError, TransportError, UnreachableError
from clusterctl.state.inventory import CONTROLLER, Host
from clusterctl.state.workspace import LockHolder, Workspace
from clusterctl.transport import master
from clusterctl.transport.base import Transport, remote_argv, wrap_command
from clusterctl.transport.master import end_all_connections, socket_of
from clusterctl.transport.openssh import IDLE_S, write_ssh_files
from clusterctl.transport.ssh import Connections, SSHTransport
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused
from tests.support.processes import ends_within_a_minute, eventually

KNOWN = "node ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJWsqlyNZ2zBT7lD+gy7dPtK9eE3kTvPhPFBEIgEbeJK\n"
OTHER_USER = 65534
CLIENT = """
import sys
from pathlib import Path
from clusterctl.transport.ssh import SSHTransport
node = SSHTransport("node", Path(sys.argv[1]), user=sys.argv[2], stays=True)
print(node.run(["echo", "there"]).stdout)
node.close()
"""


@pytest.fixture
def config(sshd) -> Iterator[Path]:
    path = sshd.config()
    yield path
    end_all_connections(path)


def masters(config: Path) -> list[int]:
    """Return the pids of the ssh processes that keep connections."""
    title = f"ssh: {folder_of(config)}/".encode()
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (proc / "cmdline").read_bytes().startswith(title):
                found.append(int(proc.name))
    return found


def folder_of(config: Path) -> Path:
    return Workspace(config.parent).connections


def sockets(config: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return list(folder_of(config).iterdir())
    return []


def is_shared(config: Path, me: str) -> bool:
    """Run a command as a process of its own would; return whether it leaves its connection open."""
    run_echo(config, me)
    return bool(masters(config))


def run_echo(config: Path, me: str) -> None:
    with closing(SSHTransport("node", config, user=me, stays=True)) as node:
        assert node.run(["echo", "there"]).stdout == "there\n"


def assert_is_not_shared(config: Path, me: str) -> None:
    """Run a command, and wait for the end of its connection. A shared one would stay."""
    run_echo(config, me)
    eventually(lambda: not masters(config))


def assert_has_one_connection(sshd, config: Path) -> None:
    """Processes of ended connections may live for a moment longer."""
    eventually(lambda: len(masters(config)) == len(sshd.connections()) == 1)


def test_consecutive_verbs_share_a_connection(sshd, me, config) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, config, me],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        # If ssh held our stdout open, a reader of our output would wait for ssh to exit.
        assert done.stdout == "there\n\n", done.stderr
    assert_has_one_connection(sshd, config)
    assert os.getsid(masters(config)[0]) != os.getsid(0)  # Ctrl-C is not for it


def test_concurrent_verbs_share_a_connection(sshd, me, config) -> None:
    words = [sys.executable, "-c", CLIENT, config, me]
    verbs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert {verb.communicate(timeout=60)[0] for verb in verbs} == {"there\n\n"}
    assert_has_one_connection(sshd, config)
    assert len(sockets(config)) == 1


def test_socket_of_a_killed_ssh_is_replaced(sshd, me, config) -> None:
    assert is_shared(config, me)
    (killed,), (socket,) = masters(config), sockets(config)
    os.kill(killed, signal.SIGKILL)
    assert ends_within_a_minute(killed)
    assert socket.is_socket()
    assert is_shared(config, me)
    assert killed not in masters(config)
    assert_has_one_connection(sshd, config)


def test_connection_that_died_while_idle_is_opened_again(sshd, me, config, monkeypatch) -> None:
    """The command runs once, because it is not sent over the connection that does not answer."""
    monkeypatch.setattr(master, "FRESH_S", 0.0)
    monkeypatch.setattr(master, "_ANSWER_S", 0.5)
    # As after a laptop's sleep, ssh itself has not noticed yet.
    config.write_text(
        config.read_text().replace("ServerAliveInterval 20", "ServerAliveInterval 600")
    )
    note = config.with_name("note")
    assert is_shared(config, me)
    (dead,), served = masters(config), sshd.connections()
    for pid in served:
        os.kill(pid, signal.SIGSTOP)
    with closing(SSHTransport("node", config, user=me, stays=True)) as node:
        node.run(["sh", "-c", 'echo once >>"$1"', "sh", str(note)])
    assert ends_within_a_minute(dead)
    for pid in served:
        os.kill(pid, signal.SIGCONT)
        assert ends_within_a_minute(pid)
    assert note.read_text() == "once\n"
    assert_has_one_connection(sshd, config)


def test_silent_connection_that_another_command_may_use_is_left_alone(
    sshd, me, config, monkeypatch
) -> None:
    """Such as that of Ansible, to a node that is loaded by the build of a driver."""
    monkeypatch.setattr(master, "FRESH_S", 0.0)
    monkeypatch.setattr(master, "_ANSWER_S", 0.5)
    assert is_shared(config, me)
    used, served = masters(config), sshd.connections()
    monkeypatch.setattr(Workspace, "lock_holder", lambda _: LockHolder("up", os.getppid(), 0.0))
    for pid in served:
        os.kill(pid, signal.SIGSTOP)
    try:
        with closing(SSHTransport("node", config, user=me, stays=True)) as node:
            assert node.run(["echo", "there"]).stdout == "there\n"
    finally:
        for pid in served:
            os.kill(pid, signal.SIGCONT)
    assert masters(config) == used


def test_connection_that_dies_under_a_verb_is_replaced(sshd, me) -> None:
    config = sshd.config(alive_s=2)
    with closing(SSHTransport("node", config, user=me)) as node:
        node.run(["true"])
        for pid in (served := sshd.connections()):
            os.kill(pid, signal.SIGSTOP)
        # ssh notices that the host does not answer before it sends the command, and connects again.
        assert node.run(["echo", "there"]).stdout == "there\n"
        for pid in served:
            os.kill(pid, signal.SIGKILL)
        assert node.run(["echo", "again"]).stdout == "again\n"
        assert_has_one_connection(sshd, config)


def test_more_commands_than_sessions_connect_by_themselves(sshd, me, config) -> None:
    with closing(SSHTransport("node", config, user=me)) as node:
        streams = [
            node.stream(["sh", "-c", "echo $$; sleep 600"]) for _ in range(12)
        ]  # sshd's MaxSessions: 10
        assert all(int(next(stream)) for stream in streams)
        assert len(sshd.connections()) == 3
        for stream in streams:
            stream.close()


def test_end_all_leaves_neither_process_nor_socket(sshd, me, config) -> None:
    assert is_shared(config, me)
    own = SSHTransport("node", config, user=me)
    own.run(["true"])
    pids = masters(config)
    assert len(pids) == len(sockets(config)) == 1
    end_all_connections(config)
    own.close()
    assert all(map(ends_within_a_minute, [*pids, *sshd.connections()]))
    assert not folder_of(config).exists()
    end_all_connections(config)


def test_idle_connection_ends_by_itself(me, config) -> None:
    config.write_text(config.read_text().replace(f"Persist {IDLE_S}", "Persist 1"))
    with closing(SSHTransport("node", config, user=me, stays=True)) as node:
        # A slow machine may not see the connection in its second; other tests show that there is
        # one.
        node.run(["true"])
    eventually(lambda: not masters(config))
    assert sockets(config) == []


def test_connection_of_an_older_ssh_config_is_not_used(sshd, me, config) -> None:
    assert is_shared(config, me)
    sshd.config(known=KNOWN, where=config.parent)
    with (
        closing(SSHTransport("node", config, user=me, stays=True)) as node,
        pytest.raises(HostKeyError),
    ):
        node.run(["true"])


def test_write_ssh_files_without_a_change_keeps_the_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    host = host_of("ctl", CONTROLLER)

    def written(host: Host) -> tuple[int, int]:
        write_ssh_files(inventory_of(hosts=(host,)), workspace)
        found = workspace.ssh_config.stat()
        return found.st_ino, found.st_mtime_ns

    first = written(host)
    assert written(host) == first
    other_key = replace(host, host_key="ssh-ed25519 BBBB")
    renamed = replace(host, user="else")
    assert len({first, written(other_key), written(renamed)}) == 3


def test_copied_workspace_gets_the_login_and_paths_of_its_user(tmp_path: Path) -> None:
    """A second administrator of own machines has a copy, which their `up` writes anew."""
    mine, theirs = Workspace(tmp_path / "mine"), Workspace(tmp_path / "theirs")
    mine.create()
    host = host_of("ctl", CONTROLLER, user="ada", key_file=str(mine.root / "id"))
    write_ssh_files(inventory_of(provider="onprem", hosts=(host,)), mine)
    shutil.copytree(mine.root, theirs.root)
    own = replace(host, user="bob", key_file="")
    write_ssh_files(inventory_of(provider="onprem", hosts=(own,)), theirs)
    found = settings_of(theirs.ssh_config, "ctl")
    assert found["user"] == "bob"
    assert str(mine.root) not in theirs.ssh_config.read_text()
    assert "sntrup" not in found["kexalgorithms"]  # slow


@pytest.mark.parametrize(("setting", "idle_s"), [("auto_down: 1h", 10), ("zone: z", 300)])
def test_connection_ends_soon_if_the_cluster_removes_itself(
    tmp_path: Path, setting: str, idle_s: int
) -> None:
    """An open connection would keep an idle cluster from removing itself."""
    workspace = Workspace(tmp_path)
    workspace.spec.write_text(f"provider: {{type: gcp, {setting}}}\n")
    write_ssh_files(inventory_of(hosts=(host_of("ctl", CONTROLLER), host_of("n1"))), workspace)
    assert settings_of(workspace.ssh_config, "ctl")["controlpersist"] == str(idle_s)
    # On a node, a user who is logged in would keep what a job has left in its memory.
    assert settings_of(workspace.ssh_config, "n1")["controlpersist"] == "3"
    workspace.connections.rmdir()


def settings_of(config: Path, host: str) -> dict[str, str]:
    words = ["ssh", "-F", str(config), "-G", host]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return dict(line.partition(" ")[::2] for line in shown.splitlines())


def test_plain_ssh_shares_only_by_a_private_folder(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    hosts = (host_of("ctl", CONTROLLER), host_of("train-1", jump="ctl"))
    write_ssh_files(inventory_of(hosts=hosts), workspace)
    found = settings_of(workspace.ssh_config, "train-1")
    path = Path(found["controlpath"])
    assert path == socket_of(workspace.ssh_config, "train-1", None)
    assert path.parent == workspace.connections
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    assert "controlpath" not in settings_of(workspace.ssh_config, "train-1")
    path.parent.unlink()
    if os.geteuid() == 0:
        path.parent.mkdir()
        os.chown(path.parent, OTHER_USER, OTHER_USER)
        assert "controlpath" not in settings_of(workspace.ssh_config, "train-1")
        path.parent.rmdir()


def test_socket_is_private_to_its_user(sshd, me, config) -> None:
    assert is_shared(config, me)
    (socket,) = sockets(config)
    assert [oct(path.stat().st_mode & 0o777) for path in (socket.parent, socket)] == [
        "0o700",
        "0o600",
    ]
    if os.geteuid() == 0:  # who may become another user, whom we give a way to the folder
        for folder in (*config.parents, socket.parent):
            folder.chmod(folder.stat().st_mode | 0o111)
        if (child := os.fork()) == 0:
            os.chdir(socket.parent)
            os.setuid(OTHER_USER)
            try:
                connect(AF_UNIX).connect(socket.name)
            except PermissionError:
                os._exit(13)
            os._exit(0)
        socket.parent.chmod(0o700)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13


@pytest.mark.parametrize("mode", [0o770, 0o705, None])
def test_socket_folder_that_is_not_private_is_not_used(
    me, config, tmp_path, mode: int | None
) -> None:
    folder = folder_of(config)
    if mode is None:
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(mode)
    try:
        assert_is_not_shared(config, me)
    finally:
        folder.rmdir() if mode else folder.unlink()


def test_workspace_path_longer_than_a_socket_path_works(sshd, me, tmp_path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    config = sshd.config(where=folder)
    assert is_shared(config, me)
    assert is_shared(config, me)
    assert_has_one_connection(sshd, config)
    end_all_connections(config)


def test_connections_leave_all_hosts_connected(sshd, me, config) -> None:
    with Connections(config) as connections:
        node = connections.to("node", me)
        node.run(["true"])
    assert_has_one_connection(sshd, config)
    node.run(["true"])
    node.close()
    eventually(lambda: not masters(config))


def test_many_first_commands_at_once_share_a_connection(sshd, me, config) -> None:
    """ssh alone would open a connection for each, which a jump host may refuse (MaxStartups)."""
    with Connections(config) as connections, ThreadPoolExecutor(12) as pool:
        node = connections.to("node", me)
        answers = pool.map(lambda n: node.run(["echo", str(n)]).stdout, range(12))
        assert [*answers] == [f"{n}\n" for n in range(12)]
    assert_has_one_connection(sshd, config)


def test_ssh_that_does_not_answer_is_replaced(sshd, me, config, monkeypatch) -> None:
    """Plain ssh would wait for it without end, since ConnectTimeout does not count there."""
    for name, value in (("FRESH_S", 0.0), ("_ANSWER_S", 0.5), ("_EXIT_S", 0.5)):
        monkeypatch.setattr(master, name, value)
    assert is_shared(config, me)
    (hung,) = masters(config)
    os.kill(hung, signal.SIGSTOP)
    try:
        run_echo(config, me)
        assert len(sshd.connections()) == 2
    finally:
        os.kill(hung, signal.SIGKILL)
    assert ends_within_a_minute(hung)
    assert_has_one_connection(sshd, config)


LOGIN_SHELLS = {
    "noisy": 'echo hello; printf "\\036clusterctl"; echo >&2 there',
    "csh": "case $2 in *'\n'*|*'!'*) echo 'Unmatched.'; exit 1;; esac",
}


@pytest.mark.parametrize("kind", LOGIN_SHELLS)
def test_run_any_login_shell_output_of_the_shell_is_dropped(sshd, me, config, kind) -> None:
    shell = sshd.folder / kind
    # A forced command replaces the account's login shell, which a test can't change.
    shell.write_text(
        f'#!/bin/bash\nset -- -c "$SSH_ORIGINAL_COMMAND"\n{LOGIN_SHELLS[kind]}\nexec sh "$@"\n'
    )
    shell.chmod(0o755)
    keys = sshd.folder / "authorized_keys"
    keys.write_text(f'command="{shell}" {keys.read_text()}')
    with closing(SSHTransport("node", config, user=me)) as node:
        assert node.run(["printf", "%s", "a\n!b'c"]).stdout == "a\n!b'c"
        assert node.run(["cat"], stdin=b"given").stdout == "given"
        assert b"".join(node.stream(["echo", "hi"])) == b"hi\n"
        with node.converse(["cat"]) as talk:
            talk.send(b"there")
            assert talk.receive() == b"there"
            talk.finish()


@pytest.mark.parametrize(
    ("line", "rc"), [("echo not available; exit 1", 1), ("yes", None), ("exit 0", None)]
)
def test_login_shell_that_runs_no_command_is_an_error(
    sshd, me, config, line: str, rc: int | None
) -> None:
    keys = sshd.folder / "authorized_keys"
    keys.write_text(f'command="{line}" {keys.read_text()}')
    with (
        closing(SSHTransport("node", config, user=me)) as node,
        pytest.raises(TransportError) as caught,
    ):
        node.run(["true"], check=False)
    assert getattr(caught.value, "rc", None) == rc


def test_wrap_command_does_not_run_a_truncated_script(tmp_path) -> None:
    line, script = wrap_command(["touch", str(tmp_path / "a"), str(tmp_path / "b")])
    for size in range(len(script)):
        subprocess.run(
            ["sh", "-c", line], input=script[:size], stderr=subprocess.DEVNULL, check=False
        )
    assert not list(tmp_path.iterdir())
    subprocess.run(["sh", "-c", line], input=script, check=True)
    assert len(list(tmp_path.iterdir())) == 2


def shown_to_others() -> str:
    """Return the command lines of all processes of this machine, as any user can read them."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines.append(
                (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["program", "script"])
def test_process_list_shows_no_argument_of_a_command(me, config, tmp_path, kind: str) -> None:
    """The check covers the host and the local machine."""
    (secret := tmp_path / "hunter2").write_text("here\n")
    argv, own = {
        "program": (
            remote_argv("clusterctl.transport.remote_content", str(secret)),
            "python3 -IS -c",
        ),
        "script": (["sh", "-c", 'echo "$1"; read -r _', "sh", str(secret)], "printf"),
    }[kind]
    with closing(SSHTransport("node", config, user=me)) as node, node.converse(argv) as talk:
        assert talk.receive()
        seen = shown_to_others()
    assert own in seen
    assert secret.name not in seen


def test_command_longer_than_a_command_line_runs(me, config) -> None:
    words = [str(number) * 1000 for number in range(300)]
    with closing(SSHTransport("node", config, user=me)) as node:
        assert node.run(["printf", "%s\n", *words]).stdout.split() == words


BEGUN = ["sh", "-c", 'echo begun >>"$1"; cat', "sh"]


def test_converse_takes_the_command_started_by_begin(me, config, tmp_path) -> None:
    log = tmp_path / "log"
    with closing(SSHTransport("node", config, user=me)) as node:
        node.run(["true"])
        node.begin([*BEGUN, str(log)])
        with node.converse(["cat"]) as other, node.converse([*BEGUN, str(log)]) as talk:
            other.finish()
            talk.send(b"there")
            talk.finish()
        assert log.read_text() == "begun\n"
        with node.converse([*BEGUN, str(log)]) as again:
            again.finish()
        assert log.read_text() == "begun\n" * 2


def test_begin_without_a_connection_starts_nothing(me, config, tmp_path) -> None:
    with closing(SSHTransport("node", config, user=me)) as node:
        node.begin([*BEGUN, str(tmp_path / "log")])
        assert not masters(config)
        assert node.run(["echo", "there"]).stdout == "there\n"
    assert not (tmp_path / "log").exists()


def test_converse_restarts_a_begun_command_that_was_lost(me, config, tmp_path) -> None:
    log = tmp_path / "log"
    with closing(SSHTransport("node", config, user=me)) as node:
        node.run(["true"])
        node.begin([*BEGUN, str(log)])
        # Only now does the command's ssh use the shared connection, which it outlives by a moment.
        eventually(log.exists)
        end_all_connections(config)
        eventually(lambda: not masters(config))
        with node.converse([*BEGUN, str(log)]) as talk:
            talk.send(b"there")
            assert talk.receive() == b"there"
            talk.finish()


def test_close_ends_a_begun_command_that_was_not_used(me, config, tmp_path) -> None:
    note = tmp_path / "pid"
    with closing(SSHTransport("node", config, user=me)) as node:
        node.run(["true"])
        node.begin(["sh", "-c", 'echo $$ >"$1.new"; mv "$1.new" "$1"; exec cat', "sh", str(note)])
        eventually(note.exists)
    assert ends_within_a_minute(int(note.read_text()))


@contextmanager
def frozen(sshd):
    """Stop the processes that serve connections; the kernel still acknowledges their packets."""
    pids = sshd.connections()
    pids += [child for pid in pids for child in children(pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def impatient(sshd, me, reach) -> Transport:
    """A node whose silence ssh soon notices."""
    return reach("node", sshd.config(alive_s=2), user=me)


def test_frozen_host_ends_a_stream(sshd, impatient):
    node = impatient
    stream = node.stream(["sh", "-c", "echo begun; sleep 600"])
    assert next(stream) == b"begun\n"
    with frozen(sshd), refused("unreachable", UnreachableError) as caught:
        next(stream)
    assert caught.value.retryable
    assert node.run(["echo", "again"]).stdout == "again\n"


def test_frozen_host_ends_a_conversation(sshd, impatient):
    with impatient.converse(["cat"]) as talk:
        talk.send(b"hello")
        assert talk.receive() == b"hello"
        with frozen(sshd), pytest.raises(UnreachableError):
            talk.send(bytes(64 << 20))  # more than anything on the way takes up
