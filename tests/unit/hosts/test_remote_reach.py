"""The program on a host that tests which repositories and ports the host reaches."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clusterctl.hosts import remote_reach

Run = Callable[[Sequence[str]], str | None]
Programs = Callable[[Run], None]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Answer for the programs that the probe starts. None: the program fails."""
    return lambda run: monkeypatch.setattr(remote_reach, "run", lambda argv, *_, **__: run(argv))


def test_port_without_a_listener_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert remote_reach.refused("127.0.0.1", taken) == ""
    assert "refused" in remote_reach.refused("127.0.0.1", taken)
    assert "can't resolve" in remote_reach.refused("nowhere.invalid", 6817)


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
def test_apt_repository_is_reached_if_one_mirror_answers(
    programs: Programs, tmp_path: Path, case: tuple[str, str, dict[str, str], str]
) -> None:
    """apt-transport-mirror(1). Debian's images for clouds have
    `mirror+file:///etc/apt/mirrors/debian.list`.
    """
    uri, mirrors, errors, why = case
    listed = tmp_path / "debian.list"
    listed.write_text(mirrors)
    uri = uri.format(list=listed)

    def run(argv: Sequence[str]) -> str | None:
        if argv[0] == "apt-get":
            return f"'{uri}' x 0 \n" if "--print-uris" in argv else None
        return next(
            (APT_ERROR.format(argv[-2], text) for url, text in errors.items() if url in argv[-2]),
            "",
        )

    programs(run)
    assert remote_reach.unreached_repositories([]) == ({uri: why} if why else {})


@pytest.mark.parametrize("listed", [None, "'cdrom://Debian 13/dists/trixie/InRelease' x 0 \n", ""])
def test_unreadable_apt_sources_are_no_repository(programs: Programs, listed: str | None) -> None:
    answers = {"--print-uris": listed, "--version": "apt 3.0.3"}
    programs(lambda argv: answers.get(argv[1]))
    assert remote_reach.unreached_repositories([]) == {"": "apt has no repository on the network"}


@pytest.mark.parametrize("has_sudo_environment", [True, False])
def test_package_manager_runs_with_the_environment_of_sudo(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, *, has_sudo_environment: bool
) -> None:
    """sshd's PAM reads /etc/environment; sudo's does on Rocky Linux and Ubuntu, not on Debian 12
    and 13.
    """
    monkeypatch.setattr(
        os,
        "environ",
        {"PATH": os.environ["PATH"], **({"SUDO_UID": "1"} if has_sudo_environment else {})},
    )
    monkeypatch.setattr(remote_reach.shutil, "which", lambda _: "/usr/bin/sudo")
    ran: list[Sequence[str]] = []
    programs(ran.append)
    remote_reach.unreached_repositories([])
    assert {"sudo" in argv for argv in ran if "-c" in argv} == {not has_sudo_environment}
