"""The program that a host runs: what it reaches of its network, by the settings of its package
manager.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.hosts import remote_reach
from clusterctl.transport.base import remote_program


def test_a_service_must_be_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert remote_reach.refused("127.0.0.1", taken) == ""
    assert "refused" in remote_reach.refused("127.0.0.1", taken)
    assert "can't resolve" in remote_reach.refused("nowhere.invalid", 6817)


def test_the_program_runs_as_it_is_sent() -> None:
    request = {
        "nfs": "127.0.0.1",
        "nfs_port": 1,
        "folders": ["/nowhere"],
        "repositories": False,
        "left_out": [],
        "mtu": 0,
    }
    argv = [sys.executable, "-I", "-S", "-", json.dumps(request)]
    program = remote_program("clusterctl.hosts.remote_reach")
    done = subprocess.run(argv, input=program, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["missing"] == ["/nowhere"]
    assert "refused" in said["nfs"]


@pytest.mark.parametrize(
    ("lost", "loses"), [("nothing", False), ("-M do -s 8972 10.0.0.1", True), ("10.0.0.1", False)]
)
def test_packets_of_the_mtu_are_tried_where_smaller_ones_arrive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str, loses: bool
) -> None:
    ping = tmp_path / "ping"
    ping.write_text(f'#!/bin/sh\ncase "$*" in *"{lost}") exit 1 ;; esac\n')
    ping.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert remote_reach.loses_large_packets("10.0.0.1", 9000) == loses


APT_ERROR = "E: Failed to fetch {}  {}\nE: Download Failed\n"
REFUSED = "Could not connect to a.lan:80 (10.0.0.1). - connect (111: Connection refused)"


@pytest.mark.parametrize(
    ("case"),
    [
        ("http://a.lan/dists/trixie/InRelease", "", {}, ""),
        ("http://a.lan/dists/trixie/InRelease", "", {"http://a.lan": REFUSED}, REFUSED),
        ("http://a.lan/dists/trixie/InRelease", "", {"http://a.lan": "404  Not Found [IP: 10.0.0.1 80]"}, ""),
        ("mirror+file:{list}/dists/x/InRelease", "# ours\n\nhttp://a.lan/d\tpriority:1\n",
         {"http://a.lan/d/dists/x/InRelease": REFUSED}, REFUSED),
        ("mirror+file:{list}/dists/x/InRelease", "http://a.lan/d/\nhttp://b.lan/d\n",
         {"http://a.lan": REFUSED}, ""),
        ("mirror+file:{list}/dists/x/InRelease", "", {}, "its list of mirrors is empty"),
        ("mirror+https://a.lan/mirrors.txt/dists/x/InRelease", "", {"https://a.lan": REFUSED}, REFUSED),
        ("mirror://a.lan/mirrors.txt/dists/x/InRelease", "", {"http://a.lan": REFUSED}, REFUSED),
        ("file:/srv/debian/dists/trixie/InRelease", "", {"file:": REFUSED}, ""),
    ],
)  # fmt: skip
def test_apt_asks_each_mirror_and_one_that_answers_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: tuple[str, str, dict[str, str], str]
) -> None:
    """apt-transport-mirror(1). Debian's images for clouds have
    `mirror+file:///etc/apt/mirrors/debian.list`.
    """
    uri, mirrors, said, why = case
    listed = tmp_path / "debian.list"
    listed.write_text(mirrors)
    uri = uri.format(list=listed)

    def run(argv: Sequence[str], _: float = 0.0, **__: object) -> str | None:
        if argv[0] == "apt-get":
            return f"'{uri}' x 0 \n" if "--print-uris" in argv else None
        return next(
            (APT_ERROR.format(argv[-2], text) for url, text in said.items() if url in argv[-2]), ""
        )

    monkeypatch.setattr(remote_reach, "run", run)
    assert remote_reach.unreached_repositories([]) == ({uri: why} if why else {})


@pytest.mark.skipif(not Path(remote_reach.APT_HELPER[0]).exists(), reason="this machine has no apt")
def test_apt_itself_says_why_it_reaches_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert "refused" in remote_reach.unreached_by_apt(f"http://127.0.0.1:{closed}/debian/InRelease")


@pytest.mark.parametrize("said", [None, "'cdrom://Debian 13/dists/trixie/InRelease' x 0 \n", ""])
def test_sources_that_apt_can_not_read_are_none(
    monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    answers = {"--print-uris": said, "--version": "apt 3.0.3"}
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: answers.get(argv[1]))
    assert remote_reach.unreached_repositories([]) == {"": "apt has no repository on the network"}


@pytest.mark.parametrize("is_sudos", [True, False])
def test_package_manager_runs_with_the_environment_of_sudo(
    monkeypatch: pytest.MonkeyPatch, *, is_sudos: bool
) -> None:
    """sshd's PAM reads /etc/environment; sudo's does on Rocky Linux and Ubuntu, not on Debian 12
    and 13.
    """
    monkeypatch.setattr(
        os, "environ", {"PATH": os.environ["PATH"], **({"SUDO_UID": "1"} if is_sudos else {})}
    )
    monkeypatch.setattr(remote_reach.shutil, "which", lambda _: "/usr/bin/sudo")
    ran: list[Sequence[str]] = []
    monkeypatch.setattr(remote_reach, "run", lambda argv, *_, **__: ran.append(argv))
    remote_reach.unreached_repositories([])
    assert {"sudo" in argv for argv in ran if "-c" in argv} == {not is_sudos}


def test_dnf_says_which_repositories_it_does_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dnf that fails as librepo does; those that may be missing and those left out are not
    asked for.
    """
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
