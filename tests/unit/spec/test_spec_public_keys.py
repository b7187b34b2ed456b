"""The public keys of people in a spec: which are taken, as text or from a file, and which are
refused.
"""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path

import pytest

from clusterctl.errors import SpecError
from clusterctl.spec.load import differences, load_spec, read_name
from clusterctl.spec.models import ClusterSpec
from tests.support.messages import codes_of

HEAD = (
    "version: 1\n"
    "name: demo\n"
    "partitions: [{name: train, nodes: 1}]\n"
    "users:\n"
    "  - name: ada\n"
    "    uid: 2001\n"
)
ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAKEeQlcH+GwmzgE/RlWAKNrD2K+DSBNoCnvcOgaXFev"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIm2Z7vS0S3Gq3Z0b0m7mB4nJrj0v0E2m2u3Zr0vXq5d"


def packed(kind: str, *fields: bytes) -> str:
    """Return a public key with these fields after its kind."""
    raw = b"".join(len(field).to_bytes(4, "big") + field for field in (kind.encode(), *fields))
    return f"{kind} {b64encode(raw).decode()}"


def spec_of(*keys: str) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "demo",
            "partitions": [{"name": "train", "nodes": 1}],
            "users": [{"name": "ada", "uid": 2001, "ssh_keys": keys}],
        }
    )


def refusal(folder: Path, *entries: str) -> SpecError:
    """Load a spec file with these entries, each on a line of its own, and return the error."""
    lines = "".join(f"      - {entry}\n" for entry in entries)
    (folder / "cluster.yaml").write_text(f"{HEAD}    ssh_keys:\n{lines}")
    with pytest.raises(SpecError) as caught:
        load_spec(folder / "cluster.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"  {ED25519}   ada   at home \n", f"{ED25519} ada at home"),
        (f"no-pty\t{ED25519}", f"no-pty {ED25519}"),
        (f'command="a  \\"b\\"",from="10.0.0.0/8,!10.1.0.0/16"  {ED25519}',
         f'command="a  \\"b\\"",from="10.0.0.0/8,!10.1.0.0/16" {ED25519}'),
    ],
)  # fmt: skip
def test_public_key_keeps_all_but_its_spaces(text: str, line: str) -> None:
    assert spec_of(text).users[0].ssh_keys == (line,)


@pytest.mark.parametrize("content", [f"{OTHER}\r\n", f"\ufeff{OTHER}\n", f"# ada\n\n{OTHER}"])
def test_key_file_may_have_crlf_and_comments(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/ada.pub").write_text(content)
    (tmp_path / "cluster.yaml").write_text(f"{HEAD}    ssh_keys: [keys/ada.pub]\n")
    assert load_spec(tmp_path / "cluster.yaml").users[0].ssh_keys == (OTHER,)


def test_read_name_works_with_a_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ada.pub").write_text(OTHER)
    (tmp_path / "cluster.yaml").write_text(f"{HEAD}    ssh_keys: [ada.pub]\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_name(tmp_path / "cluster.yaml") == ("demo", None)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        (ED25519[:-4], "not-a-public-key"),
        (f"{ED25519}AAAA", "not-a-public-key"),
        (ED25519.replace("ssh-ed25519", "ssh-rsa"), "not-a-public-key"),
        ("ssh-ed25519", "not-a-public-key"),
        (f'"{ED25519} \\x1b[31m"', "not-a-public-key"),
        (f'"{ED25519}\\n{OTHER}"', "not-a-public-key"),
        (packed("ssh-ed25519", b"short"), "not-a-public-key"),
        (packed("ssh-dss", b"p", b"q", b"g", b"y"), "not-a-public-key"),
        (packed("ssh-rsa", b"\1\0\1", b"\0" + b"\xff" * 128), "key-too-short"),
        ("missing.pub", "key-file-unreadable"),
        (".", "key-file-unreadable"),
        ("fifo", "key-file-unreadable"),
        ("two.pub", "key-file-unreadable"),
        ("empty.pub", "key-file-unreadable"),
        ("binary.pub", "key-file-unreadable"),
        ("cluster.yaml", "key-file-unreadable"),
        ("notes.pub", "not-a-public-key"),
        ("'shs-ed25519 AAAA'", "key-file-unreadable"),
        ("''", "file-name-missing"),
        ("7", "wrong-type"),
        ("{key: a.pub}", "wrong-type"),
    ],
)
def test_wrong_key_is_refused_at_its_line(tmp_path: Path, entry: str, code: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "two.pub").write_text(f"{ED25519}\n{OTHER}\n")
    (tmp_path / "empty.pub").write_text("# none\n")
    (tmp_path / "binary.pub").write_bytes(b"\xff\xfe\0")
    (tmp_path / "notes.pub").write_text("my secret notes\n")
    (problem,) = refusal(tmp_path, OTHER, entry).problems
    assert (problem.code, problem.line, problem.key) == (code, 9, "users[0].ssh_keys[1]")
    assert "secret" not in problem.message


def test_key_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, OTHER, ED25519, f"no-pty {OTHER} another comment")
    assert codes_of(error) == ["spec-invalid", "value-twice"]
    assert [(problem.code, problem.line) for problem in error.problems] == [("value-twice", 10)]


def test_plan_shows_keys_shortened_but_distinct() -> None:
    before = spec_of(f"{ED25519} ada")
    after = spec_of(f"{OTHER} ada")
    (difference,) = differences(before, after)
    assert difference.key == "users.ada.ssh_keys"
    assert [ED25519[-12:] in difference.what, OTHER[-12:] in difference.what] == [True, True]
    assert len(difference.what) < 120
