"""Images in files of this machine: what they are is said before they are sent."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs import images
from payload.node import images as node_images
from tests.support.messages import condition, refused


def archive(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


@pytest.mark.parametrize(
    ("names", "is_export"),
    [
        ((f"{'0a' * 32}/layer.tar", "manifest.json"), False),
        (("blobs/sha256/1", "index.json", "oci-layout"), False),
        (("sha256:1", "x.tar.gz", "manifest.json"), False),
        ((".dockerenv", "bin/sh"), True),
        (("./opt/x", "./etc/passwd"), True),
    ],
)
def test_root_file_system_is_told_from_an_image(
    tmp_path: Path, names: tuple[str, ...], is_export: bool
) -> None:
    notice = images.archive_notice(archive(tmp_path / "x.tar", *names))
    assert (notice is not None and condition(notice)) == (is_export and "image-without-settings")


def test_other_archive_is_refused(tmp_path: Path) -> None:
    with refused("file-invalid/image", UsageError):
        images.archive_notice(archive(tmp_path / "x.tar.gz", "project/train.py"))


def test_file_of_another_kind_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "x.sif").write_bytes(b"#!/usr/bin/env run-singularity\n")
    assert images.archive_notice(tmp_path / "x.sif") is None
    whole = archive(tmp_path / "x.tar.gz", "project/train.py").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[:-20])
    assert images.archive_notice(tmp_path / "cut.tar.gz") is None
    member = tarfile.TarInfo("project/noise")
    member.size = 1 << 17
    with tarfile.open(tmp_path / "x.tar.xz", "w:xz") as tar:
        tar.addfile(member, io.BytesIO(hashlib.shake_256().digest(member.size)))
    whole = (tmp_path / "x.tar.xz").read_bytes()
    (tmp_path / "damaged.tar.xz").write_bytes(whole[: 1 << 16] + bytes(1 << 16))
    assert images.archive_notice(tmp_path / "damaged.tar.xz") is None


def test_node_knows_the_same_root_file_systems() -> None:
    assert frozenset(node_images.OF_ROOT) == images._OF_ROOT
    assert node_images.PROCESSORS == images._PROCESSORS
