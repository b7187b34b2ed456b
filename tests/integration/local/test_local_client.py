"""The client of the helper, and the refusal on machines where no local node can run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from clusterctl.errors import ClusterctlError, DiskError, MachineError, ProvisionError
from clusterctl.providers.local import client
from clusterctl.providers.local.client import Helper, HelperExchange, elevation
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.providers.local.system import run
from clusterctl.spec.load import parse_spec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.workspace import Workspace
from tests.support.messages import condition, refused


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_elevation_refuses_other_systems_than_linux(platform: str) -> None:
    with refused("unsupported/linux", MachineError) as caught:
        elevation(platform)
    assert platform in caught.value.where
    assert "Linux machine" in caught.value.fix


def test_run_full_disk_suggests_freeing_space() -> None:
    with refused("tool-failed/machine", ProvisionError) as caught:
        run(
            ["sh", "-c", "echo 'tar: x: No space left on device' >&2; exit 1"],
            action="making it",
            fix="mirror",
        )
    assert "free disk space" in caught.value.fix


@pytest.mark.parametrize("kind", [DiskError, MachineError, ProvisionError])
def test_error_of_the_helper_keeps_type_and_fields(kind: type[ClusterctlError]) -> None:
    error = {
        "kind": kind.__name__,
        "code": "disk-full/host",
        "what": "full",
        "where": "/x",
        "why": "",
        "fix": "",
    }
    helper = ["sh", "-c", 'read request; echo "$0"', json.dumps({"error": error})]
    with subprocess.Popen(
        helper, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        with refused("disk-full/host", where="/x") as caught:
            exchange = HelperExchange(process, print)
            exchange.send({})
            exchange.result()
        assert type(caught.value) is kind


@pytest.fixture(autouse=True)
def no_idle_helpers() -> Iterator[None]:
    client.end_idle()
    yield
    client.end_idle()


@pytest.mark.parametrize("goes_on", [True, False])
def test_helper_that_stays_serves_the_next_call(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    said = (
        json.dumps({"result": {"pid": 0}, "goes_on": goes_on})
        .replace("0", "$$")
        .replace('"', '\\"')
    )
    monkeypatch.setattr(
        client, "elevation", lambda _: ["sh", "-c", f'while read it; do echo "{said}"; done']
    )
    pids = [Helper().call("look", {})["pid"] for _ in range(2)]
    assert (pids[0] == pids[1]) is goes_on
    client.end_idle()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_reply_is_sent_when_the_helper_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the body raises, the helper loses its caller and ends."""
    replies = (
        'echo \'{"ready": {"a": 1}}\'; read it; echo "{\\"result\\": {\\"got\\": $it}, '
        '\\"goes_on\\": false}"'
    )
    monkeypatch.setattr(client, "elevation", lambda _: ["sh", "-c", f"read it; {replies}"])
    with Helper().asking("bake", {}) as exchange:
        assert exchange.ready() == {"a": 1}
        exchange.send(2)
        assert exchange.result() == {"got": 2}
    with pytest.raises(ZeroDivisionError), Helper().asking("bake", {}) as exchange:
        _ = 1 / 0
    assert exchange.process.returncode is not None


def test_helper_started_ahead_takes_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def elevate(system: str) -> list[str]:
        started.append(system)
        return ["sh", "-c", 'read it; echo \'{"result": {"pid": 0}, "goes_on": false}\'']

    monkeypatch.setattr(client, "elevation", elevate)
    client.start_ahead()
    assert len(started) == 1
    assert Helper().call("look", {}) == {"pid": 0}
    assert len(started) == 1


def test_call_reports_why_the_helper_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> list[str]:
        raise MachineError("no right to start nodes", code="no-right")

    monkeypatch.setattr(client, "elevation", refuse)
    client.start_ahead()
    with refused("no-right"):
        Helper().call("look", {})
    ends = ["sh", "-c", "echo 'sudo: a password is required' >&2; exit 1"]
    monkeypatch.setattr(client, "elevation", lambda _: ends)
    client.start_ahead()
    with refused("sudo/nodes", MachineError):
        Helper().call("look", {})


def test_preflight_names_a_user_who_can_not_become_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan --preflight` said that nothing would stop `up`."""
    provider = LocalProvider(LocalSettings())
    spec = parse_spec("version: 1\nname: d\npartitions: [{name: t, nodes: 1}]\n", "c.yaml")
    ends = ["sh", "-c", "echo 'sudo: a password is required' >&2; exit 1", "sudo"]
    monkeypatch.setattr(client, "elevation", lambda _: ends)
    report = provider.preflight(spec, Workspace.of(spec.name))
    assert report is not None
    (finding,) = report.errors
    assert (condition(finding), finding.why) == (
        "nodes",
        "sudo: a password is required",
    )
    for words in ([], ["env", "--"]):
        monkeypatch.setattr(client, "elevation", lambda _, words=words: words)
        assert provider.preflight(spec, Workspace.of(spec.name)) is None


def test_elevation_on_linux_is_root_or_sudo() -> None:
    assert elevation(sys.platform) in ([], ["sudo", "-n", "--"])
