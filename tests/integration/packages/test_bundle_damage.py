"""Bundles on a full disk, and bundles read by tar and sha256sum."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterctl.errors import MachineError
from clusterctl.packages.bundle import (
    HASHES,
    MANIFEST,
    Bundle,
    damages,
    open_bundle,
)
from tests.support.disks import small_disk
from tests.support.messages import refused
from tests.unit.packages.bundles import FILES, a_bundle
from tests.unit.packages.test_bundle_damage import (
    PATHS,
    bundle_fixture,  # noqa: F401
)


def test_full_disk_leaves_no_partial_bundle() -> None:
    with small_disk() as disk:
        disk.fill(but=4096)
        with refused("disk", MachineError) as caught:
            a_bundle(disk.path / "one.tar", {"wheels/large": bytes(1 << 20), **FILES})
        assert "No space left" in caught.value.why
        assert [path.name for path in disk.path.iterdir()] == [".fill"]


def test_bundle_is_reproducible_and_checked_by_sha256sum(tmp_path: Path, bundle: Bundle) -> None:
    assert a_bundle(tmp_path / "two.tar").read_bytes() == bundle.file.read_bytes()
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "out", "-xf", bundle.file], check=True)
    subprocess.run(["sha256sum", "--strict", "--check", HASHES], cwd=tmp_path / "out", check=True)
    assert [*bundle.hashes] == [MANIFEST, *PATHS]
    assert damages(bundle) == ()


@pytest.mark.parametrize("content", [b"", b"not a tar" * 200, bytes(4096)])
def test_open_bundle_refuses_other_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "t.tar", "file"], check=True)
    for name in ("file", "t.tar"):
        with refused("not-a-bundle"):
            open_bundle(tmp_path / name)
    with refused("bundle-unreadable"):
        open_bundle(tmp_path / "none.tar")
