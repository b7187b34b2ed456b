"""What a bundle keeps in its folder, and what it removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.packages.bundle import WHEELS, BundleRequest, create, put_wheels
from clusterctl.spec.load import default_spec
from tests.support.messages import refused

NOTHING = BundleRequest(default_spec(), (), {}, lambda _: None)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    create(NOTHING, folder)
    for release in ("debian-12", "rocky-9"):
        (folder / release).mkdir()
    return folder


def wheel(folder: Path, name: str, content: str = "") -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    path.write_text(content)
    return path


def names(bundle: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (bundle / WHEELS).iterdir())


def test_folder_with_files_of_the_user_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / WHEELS).mkdir()
    own = wheel(tmp_path / WHEELS, "own")
    with refused("file-invalid/bundle", UsageError):
        create(NOTHING, tmp_path)
    assert own.is_file()


def test_releases_made_one_after_the_other_have_their_wheels(bundle: Path, tmp_path: Path) -> None:
    both, old, new = (wheel(tmp_path, name) for name in ("both", "old", "new"))
    put_wheels(bundle, {"debian-12": [both, old]})
    put_wheels(bundle, {"rocky-9": [both, new]})
    assert names(bundle) == ["both", "new", "old"]
    put_wheels(bundle, {"debian-12": [both]})
    assert names(bundle) == ["both", "new"]
    (bundle / "rocky-9").rmdir()
    create(NOTHING, bundle)
    assert names(bundle) == ["both"]


def test_damaged_wheel_is_replaced(bundle: Path, tmp_path: Path) -> None:
    one = wheel(tmp_path, "one", "whole")
    put_wheels(bundle, {"debian-12": [one]})
    (bundle / WHEELS / one.name).write_text("whol!")
    put_wheels(bundle, {"debian-12": [one]})
    assert (bundle / WHEELS / one.name).read_text() == "whole"
