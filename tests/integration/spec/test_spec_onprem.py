"""Keys for machines of one's own, as ssh-keygen makes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterctl.spec.hosts import OnpremHost


@pytest.mark.parametrize(
    "kind", ["ed25519", "ecdsa -b 256", "ecdsa -b 384", "ecdsa -b 521", "rsa -b 2048"]
)
def test_host_key_of_ssh_keygen_is_accepted(kind: str, tmp_path: Path) -> None:
    argv = ["ssh-keygen", "-q", "-t", *kind.split(), "-N", "", "-f", tmp_path / "key"]
    subprocess.run(argv, check=True)
    key = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    assert OnpremHost(host_key=key).host_key == key
