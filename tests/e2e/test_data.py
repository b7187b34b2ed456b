"""put and get on a real cluster, whose nodes see the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.hostile import HOSTILE_NAMES
from tests.support.transfers import content

MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "my data; $(x)"
    (folder / "sub" / "empty").mkdir(parents=True)
    for name in HOSTILE_NAMES:
        (folder / os.fsdecode(name)).write_bytes(name)
    (folder / "link").symlink_to("sub")
    (folder / "sub" / "nothing").touch(mode=0o751)
    with (folder / "sparse").open("wb") as file:
        file.truncate(30 * MIB)
    return folder


def test_put_and_get_return_the_same_files(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    (data / "large").write_bytes(os.urandom(20 * MIB))  # more than goes over the first connection
    done = cluster.json("put", data, "some where/")
    assert done["folder"].endswith("/some where")
    assert done["sent_bytes"] == done["bytes"] > 50 * MIB
    assert cluster.json("put", data, "some where")["sent_bytes"] == 0
    cluster("get", "some where", tmp_path / "back")
    assert content(tmp_path / "back" / "some where" / data.name) == content(data)
    again = cluster.json("get", f"some where/{data.name}", tmp_path / "back" / "some where")
    assert again["sent_bytes"] == 0
    (data / "sparse").rename(data.parent / "alone")
    assert (
        cluster.json("put", data.parent / "alone")["folder"]
        == cluster.json("put", data, ".")["folder"]
    )
    # The nodes see what was put, and it is the job user's.
    owner = cluster.ssh(f"{cluster.name}-train-2", "stat -c %U ~/'some where'", user=cluster.user)
    assert owner.strip() == cluster.user
