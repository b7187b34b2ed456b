"""Which host keys count as known: those of the user's own ssh, however its file is written."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.providers.base import OfferedKey
from clusterctl.providers.onprem.access import HostKeys, access_config
from clusterctl.spec.hosts import OnpremHost

ADDRESS = "192.0.2.1"  # of nobody, by RFC 5737: who asks there finds out by waiting


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The known_hosts of a user who has none yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    return tmp_path / ".ssh/known_hosts"


def confirm(offered: Sequence[OfferedKey]) -> None:
    raise AssertionError(f"nobody is to be asked about {offered}")


@pytest.mark.parametrize("port", [22, 2222])
def test_a_key_in_a_hashed_file_is_known(known: Path, tmp_path: Path, port: int) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    key = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    known.write_text(f"{ADDRESS if port == 22 else f'[{ADDRESS}]:{port}'} {key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert ADDRESS not in known.read_text()
    keys = HostKeys(tmp_path / "kept", tmp_path / "ssh_config")
    assert keys.trust({"node": OnpremHost(address=ADDRESS, port=port)}, confirm) == {}
    assert keys.key_of("node") == key


def test_a_name_that_this_machine_does_not_know_is_no_dead_machine(known: Path, tmp_path: Path) -> None:
    machines = {"node": OnpremHost(address="no-such.invalid")}  # RFC 6761: nobody's
    (tmp_path / "ssh_config").write_text(access_config(machines, tmp_path / "kept"))
    lost = HostKeys(tmp_path / "kept", tmp_path / "ssh_config").trust(machines, confirm)
    (failure,) = lost["node"].failures
    assert "name no-such.invalid" in failure.cause
    assert "address:" in failure.fix
    assert "switched on" not in str(lost["node"])
    assert not known.exists()
