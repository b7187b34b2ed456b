"""put and get on a real cluster: whole, killed at work, and without room."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.hostile import HOSTILE_NAMES
from tests.support.processes import eventually
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


def test_there_and_back(cluster: Cluster, data: Path, tmp_path: Path) -> None:
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
    said = cluster.ssh(f"{cluster.name}-train-2", "stat -c %U ~/'some where'", user=cluster.user)
    assert said.strip() == cluster.user


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, how)
    process.communicate(timeout=60)
    assert process.returncode != 0


def test_transfer_that_was_ended_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    size = 256 * MIB
    large = tmp_path / "large"
    back = tmp_path / "back"
    with large.open("wb") as file:
        for _ in range(size // (8 * MIB)):
            file.write(os.urandom(8 * MIB))
    back.mkdir()

    putting = cluster.runner.start("-f", cluster.spec, "put", large, ".")
    # The node itself looks, without a pause: it sees the file while it arrives.
    arrives = (
        "until find ~ -maxdepth 1 -name '.clusterctl-*.part' -size +1M | grep -q .; do :; done"
    )
    cluster.ssh(f"{cluster.name}-ctl", arrives, user=cluster.user)
    end(putting, signal.SIGKILL)
    put = cluster.json("put", large, ".")
    assert 0 < put["sent_bytes"] < size

    getting = cluster.runner.start("-f", cluster.spec, "get", "large", back)
    unfinished = ".clusterctl-*.part"
    eventually(lambda: any(p.stat().st_size > MIB for p in back.glob(unfinished)), 120, pause_s=0)
    end(getting, signal.SIGINT)
    assert not (back / "large").exists()
    got = cluster.json("get", "large", back)
    assert 0 < got["sent_bytes"] < size
    subprocess.run(["cmp", large, back / "large"], check=True)
    cluster.ssh(f"{cluster.name}-ctl", "rm large", user=cluster.user)


def test_no_room_on_the_cluster(cluster: Cluster, data: Path) -> None:
    (data / "large").write_bytes(os.urandom(24 * MIB))
    controller = f"{cluster.name}-ctl"
    mount = "sudo mkdir -p /mnt/small && sudo mount -t tmpfs -o size=40m,mode=777 none /mnt/small"
    cluster.ssh(controller, mount)
    try:
        (failure,) = cluster.json("put", data, "/mnt/small", rc=1)["failures"]
        assert failure["code"] == "files-unwritable"
        assert re.findall("([0-9]+) MiB", failure["cause"])[:2] == ["70", "40"]
        (data / "sparse").unlink()
        (data / "large").unlink()
        cluster("put", data, "/mnt/small")
    finally:
        cluster.ssh(controller, "sudo umount /mnt/small")
