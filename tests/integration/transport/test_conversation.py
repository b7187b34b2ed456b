"""Tests of conversations with a command on a host."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from clusterctl.cli import access
from clusterctl.cli.output import Screen
from clusterctl.errors import CommandError, UnreachableError
from clusterctl.state.chosen import ChosenCluster
from clusterctl.transport.base import Transport
from clusterctl.transport.paramiko_ssh import ParamikoTransport
from clusterctl.transport.ssh import SSHTransport
from tests.support.processes import ends_within_a_minute

ECHO = ["sh", "-c", "while read -r line; do echo got $line; done"]

BOTH = pytest.mark.parametrize("transport_class", [SSHTransport, ParamikoTransport])


@pytest.fixture
def transport(sshd, me: str, reach) -> Transport:
    made: Transport = reach("node", sshd.config(), user=me)
    return made


@BOTH
def test_converse_receives_answers_while_it_sends(transport):
    with transport.converse(ECHO) as talk:
        talk.send(b"one\n")
        assert talk.receive() == b"got one\n"
        talk.send(b"two\n")
        assert talk.receive() == b"got two\n"
        talk.finish()


@BOTH
def test_converse_sends_eight_megabytes(transport, tmp_path):
    data = os.urandom(8 << 20)
    with transport.converse(["sh", "-c", 'cat >"$1"', "sh", str(tmp_path / "a b")]) as talk:
        talk.send(data)
        talk.finish()
    assert (tmp_path / "a b").read_bytes() == data


def talk_much(transport: Transport, *argv: str) -> None:
    with transport.converse(argv) as talk:
        for _ in range(32):
            talk.send(bytes(1 << 20))
        talk.finish()


@BOTH
def test_converse_with_a_failing_command_has_exit_code_and_stderr(transport):
    with pytest.raises(CommandError) as caught:
        talk_much(transport, "sh", "-c", "cat >/dev/null; echo no >&2; exit 7")
    assert (caught.value.rc, caught.value.why) == (7, "no")


@BOTH
def test_converse_with_a_command_that_fails_before_reading_has_exit_code_and_stderr(transport):
    with pytest.raises(CommandError) as caught:
        talk_much(transport, "sh", "-c", "echo full >&2; exit 28")
    assert (caught.value.rc, caught.value.why) == (28, "full")


@BOTH
def test_converse_left_early_ends_the_command(transport):
    with transport.converse(["sh", "-c", "echo $$; exec cat"]) as talk:
        pid = int(talk.receive())
    assert ends_within_a_minute(pid)


@BOTH
def test_converse_over_a_lost_connection_is_unreachable(sshd, me, reach):
    transport = reach("node", sshd.config(), user=me)
    children = f"/proc/{sshd.process.pid}/task/{sshd.process.pid}/children"
    with pytest.raises(UnreachableError):
        talk_much(transport, "sh", "-c", f"kill -9 $(cat {children}); exec cat >/dev/null")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["host", "echo a && echo b"], "a\nb\n"),
        (["host", "--", "echo a && echo b"], "a\nb\n"),
        (["host", "--", "echo", "a && b"], "a && b\n"),
        (["host", "echo", "a b", "$(id)"], "a b $(id)\n"),
    ],
)
def test_ssh_gives_one_string_to_the_shell_and_quotes_words(
    sshd, me, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["clusterctl", "ssh", *words])
    workspace = SimpleNamespace(ssh_config=sshd.config())
    monkeypatch.setattr(ChosenCluster, "workspace", lambda _: workspace)
    inventory = SimpleNamespace(hosts=[SimpleNamespace(name="node")], job_user=me)
    monkeypatch.setattr(access, "inventory_of", lambda _: inventory)
    begun: list[list[str]] = []
    monkeypatch.setattr(access, "run_attached", lambda argv: begun.append(argv) or 0)
    command = [word for word in words[1:] if word != "--"]
    assert access.ssh(Screen(json=False, color=False), "node", command) == 0
    (argv,) = begun
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == expected
