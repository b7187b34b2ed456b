"""The program that records on a host, as root, to which cluster the host belongs."""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.providers.onprem import remote_claim


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "clusterctl" / "cluster.json"
    monkeypatch.setattr(remote_claim, "CLAIM", file)
    monkeypatch.setattr(remote_claim, "RECORD", tmp_path / "record.json")
    return file


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], do: str, cluster_id: str
) -> dict[str, Any]:
    """Run the program. Return its answer."""
    request = {"do": do, "claim": {"id": cluster_id, "name": "demo"}}
    monkeypatch.setattr(sys, "argv", ["remote_claim.py", json.dumps(request)])
    umask = os.umask(0o077)
    try:
        remote_claim.main()
    finally:
        os.umask(umask)
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_everybody_can_read_the_claim_on_a_host_with_umask_077(
    claim: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Slurm, the folder also has the users' configuration of SSH."""
    assert run(monkeypatch, capsys, "join", "abc") == {"ok": True}
    assert stat.S_IMODE(claim.stat().st_mode) == 0o644
    assert stat.S_IMODE(claim.parent.stat().st_mode) == 0o755
    assert os.listdir(claim.parent) == [claim.name]


def test_host_of_a_cluster_is_refused_to_others_and_stays_as_it_is(
    claim: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, capsys, "join", "abc")
    before = claim.read_bytes()
    remote_claim.RECORD.touch()
    assert run(monkeypatch, capsys, "join", "def")["about"] == "machine"
    assert run(monkeypatch, capsys, "join", "abc") == {"ok": True}
    assert run(monkeypatch, capsys, "leave", "def") == {"ok": True}
    assert claim.read_bytes() == before
    assert remote_claim.RECORD.exists()
    assert run(monkeypatch, capsys, "leave", "abc") == {"ok": True}
    assert not claim.parent.exists()
    assert not remote_claim.RECORD.exists()
    assert run(monkeypatch, capsys, "leave", "abc") == {"ok": True}


def test_host_with_an_empty_claim_is_not_changed(
    claim: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claim.parent.mkdir()
    claim.write_text("")
    for do in ("join", "leave"):
        assert run(monkeypatch, capsys, do, "abc")["about"] == "claim"
    assert claim.read_text() == ""


@pytest.mark.parametrize("known", [True, False])
def test_leave_removes_the_empty_folders_of_ansible_of_root_and_of_the_owner(
    claim: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    *,
    known: bool,
) -> None:
    """With the rights of each, because there may be links. The owner's account may be of a directory
    that is away.
    """
    acted: list[int] = []

    def account(name: str) -> SimpleNamespace:
        if name == "rocky" and not known:
            raise KeyError(name)
        uid = {"root": 0, "rocky": 1000}[name]
        return SimpleNamespace(pw_dir=str(tmp_path / name), pw_uid=uid, pw_gid=uid)

    monkeypatch.setattr(remote_claim.pwd, "getpwnam", account)
    monkeypatch.setattr(remote_claim, "acting_as", lambda uid, _: nullcontext(acted.append(uid)))
    monkeypatch.setenv("SUDO_USER", "rocky")
    for name in ("root", "rocky"):
        (tmp_path / name / ".ansible/tmp").mkdir(parents=True)
    run(monkeypatch, capsys, "join", "abc")
    assert run(monkeypatch, capsys, "leave", "abc") == {"ok": True}
    left = [path.parent.name for path in tmp_path.glob("*/.ansible")]
    assert (left, acted) == (([], [0, 1000]) if known else (["rocky"], [0]))


def test_leave_removes_what_a_killed_ansible_left(tmp_path: Path) -> None:
    folder = tmp_path / ".ansible"
    runner = folder / "tmp/ansible_mitogen_runner_abc"
    runner.mkdir(parents=True)
    (runner / "module.py").touch()
    remote_claim.remove_ansibles_files(folder)
    assert not folder.exists()
    (folder / "tmp").mkdir(parents=True)
    (folder / "galaxy_token").touch()
    remote_claim.remove_ansibles_files(folder)
    assert [path.name for path in folder.iterdir()] == ["galaxy_token"]
