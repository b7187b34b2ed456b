"""Public and private keys of people, as ssh-keygen makes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterctl.spec.load import dump_spec, load_spec, parse_spec
from tests.unit.spec.test_spec_public_keys import HEAD, packed, refusal, spec_of

# The generator of NIST's P-256.
POINT = bytes.fromhex(
    "046b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296"
    "4fe342e2fe1a7f9b8ee7eb4a7c0f9e162bce33576b315ececbb6406837bf51f5"
)


SECURITY_KEYS = {
    "sk-ssh-ed25519@openssh.com": (b"k" * 32, b"ssh:"),
    "sk-ecdsa-sha2-nistp256@openssh.com": (b"nistp256", POINT, b"ssh:"),
}


def generate_key(folder: Path, *kind: str) -> str:
    """Make a key pair with ssh-keygen, and return the public key with its comment."""
    argv = ["ssh-keygen", "-q", "-t", *kind, "-N", "", "-C", "ada@laptop", "-f", folder / "id"]
    subprocess.run(argv, check=True)
    return (folder / "id.pub").read_text().strip()


@pytest.mark.parametrize(
    "kind", ["ed25519", "rsa -b 2048", "ecdsa -b 256", "ecdsa -b 384", "ecdsa -b 521"]
)
def test_public_key_is_read_from_text_and_file(tmp_path: Path, kind: str) -> None:
    key = generate_key(tmp_path, *kind.split())
    (tmp_path / "cluster.yaml").write_text(f"{HEAD}    ssh_keys: [id.pub]\n")
    loaded = load_spec(tmp_path / "cluster.yaml")
    assert loaded.users == spec_of(key).users
    assert loaded.users[0].ssh_keys == (key,)
    # The file of the key may be gone by then.
    assert parse_spec(dump_spec(loaded), "spec.yaml") == loaded


@pytest.mark.parametrize("kind", SECURITY_KEYS)
def test_security_keys_are_accepted(tmp_path: Path, kind: str) -> None:
    key = packed(kind, *SECURITY_KEYS[kind])
    (tmp_path / "id.pub").write_text(key)
    subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "id.pub"], check=True, capture_output=True)
    assert spec_of(key).users[0].ssh_keys == (key,)


@pytest.mark.parametrize("form", ["file", "text", "PuTTY"])
def test_private_key_is_refused_and_not_shown(tmp_path: Path, form: str) -> None:
    generate_key(tmp_path, "ed25519")
    secret = (tmp_path / "id").read_text()
    entries = {"file": "id", "text": f"{secret!r}".replace("'", '"'), "PuTTY": "id.ppk"}
    (tmp_path / "id.ppk").write_text("PuTTY-User-Key-File-3: ssh-ed25519\n")
    error = refusal(tmp_path, entries[form])
    assert [problem.code for problem in error.problems] == ["private-key"]
    assert not any(line in str(error) for line in secret.splitlines()[1:-1])
