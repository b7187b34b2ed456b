"""Tests of time limits: commands time out, and abandoned commands end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from clusterctl.errors import NoAnswerError
from clusterctl.transport.base import BOOT, Transport
from clusterctl.transport.master import end_all_connections
from clusterctl.transport.ssh import SSHTransport
from tests.support.messages import refused
from tests.support.processes import ends_within_a_minute, recorded_pid

# A busy clusterctl program that prints nothing.
BUSY = """
import os, time
def main():
    print(os.getpid(), flush=True)
    time.sleep(1000)
"""
PROGRAM = ["python3", "-c", BOOT, json.dumps([["busy", BUSY]]), "[]"]


@pytest.fixture
def impatient(sshd, me: str) -> Iterator[Transport]:
    config = sshd.config()
    ssh = SSHTransport("node", config, user=me, silence_s=0.2)
    yield ssh
    ssh.close()
    end_all_connections(config)


def test_stream_without_output_times_out_and_ends(impatient):
    stream = impatient.stream(["sh", "-c", "echo $$ >&2; sleep 1000"])
    with refused("unreachable", NoAnswerError, "0.2"):
        list(stream)


def test_conversation_without_an_answer_times_out(impatient):
    with impatient.converse(["cat"]) as talk, pytest.raises(NoAnswerError) as caught:
        talk.receive()
    assert "`cat`" in caught.value.what
    assert "~/.bashrc" in caught.value.fix


def test_conversation_with_a_command_that_stops_reading_times_out(impatient):
    with impatient.converse(PROGRAM) as talk, pytest.raises(NoAnswerError):
        talk.send(bytes(16 << 20))


def test_conversation_may_have_a_longer_timeout(impatient):
    with impatient.converse(["sh", "-c", "sleep 0.5; echo done"], silence_s=60) as talk:
        assert talk.receive() == b"done\n"
        talk.finish()


def test_run_ends_the_command_at_its_timeout(impatient, tmp_path):
    argv = ["sh", "-c", 'echo $$ >"$1"; exec sleep 1000', "sh", str(tmp_path / "pid")]

    def attempt(timeout_s: float) -> None:
        with pytest.raises(NoAnswerError):
            impatient.run(argv, timeout_s=timeout_s)

    impatient.run(["true"])  # connected
    assert ends_within_a_minute(recorded_pid(tmp_path / "pid", attempt))


CLIENT = """
import json, sys, time
from pathlib import Path
from clusterctl.transport.ssh import Connections
how, config, user, argv, stays = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), sys.argv[5]
node = Connections(Path(config), stays=stays).to("node", user)
if how == "run":
    node.run(argv, timeout_s=1000)
elif how == "stream":
    for said in node.stream(argv):
        pass
else:
    with node.converse(argv) as talk:
        while talk.receive():
            pass
"""


@pytest.mark.parametrize("stays", ["node", "none"])
def test_remote_command_ends_when_clusterctl_is_killed(sshd, me, tmp_path, stays):
    clients = {}
    config = sshd.config()
    for how in ("run", "stream", "talk"):
        for program in (PROGRAM, ["cat"] if how == "talk" else ["sleep", "1000"]):
            pid_file = tmp_path / f"{how}-{program[0]}"
            argv = [
                "sh",
                "-c",
                f'echo $$ >{pid_file}.new; mv {pid_file}.new {pid_file}; exec "$@"',
                "sh",
                *program,
            ]
            words = [sys.executable, "-c", CLIENT, how, str(config), me, json.dumps(argv), stays]
            clients[pid_file] = subprocess.Popen(words)
    for pid_file, client in clients.items():
        while not pid_file.exists():
            assert client.poll() is None
            time.sleep(0.05)
    for client in clients.values():
        client.kill()
        client.wait()
    pids = {pid_file.name: int(pid_file.read_text()) for pid_file in clients}
    assert [name for name, pid in pids.items() if not ends_within_a_minute(pid)] == []
    end_all_connections(config)


def test_remote_program_ends_when_its_output_is_closed():
    reading, writing = os.pipe()
    process = subprocess.Popen(PROGRAM, stdout=writing)
    os.close(writing)
    assert os.read(reading, 100)
    os.close(reading)
    process.wait(60)
