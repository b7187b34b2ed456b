"""The program that a host runs: what it reaches of its network, by the settings of its package manager."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.hosts import remote_reach


def test_a_service_must_be_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert remote_reach.refused("127.0.0.1", taken) == ""
    assert "refused" in remote_reach.refused("127.0.0.1", taken)
    assert "not known" in remote_reach.refused("nowhere.invalid", 6817)


def test_the_program_runs_as_it_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    request = {"ping": "", "mtu": 0, "nfs": "127.0.0.1", "nfs_port": 1,
               "folders": ["/nowhere"], "repositories": False}  # fmt: skip
    monkeypatch.setattr("sys.argv", ["-", json.dumps(request)])
    remote_reach.main()
    said = json.loads(capsys.readouterr().out)
    assert (said["missing"], said["exports"]) == (["/nowhere"], None)
    assert "refused" in said["nfs"]


def test_what_a_server_exports_is_read_of_showmount(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines as nfs-utils 2.8 prints them (utils/showmount/showmount.c)."""
    said = "/srv/a b 10.0.0.0/24,@trusted\n/vol     (everyone)\n"
    argv = ["showmount", "--no-headers", "--exports", "nas"]
    monkeypatch.setattr(remote_reach, "run", lambda asked, _: said if asked == argv else None)
    assert remote_reach.exports("nas") == [["/srv/a b", "10.0.0.0/24", "@trusted"], ["/vol", "(everyone)"]]
    assert remote_reach.exports("other") is None


def test_repositories_are_the_package_managers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "apt-get": "'https://deb.example.org/debian/dists/trixie/InRelease' deb.example.org_x 0 \n",
        "apt-config": 'Acquire::http::Proxy "http://proxy.lan:3128";\n',
    }
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: said.get(argv[0]))
    assert remote_reach.repositories() == [
        [("https://deb.example.org/debian/dists/trixie/InRelease", "http://proxy.lan:3128")]
    ]
    monkeypatch.setattr(remote_reach, "refused", lambda host, port: f"{host} {port}")
    (why,) = remote_reach.unreached_repositories().values()
    assert why == "proxy.lan:3128: proxy.lan 3128"


@pytest.mark.parametrize(
    ("uri", "mirrors", "expected"),
    [
        ("mirror+file:{list}/dists/trixie/InRelease", "https://a.lan/debian\n", {"a.lan:443"}),
        ("mirror+file:{list}/./InRelease", "# ours\n\nhttp://a.lan/debian\tpriority:1\n", {"a.lan:80"}),
        (
            "mirror+file:{list}/dists/x/InRelease",
            "http://a.lan/d\nhttp://b.lan/d\n",
            {"a.lan:80", "b.lan:80"},
        ),
        ("mirror+file:{list}/dists/x/InRelease", "http://a.lan/d\nhttp://there.lan/d\n", None),
        ("mirror+https://a.lan/mirrors.txt/dists/x/InRelease", "", {"a.lan:443"}),
        ("mirror://a.lan/mirrors.txt/dists/x/InRelease", "", {"a.lan:80"}),
        ("file:/srv/debian/dists/trixie/InRelease", "", None),
        ("cdrom://Debian 13/dists/trixie/InRelease", "", {"apt has none on the network"}),
        ("", "", {"apt has none on the network"}),
    ],
)
def test_mirrors_of_a_list_are_asked_and_one_that_answers_is_enough(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str, mirrors: str, expected: set[str] | None
) -> None:
    """apt-transport-mirror(1). Debian's images for clouds have `mirror+file:///etc/apt/mirrors/debian.list`."""
    listed = tmp_path / "debian.list"
    listed.write_text(mirrors)
    said = {"apt-get": f"'{uri.format(list=listed)}' x 0 \n" if uri else "", "apt-config": ""}
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: said.get(argv[0]))
    monkeypatch.setattr(remote_reach, "refused", lambda host, _: "" if host == "there.lan" else "no answer")
    found = remote_reach.unreached_repositories()
    assert len(found) == (expected is not None)
    for why in found.values():
        assert {one.removesuffix(": no answer") for one in why.split("; ")} == expected


def test_sources_that_apt_can_not_read_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {("apt-get", "--version"): "apt 3.0.3"}
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: said.get(tuple(argv)))
    assert remote_reach.unreached_repositories() == {"": "apt has none on the network"}


ENVIRONMENT = {"http_proxy": "http://env.lan:3128", "https_proxy": "env.lan:3129", "no_proxy": "a.org, .lan"}
PROXY = 'Acquire::http::Proxy "http://apt.lan:1";\n'


@pytest.mark.parametrize(
    ("settings", "variables", "url", "proxy"),
    [
        ("", {}, "https://deb.org/x", ""),
        (PROXY, ENVIRONMENT, "http://deb.org/x", "http://apt.lan:1"),
        (PROXY, ENVIRONMENT, "https://deb.org/x", "http://apt.lan:1"),
        (PROXY + 'Acquire::https::Proxy "DIRECT";\n', ENVIRONMENT, "https://deb.org/x", ""),
        (PROXY + 'Acquire::http::Proxy::deb.org "DIRECT";\n', {}, "https://deb.org/x", ""),
        (PROXY + 'Acquire::HTTP::Proxy::other.org "DIRECT";\n', {}, "http://deb.org/x", "http://apt.lan:1"),
        (
            PROXY + 'Acquire::http::Proxy-Auto-Detect "/found";\n',
            {},
            "http://deb.org/x",
            "http://found.lan:8",
        ),
        (PROXY + 'Acquire::http::Proxy-Auto-Detect "/none";\n', {}, "http://deb.org/x", "http://apt.lan:1"),
        ('Acquire::http::ProxyAutoDetect "/direct";\n', ENVIRONMENT, "http://deb.org/x", ""),
        ("", ENVIRONMENT, "http://deb.org/x", "http://env.lan:3128"),
        ("", ENVIRONMENT, "https://deb.org/x", "env.lan:3129"),
        ("", ENVIRONMENT, "http://mirror.lan/x", ""),
        ("", ENVIRONMENT, "http://a.org/x", ""),
        ("", {"http_proxy": "http://env.lan:3128"}, "https://deb.org/x", "http://env.lan:3128"),
        (PROXY, ENVIRONMENT, "http://a.org/x", ""),
    ],
)
def test_apts_repositories_are_asked_by_the_proxy_that_apt_takes(
    monkeypatch: pytest.MonkeyPatch, settings: str, variables: Mapping[str, str], url: str, proxy: str
) -> None:
    """As apt 2.6 itself does: methods/http.cc (Open), apt-pkg/contrib/proxy.cc (AutoDetectProxy)."""
    said = {
        ("apt-get", "--print-uris", "update"): f"'{url}' x 0 \n",
        ("apt-config", "dump"): settings,
        ("runuser", "-u", "_apt", "--", "/found", url): "http://found.lan:8\n",
        ("runuser", "-u", "_apt", "--", "/none", url): "\n",
        ("runuser", "-u", "_apt", "--", "/direct", url): "DIRECT\n",
    }
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: said.get(tuple(argv)))
    monkeypatch.setattr(os, "environ", variables)
    assert remote_reach.repositories() == [[(url, proxy)]]


@pytest.mark.parametrize(
    ("ours", "of_sudo", "proxy"),
    [
        ({"http_proxy": "http://login.lan:1"}, "HOME=/root\n", ""),  # root by SSH on Debian 12 and 13
        ({}, "http_proxy=http://env.lan:1\nno_proxy=lan\n", "http://env.lan:1"),
        ({"http_proxy": "http://login.lan:1"}, None, "http://login.lan:1"),  # there is no sudo
        ({"SUDO_UID": "1000", "http_proxy": "http://env.lan:1"}, "HOME=/root\n", "http://env.lan:1"),
    ],
)
def test_the_proxy_of_the_environment_is_that_of_sudo_as_ansibles_tasks_have_it(
    monkeypatch: pytest.MonkeyPatch, ours: dict[str, str], of_sudo: str | None, proxy: str
) -> None:
    """sshd's PAM reads /etc/environment; sudo's does on Rocky Linux and Ubuntu, not on Debian 12 and 13."""
    said = {"sudo": of_sudo, "apt-get": "'http://deb.org/x' x 0 \n", "apt-config": ""}
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: said.get(argv[0]))
    monkeypatch.setattr(os, "environ", {**ours})
    remote_reach.take_sudos_environment()
    assert remote_reach.repositories() == [[("http://deb.org/x", proxy)]]


def test_dnfs_repositories_are_asked_by_the_proxy_that_dnf_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "https://a.dev/x http://dnf.lan:1\nhttps://b.dev/x -\nhttp://c.lan/x -\n"
    monkeypatch.setattr(remote_reach, "run", lambda argv, _=0.0: said if argv[1:2] == ["-c"] else None)
    monkeypatch.setattr(os, "environ", ENVIRONMENT)
    assert remote_reach.repositories() == [
        [("https://a.dev/x", "http://dnf.lan:1")],
        [("https://b.dev/x", "env.lan:3129")],
        [("http://c.lan/x", "")],
    ]
    monkeypatch.setattr(remote_reach, "refused", lambda *place: str(place))
    assert {why.partition(": ")[0] for why in remote_reach.unreached_repositories().values()} == {
        "c.lan:80",
        "dnf.lan:1",
        "env.lan:3129",
    }
    monkeypatch.setattr(os, "environ", {"all_proxy": "http://all.lan:1", "no_proxy": "c.lan"})
    assert remote_reach.repositories()[1:] == [
        [("https://b.dev/x", "http://all.lan:1")],
        [("http://c.lan/x", "")],
    ]
    monkeypatch.setattr(os, "environ", {"all_proxy": "http://all.lan:1", "no_proxy": "*"})
    assert [proxy for ((_, proxy),) in remote_reach.repositories()] == ["", "", ""]
