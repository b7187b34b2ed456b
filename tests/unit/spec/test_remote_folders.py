"""The table of the folders that clusterctl keeps on a cluster, and the names that the payload also
has.
"""

from __future__ import annotations

from clusterctl.spec import names, remote_folders
from clusterctl.spec.remote_folders import FOLDERS
from payload.node import build, images


def test_every_folder_is_in_the_table_once() -> None:
    names = [folder.name for folder in FOLDERS]
    constants = [value for name, value in vars(remote_folders).items() if name.isupper()]
    assert sorted(names) == sorted(value for value in constants if value is not FOLDERS)


def test_payload_has_the_same_names() -> None:
    assert build.KEPT == remote_folders.BUILDS
    assert images.ENGINES["layers"] == names.ENGINES
    assert images.ENGINES["file"] == names.SIF_ENGINES


def test_only_these_folders_have_files_of_users() -> None:
    """`down` and `detach` look for only copies there, and nowhere else in the folder."""
    assert {one.name for one in FOLDERS if one.has_user_files} == {"jobs", "runs", "files"}
