"""The host key that a machine offers, read without a login, also behind what the owner's ssh uses."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import ProvisionError
from clusterctl.providers.base import OfferedKey
from clusterctl.providers.onprem.access import HostKeys, access_config
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh import Connections
from tests.integration.transport.conftest import Sshd, running_sshd
from tests.support.messages import codes_of
from tests.support.processes import eventually

Offered = Callable[..., OfferedKey]


@pytest.fixture
def me() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture
def sshd(tmp_path: Path):
    with running_sshd(tmp_path / "sshd") as server:
        yield server


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offered:
    """Return a function that returns the key that a machine offers; own: the owner's ssh_config."""

    def ask(machine: OnpremHost, own: str = "") -> OfferedKey:
        workspace = Workspace(tmp_path / "cluster")
        workspace.root.mkdir(exist_ok=True)
        config = access_config({"gpu1": machine}, workspace, {}, {})
        (tmp_path / "own").write_text(own)
        (tmp_path / "own").chmod(0o600)
        workspace.access_config.write_text(
            config.replace("Include ~/.ssh/config", f'Include "{tmp_path}/own"')
        )
        asked: list[OfferedKey] = []

        def confirm(keys) -> None:
            asked.extend(keys)
            raise ProvisionError("nobody confirms", code="host-key", host="gpu1")

        monkeypatch.setattr("clusterctl.providers.onprem.access.USERS_OWN", ())
        keys = HostKeys(workspace.trusted_hosts, Connections(workspace.access_config))
        failed = keys.trust({"gpu1": machine}, confirm, find_all=True)
        if not asked:
            raise failed["gpu1"]
        assert not workspace.trusted_hosts.read_text()
        (key,) = asked
        return key

    return ask


def machine_of(sshd: Sshd) -> OnpremHost:
    return OnpremHost(address="127.0.0.1", port=sshd.port, user="ada")


def test_key_is_read_without_a_login(sshd, offered: Offered) -> None:
    key = offered(machine_of(sshd))
    assert (key.title, key.key) == ("gpu1", sshd.host_key)
    assert key.address == f"[127.0.0.1]:{sshd.port}"
    eventually(lambda: not sshd.connections())


@pytest.mark.parametrize(
    "way", ["ProxyJump gate", 'ProxyCommand ssh -F "{own}" -W [%h]:%p -- gate']
)
def test_key_is_read_the_way_that_the_owners_configuration_leads(
    sshd, me, tmp_path: Path, offered: Offered, way: str
) -> None:
    """The alias and the port of the gate are only in the owner's configuration."""
    with running_sshd(tmp_path / "gate") as gate:
        known = tmp_path / "gates"
        known.write_text(f"gate {gate.host_key}\n")
        own = (
            f"Host gpu1\n    {way.format(own=tmp_path / 'own')}\n"
            f"Host gate\n    HostName 127.0.0.1\n    Port {gate.port}\n    User {me}\n"
            f"    HostKeyAlias gate\n    UserKnownHostsFile {known}\n"
            f"    IdentityFile {gate.folder}/id\n    IdentitiesOnly yes\n"
        )
        assert offered(machine_of(sshd), own).key == sshd.host_key
        known.write_text("")
        with pytest.raises(ProvisionError) as caught:
            offered(machine_of(sshd), own)
    assert codes_of(caught.value) == ["host-key"]


def test_machine_without_an_answer_is_unreachable(offered: Offered) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ProvisionError) as caught:
            offered(OnpremHost(address="127.0.0.1", port=unused.getsockname()[1], user="ada"))
    assert codes_of(caught.value) == ["unreachable"]
    assert "Connection refused" in str(caught.value)
