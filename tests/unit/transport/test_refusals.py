"""The errors that ssh's messages about keys and configuration files become."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import KeyRefusedError
from clusterctl.state.workspace import Workspace
from clusterctl.transport.refusals import connection_error, proxy_of
from tests.support.messages import condition

DENIED = "clusterctl@10.1.1.2: Permission denied (publickey)."


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('Load key "/h/demo/id_ed25519": error in libcrypto', "error in libcrypto"),
        ('Load key "/h/demo/id_ed25519": invalid format', "invalid format"),
        (
            "no such identity: /h/demo/id_ed25519: No such file or directory",
            "No such file or directory",
        ),
    ],
)
def test_key_that_ssh_can_not_load_is_named(tmp_path: Path, line: str, reason: str) -> None:
    error = connection_error("demo-ctl", tmp_path / "ssh_config", f"{line}\r\n{DENIED}\r\n", "hpc")
    assert isinstance(error, KeyRefusedError)
    assert (condition(error), error.where, error.why) == (
        "record-damaged/ssh-key",
        "/h/demo/id_ed25519",
        reason,
    )
    assert "clusterctl down --discard" in error.fix


def test_refused_login_of_the_owner_names_the_login(tmp_path: Path) -> None:
    """A key of the owner's that ssh can't read is not the cluster's."""
    workspace = Workspace(tmp_path)
    workspace.access_config.touch()
    workspace.ssh_config.write_text("\nHost head\n    User alice\n")
    said = f'Load key "/h/a/.ssh/old": invalid format\r\n{DENIED}\r\n'
    error = connection_error("head", workspace.ssh_config, said)
    assert condition(error) == "login-refused/key"
    assert "alice" in error.what


@pytest.mark.parametrize(
    ("said", "where", "code"),
    [
        (
            "/h/a/.ssh/config: terminating, 1 bad configuration options",
            "",
            "file-invalid/ssh-config",
        ),
        ("Bad owner or permissions on /h/a/.ssh/config", "", "file-invalid/ssh-config"),
        (
            "{config}: terminating, 1 bad configuration options",
            "{config}",
            "record-damaged/ssh-config",
        ),
    ],
)
def test_mistake_in_an_ssh_config_names_the_file(
    tmp_path: Path, said: str, where: str, code: str
) -> None:
    config = tmp_path / "ssh_config"
    error = connection_error("head", config, said.format(config=config))
    assert (condition(error), error.where) == (
        code,
        where.format(config=config) or "/h/a/.ssh/config",
    )


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\0", b"Host demo-ctl\n    ProxyCommand sh -c 'open\n", b""]
)
def test_damaged_ssh_config_has_no_proxy(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "ssh_config").write_bytes(damage)
    assert proxy_of("demo-ctl", tmp_path / "ssh_config").command == ()
