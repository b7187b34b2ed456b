"""A connection that stays open between verbs: whose it is, when it ends, and what happens without it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR
from socket import socket as connect

import pytest

from clusterctl.errors import HostKeyError
from clusterctl.state.inventory import CONTROLLER, Host
from clusterctl.state.workspace import Workspace
from clusterctl.transport import multiplex
from clusterctl.transport.connections import Connections, PersistentSSH
from clusterctl.transport.multiplex import Master, MayHaveRunError, end_all
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.transport.ssh import SSHTransport
from tests.support.inventories import host_of, inventory_of
from tests.support.processes import gone

KNOWN = "node ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJWsqlyNZ2zBT7lD+gy7dPtK9eE3kTvPhPFBEIgEbeJK\n"
OTHER_USER = 65534
CLIENT = """
import sys
from pathlib import Path
from clusterctl.transport.connections import PersistentSSH
node = PersistentSSH("node", Path(sys.argv[1]), user=sys.argv[2])
print(node.run(["echo", "there"]).stdout, node._own, "paramiko" in sys.modules)
node.close()
"""


@pytest.fixture
def config(sshd) -> Iterator[Path]:
    path = sshd.config()
    yield path
    end_all(path)


def masters(config: Path) -> list[int]:
    """The pids of the ssh that keep connections."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (proc / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"ssh" and os.fsencode(config) in words:
                found.append(int(proc.name))
    return found


def sockets(config: Path) -> list[Path]:
    return list((config.parent / "connections").iterdir())


def is_shared(config: Path, me: str) -> bool:
    """A verb asks for something; whether over the connection that stays."""
    with closing(PersistentSSH("node", config, user=me)) as node:
        assert node.run(["echo", "there"]).stdout == "there\n"
        return node._own is None


@contextmanager
def still(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_much_data_goes_over_the_shared_connection(me, config) -> None:
    with closing(PersistentSSH("node", config, user=me)) as node:
        with node.converse(["wc", "-c"], bulk=True) as talk:
            talk.send(bytes(8 << 20))
            talk.finish()
        assert node._own is None


def test_verbs_one_after_the_other_share_a_connection(sshd, me, config) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, config, me],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        # What reads our output would wait for its end, if ssh held that open.
        assert done.stdout == "there\n None False\n", done.stderr
    assert len(sshd.connections()) == len(masters(config)) == 1
    assert os.getsid(masters(config)[0]) != os.getsid(0)  # Ctrl-C is not for it


def test_verbs_at_once_share_a_connection(sshd, me, config) -> None:
    words = [sys.executable, "-c", CLIENT, config, me]
    verbs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert {verb.communicate(timeout=60)[0] for verb in verbs} == {"there\n None False\n"}
    assert len(sshd.connections()) == len(masters(config)) == len(sockets(config)) == 1


def test_a_killed_one_leaves_its_socket_and_the_next_verb_makes_another(sshd, me, config) -> None:
    assert is_shared(config, me)
    (killed,), (socket,) = masters(config), sockets(config)
    os.kill(killed, signal.SIGKILL)
    assert gone(killed)
    assert socket.is_socket()
    assert is_shared(config, me)
    assert killed not in masters(config)
    assert len(masters(config)) == len(sshd.connections()) == 1


def test_one_that_stands_still_is_replaced(sshd, me, config, monkeypatch) -> None:
    monkeypatch.setattr(multiplex, "_GREETING_S", 0.5)
    assert is_shared(config, me)
    with still(masters(config)):
        assert is_shared(config, me)
        assert len(masters(config)) == 2
    assert is_shared(config, me)


def test_a_host_that_is_silent_is_asked_anew(sshd, me, config, monkeypatch) -> None:
    """The command is run once: what the silent connection was asked for is never sent."""
    note = config.with_name("note")
    assert is_shared(config, me)
    (master,), served = masters(config), sshd.connections()
    monkeypatch.setattr(multiplex, "_OPENING_S", 0.5)
    for pid in served:
        os.kill(pid, signal.SIGSTOP)
    with closing(PersistentSSH("node", config, user=me)) as node:
        node.run(["sh", "-c", 'echo once >>"$1"', "sh", str(note)])
        assert node._own is not None
    assert gone(master)  # so that the next verb does not wait for it, too
    for pid in served:
        os.kill(pid, signal.SIGCONT)
        assert gone(pid)
    assert note.read_text() == "once\n"
    assert is_shared(config, me)


def test_where_a_host_takes_no_more_sessions_we_connect_by_ourselves(sshd, me, config) -> None:
    assert is_shared(config, me)
    with closing(PersistentSSH("node", config, user=me)) as node:
        streams = [node.stream(["sh", "-c", "echo $$; sleep 600"]) for _ in range(10)]  # sshd's MaxSessions
        assert all(next(stream) for stream in streams)
        assert node._own is None
        assert node.run(["echo", "eleven"]).stdout == "eleven\n"
        assert node._own is not None
        for stream in streams:
            stream.close()
    assert any(is_shared(config, me) for _ in range(100))  # once the host has ended those
    assert len(masters(config)) == 1


def test_end_all_leaves_neither_process_nor_socket(sshd, me, config) -> None:
    assert is_shared(config, me)
    with closing(PersistentSSH("node", config, user=f"{me}-else")) as refused:
        assert refused._session("true") is None
    (master,) = masters(config)
    end_all(config)
    assert gone(master)
    assert sockets(config) == []
    assert all(map(gone, sshd.connections()))
    end_all(config)


def test_an_idle_one_ends_by_itself(sshd, me, config, monkeypatch) -> None:
    monkeypatch.setattr(multiplex, "IDLE_S", 2)
    master = multiplex.kept(config, "node", me)
    assert master is not None
    (pid,) = masters(config)
    master.close()
    assert gone(pid)
    assert sockets(config) == []


def test_one_of_older_files_is_not_used(sshd, me, config) -> None:
    assert is_shared(config, me)
    sshd.config(known=KNOWN, where=config.parent)
    with closing(PersistentSSH("node", config, user=me)) as node, pytest.raises(HostKeyError):
        node.run(["true"])


def test_ssh_files_stay_until_either_says_something_else(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    host = host_of("ctl", CONTROLLER)

    def written(host: Host) -> tuple[int, int]:
        write_ssh_files(inventory_of(hosts=(host,)), workspace)
        found = workspace.ssh_config.stat()
        return found.st_ino, found.st_mtime_ns

    first = written(host)
    assert written(host) == first
    other_key = host.model_copy(update={"host_key": "ssh-ed25519 BBBB"})
    renamed = host.model_copy(update={"user": "else"})
    assert len({first, written(other_key), written(renamed)}) == 3


def test_where_another_verb_takes_long_to_connect_we_connect_by_ourselves(
    sshd, me, config, monkeypatch
) -> None:
    monkeypatch.setattr(multiplex, "_LOCK_S", 0.1)
    folder = config.parent / "connections"
    folder.mkdir(mode=0o700)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert not is_shared(config, me)
    os.close(held)
    assert is_shared(config, me)


def test_a_cluster_that_ends_when_idle_or_is_being_removed_has_none(sshd, me, config) -> None:
    """Somebody who is connected keeps an idle cluster up."""
    workspace = Workspace(config.parent)
    workspace.spec.write_text("provider: {type: gcp, auto_down: 1h}\n")
    assert not is_shared(config, me)
    workspace.spec.unlink()
    workspace.removing.touch()
    assert not is_shared(config, me)
    assert masters(config) == []
    workspace.removing.unlink()
    assert is_shared(config, me)


@pytest.mark.parametrize("ends", [True, False])
def test_whether_a_command_was_run_is_known_only_once_its_master_has_ended(
    tmp_path, monkeypatch, *, ends: bool
) -> None:
    for limit in ("_OPENING_S", "_GREETING_S"):
        monkeypatch.setattr(multiplex, limit, 0.5)
    hello, served = struct.pack(">III", 8, 1, 4), []

    def serve() -> None:
        for _ in range(3):  # one that watches, the session, and what ends the master
            served.append(server.accept()[0])
            served[-1].sendall(hello)
        for one in served if ends else ():
            one.shutdown(SHUT_RDWR)

    with connect(AF_UNIX) as server:
        server.bind(str(tmp_path / "name"))
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        master = Master(os.open(tmp_path, os.O_RDONLY), "name")
        with pytest.raises(TimeoutError if ends else MayHaveRunError):
            master.session("sbatch")
        master.close()


def test_the_socket_is_for_one_user_alone(sshd, me, config) -> None:
    assert is_shared(config, me)
    (socket,) = sockets(config)
    assert [oct(path.stat().st_mode & 0o777) for path in (socket.parent, socket)] == ["0o700", "0o600"]
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


@pytest.mark.parametrize("mode", [0o770, 0o705])
def test_a_folder_that_others_may_enter_is_not_used(sshd, me, config, mode) -> None:
    (config.parent / "connections").mkdir()
    (config.parent / "connections").chmod(mode)
    assert not is_shared(config, me)
    assert masters(config) == []


def test_a_link_to_a_folder_is_not_used(sshd, me, config, tmp_path) -> None:
    (config.parent / "connections").symlink_to(tmp_path)
    assert not is_shared(config, me)
    assert masters(config) == []


def test_a_path_may_be_longer_than_that_of_a_socket(sshd, me, tmp_path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    config = sshd.config(where=folder)
    assert is_shared(config, me)
    assert is_shared(config, me)
    assert len(sshd.connections()) == 1
    end_all(config)


def test_without_the_ssh_program_we_connect_by_ourselves(sshd, me, config, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not is_shared(config, me)


def test_only_the_host_that_stays_is_left_open(sshd, me, config) -> None:
    with Connections(config, stays="node") as connections:
        kinds = [type(connections.to(host, me)) for host in ("node", "other")]
    assert kinds == [PersistentSSH, SSHTransport]


BEGUN = ["sh", "-c", 'echo begun >>"$1"; cat', "sh"]


def test_what_is_begun_is_the_conversation_that_is_asked_for(me, config, tmp_path) -> None:
    log = tmp_path / "log"
    with closing(PersistentSSH("node", config, user=me)) as node:
        node.run(["true"])
        node.begin([*BEGUN, str(log)])
        assert len(node._begun) == 1
        with node.converse(["cat"]) as other, node.converse([*BEGUN, str(log)]) as talk:
            other.finish()
            talk.send(b"there")
            talk.finish()
        assert log.read_text() == "begun\n"
        with node.converse([*BEGUN, str(log)]) as again:
            again.finish()
        assert log.read_text() == "begun\n" * 2


def test_nothing_is_begun_without_an_open_connection(me, config, tmp_path) -> None:
    with closing(PersistentSSH("node", config, user=me)) as node:
        node.begin([*BEGUN, str(tmp_path / "log")])
        assert not masters(config)
        assert node.run(["echo", "there"]).stdout == "there\n"
        assert node._own is None
    assert not (tmp_path / "log").exists()


def test_what_is_begun_and_lost_is_started_again(me, config, tmp_path) -> None:
    log = tmp_path / "log"
    with closing(PersistentSSH("node", config, user=me)) as node:
        node.run(["true"])
        node.begin([*BEGUN, str(log)])
        end_all(config)
        with node.converse([*BEGUN, str(log)]) as talk:
            talk.send(b"there")
            assert talk.receive() == b"there"
            talk.finish()


def test_what_is_begun_for_nothing_ends_with_us(me, config, tmp_path) -> None:
    ended = tmp_path / "ended"
    with closing(PersistentSSH("node", config, user=me)) as node:
        node.run(["true"])
        os.mkfifo(ended)
        node.begin(["sh", "-c", 'cat >/dev/null; echo ended >"$1"', "sh", str(ended)])
        assert node._begun
    assert ended.read_text() == "ended\n"
