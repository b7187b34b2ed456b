"""Container images on a node that need other programs."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from payload.node import images


def test_layers_of_zstd_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    with tarfile.open(tmp_path / "plain", "w") as tar:
        tar.add(tmp_path / "a", "b")
    subprocess.run(["zstd", "-q", tmp_path / "plain", "-o", tmp_path / "layer"], check=True)
    # As in the layout of an image from a registry.
    (tmp_path / "link").symlink_to("layer")
    layers = images.ImageLayers(b"{}", [str(tmp_path / "link")])
    images.make_folder(layers, str(tmp_path / "root"))
    assert (tmp_path / "root" / "b").read_text() == "a"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(images.ImageError, match="zstd"):
        images.make_folder(layers, str(tmp_path / "again"))
