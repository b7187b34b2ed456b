"""Specs for machines of one's own, before any of them is asked."""

from __future__ import annotations

import pytest

from clusterctl.cli.output import Screen
from clusterctl.cli.prompts import prompts_for
from clusterctl.errors import UsageError
from clusterctl.providers.base import OfferedKey
from tests.support.messages import codes, refused
from tests.support.verbs import Clusterctl

SPEC = """\
version: 1
name: lab
provider:
  type: onprem
  controller: head
  access: {user: rocky, key: /nowhere/key}
  hosts:
    head: 192.0.2.1
    gpu01: {address: 192.0.2.2, key: keys/half}
    gpu02: {address: 192.0.2.3, key: keys/none}
partitions: [{name: train, hosts: "gpu[01-02]"}]
"""


@pytest.mark.parametrize("verb", ["doctor", "plan", "validate --live", "up --yes"])
def test_a_private_key_that_is_not_here_is_named_before_anybody_logs_in(verb: str, cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    (cli.cwd / "keys").mkdir()
    (cli.cwd / "keys/half.pub").touch()  # its other half may be in an agent
    ran = cli("-o", "json", *verb.split(), rc=2)
    assert codes(ran) == ["key-file-missing"]
    for part in ("/nowhere/key", f"{cli.cwd}/keys/none", "(head, gpu02)", "fix: correct `key`"):
        assert part in ran.stderr
    assert "keys/half" not in ran.stderr


def test_keys_are_shown_before_they_are_confirmed_beside_json_too(capsys):
    offered = OfferedKey("n1", "10.0.0.1", "ssh-ed25519 AAAA", "SHA256:abc")
    confirm = prompts_for(Screen(json=True, color=False), ask_password=False).confirm
    with refused("host-keys-unconfirmed", UsageError):
        confirm([offered])
    assert "SHA256:abc" in capsys.readouterr().err
