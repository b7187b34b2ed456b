"""The local provider says where it can't run before it starts anything."""

import json
import os
import subprocess
import sys

import pytest

from clusterctl.errors import ClusterctlError, DiskError, MachineError, ProvisionError
from clusterctl.providers.local import client
from clusterctl.providers.local.client import converse, elevation
from clusterctl.providers.local.system import run
from tests.support.messages import refused


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_another_system_than_linux_is_refused(platform: str) -> None:
    with refused("needs-linux", MachineError) as caught:
        elevation(platform)
    assert platform in caught.value.where
    assert "Linux machine" in caught.value.fix


def test_a_tool_that_finds_the_disk_full_is_no_matter_of_the_network() -> None:
    with refused("machine-command-failed", ProvisionError) as caught:
        run(
            ["sh", "-c", "echo 'tar: x: No space left on device' >&2; exit 1"], what="making it", fix="mirror"
        )
    assert "make room" in caught.value.fix


@pytest.mark.parametrize("kind", [DiskError, MachineError, ProvisionError])
def test_an_error_of_the_helper_is_the_same_here(kind: type[ClusterctlError]) -> None:
    error = {"kind": kind.__name__, "code": "no-room", "what": "full", "where": "/x", "why": "", "fix": ""}
    helper = ["sh", "-c", 'read request; echo "$0"', json.dumps({"error": error})]
    with subprocess.Popen(helper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with refused("no-room", where="/x") as caught:
            converse(process, {}, print, ready=None)
        assert type(caught.value) is kind


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_helper_is_kept_for_the_next_call_only_while_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    said = json.dumps({"result": {"pid": 0}, "goes_on": goes_on}).replace("0", "$$").replace('"', '\\"')
    monkeypatch.setattr(client, "elevation", lambda _: ["sh", "-c", f'while read it; do echo "{said}"; done'])
    with client.keeping_helper():
        with client.keeping_helper():
            one = client.call("look", {})["pid"]
        other = client.call("look", {})["pid"]
        assert (one == other) is goes_on
    assert client.call("look", {})["pid"] not in (one, other)
    for pid in (one, other):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_that_was_started_ahead_takes_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def elevate(system: str) -> list[str]:
        started.append(system)
        return ["sh", "-c", 'read it; echo \'{"result": {"pid": 0}, "goes_on": false}\'']

    monkeypatch.setattr(client, "elevation", elevate)
    client.start_ahead()
    assert len(started) == 1
    assert client.call("look", {}) == {"pid": 0}
    assert len(started) == 1


def test_the_call_says_why_none_could_be_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> list[str]:
        raise MachineError("no right to start nodes", code="no-right")

    monkeypatch.setattr(client, "elevation", refuse)
    client.start_ahead()
    with refused("no-right"):
        client.call("look", {})
    ends = ["sh", "-c", "echo 'sudo: a password is required' >&2; exit 1"]
    monkeypatch.setattr(client, "elevation", lambda _: ends)
    client.start_ahead()
    client._idle[0].wait()
    with refused("no-right-to-start-nodes", MachineError):
        client.call("look", {})


def test_this_machine_is_taken() -> None:
    assert elevation(sys.platform) in ([], ["sudo", "-n", "--"])
