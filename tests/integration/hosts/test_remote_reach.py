"""The program that tests the network of a host runs as on a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.hosts import remote_reach
from clusterctl.transport.base import remote_program
from tests.support.served import served
from tests.support.sshd import reserved_port


def test_remote_reach_runs_as_a_single_program() -> None:
    request = {
        "nfs": "127.0.0.1",
        "nfs_port": 1,
        "folders": ["/nowhere"],
        "repositories": False,
        "bundle": "file:///nowhere/Packages",
        "left_out": [],
        "mtu": 0,
    }
    argv = [sys.executable, "-I", "-S", "-", json.dumps(request)]
    program = remote_program("clusterctl.hosts.remote_reach")
    done = subprocess.run(argv, input=program, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["missing"] == ["/nowhere"]
    assert answer["bundle"].startswith("file:///nowhere/Packages: ")
    assert "refused" in answer["nfs"]


@pytest.mark.parametrize(
    ("lost", "loses"), [("nothing", False), ("-M do -s 8972 10.0.0.1", True), ("10.0.0.1", False)]
)
def test_loses_large_packets_needs_small_packets_to_arrive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str, loses: bool
) -> None:
    ping = tmp_path / "ping"
    ping.write_text(f'#!/bin/sh\ncase "$*" in *"{lost}") exit 1 ;; esac\n')
    ping.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert remote_reach.loses_large_packets("10.0.0.1", 9000) == loses


@pytest.mark.skipif(not Path(remote_reach.APT_HELPER[0]).exists(), reason="this machine has no apt")
def test_unreached_by_apt_has_the_message_of_apt() -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}/debian/InRelease"
        assert "refused" in remote_reach.unreached_by_apt(url)


@pytest.mark.parametrize("has_apt", [True, False])
def test_missing_file_of_a_bundle_is_unread_even_if_its_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_apt: bool
) -> None:
    if not has_apt:
        monkeypatch.setattr(remote_reach, "APT_HELPER", (str(tmp_path / "none"),))
    elif not Path(remote_reach.APT_HELPER[0]).exists():
        pytest.skip("this machine has no apt")
    (tmp_path / "Packages").touch()
    with served(tmp_path) as address:
        for place in (tmp_path.as_uri(), address):
            assert remote_reach.unread(f"{place}/Packages") == ""
            assert remote_reach.unread(f"{place}/none") != ""


def test_dnf_program_lists_unreached_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double of dnf fails like librepo. Optional and excluded repositories are not tried."""
    (tmp_path / "dnf.py").write_text(FAKE_DNF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", remote_reach.DNF, "3", "ciq-*", "doca*"],
        capture_output=True,
        text=True,
        check=True,
    )
    monkeypatch.setattr(
        remote_reach, "run", lambda argv, *_: done.stdout if remote_reach.DNF in argv else None
    )
    assert [*remote_reach.unreached_repositories([])] == ["http://a.dev/x/repodata/repomd.xml"]


FAKE_DNF = """
from fnmatch import fnmatch
from types import SimpleNamespace

rpm = SimpleNamespace(detect_releasever=lambda root: "9")


def repo(name, skip=False, **urls):
    where = {"metalink": None, "mirrorlist": None, "baseurl": None, **urls}
    one = SimpleNamespace(name=name, skip_if_unavailable=skip, enabled=True, **where)
    one.disable = lambda: setattr(one, "enabled", False)
    return one


ALL = [
    repo("doca", baseurl=["http://a.dev/doca"]),
    repo("away", baseurl=["http://a.dev/x/"]),
    repo("lacks", baseurl=["http://b.dev/x"]),
    repo("there", metalink="http://there.dev/m"),
    repo("may", skip=True, baseurl=["http://a.dev/y"]),
]


class Substitutions(dict):
    def update_from_etc(self, root):
        pass


class Base:
    conf = SimpleNamespace(read=lambda: None, substitutions=Substitutions())
    repos = SimpleNamespace(
        iter_enabled=lambda: (one for one in ALL if one.enabled),
        get_matching=lambda pattern: [one for one in ALL if fnmatch(one.name, pattern)],
    )

    def read_all_repos(self):
        pass

    def urlopen(self, url, repo):
        assert repo.timeout == 3
        if "a.dev" in url:
            raise OSError("Curl error (7):\\n Couldn't connect")
        if "b.dev" in url:
            raise OSError("Status code: 404 for http://b.dev/x")
"""
