"""Our account on a machine: why it can't be used is told as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterctl.errors import ClusterctlError, CommandError, TransportError
from clusterctl.providers.onprem.access import AccessError
from clusterctl.providers.onprem.login import Claim, create_account


class Way:
    """A way in to a machine that answers with an error."""

    def __init__(self, error: ClusterctlError) -> None:
        self._error = error

    def run(self, *_: object, **__: object) -> None:
        raise self._error

    def close(self) -> None:
        """Nothing is open."""


def refusal(error: ClusterctlError) -> AccessError:
    def root(*_: object) -> str:
        return json.dumps({"ok": True, "changed": True, "allowed": ["allowusers rocky"]})

    def login(_: str) -> Any:
        return Way(error)

    with pytest.raises(AccessError) as caught:
        create_account("gpu1", root, Claim("abc", "own", "ssh-ed25519 AAAA"), login)
    return caught.value


def test_sshd_that_does_not_let_it_in_is_told_from_sudo_that_does_not_serve_it() -> None:
    refused = refusal(TransportError("it does not accept our key", host="gpu1"))
    assert refused.code == "login-refused"
    assert "allowusers rocky" in refused.why
    said = "sudo: account validation failure"
    refused = refusal(CommandError("`sudo -n true` failed", rc=1, stderr=said, where="gpu1", host="gpu1"))
    assert refused.code == "no-sudo"
    assert said in refused.why
    assert "sshd" not in refused.why
