"""The look at an NFS export, with a stand-in for mount(8): the kernel that runs the tests has no
NFS.

The stand-in binds a folder, in a user namespace. There, root has no rights to folders of other
users, as with root_squash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.plays import program

pytestmark = pytest.mark.platform("stand-in", "nfs")

ADA = os.getuid()
SERVERS = 12345
LOOK = """\
import json, sys
from clusterctl.hosts.remote_nfs import examine_export
print(json.dumps(examine_export(json.loads(sys.argv[1]))))
"""
# The words are those of nfs-utils 2.6, utils/mount/error.c, and of mount(8) of util-linux 2.38.
MOUNT = """\
for place; do :; done
echo "$*" >>{folder}/calls
case "$*" in
    *" 127.0.0.1:/gone "*)
        echo "mount.nfs: mounting $4 failed, reason given by server: No such file or directory" ;;
    *" 127.0.0.1:/denied "*) echo "mount.nfs: access denied by server while mounting 127.0.0.1:/denied" ;;
    *" 127.0.0.1:/kernel "*) echo "mount: $place: unknown filesystem type 'nfs4'." ;;
    *vers=4*" 127.0.0.1:/old "*) echo "mount: $place: mount(2) system call failed: Protocol not supported." ;;
    *) exec /usr/bin/mount --bind {folder}/export "$place" ;;
esac >&2
exit 32
"""


def look(folder: Path, export: str = "/export", *, helper: bool = True) -> dict[str, Any]:
    """What the host finds out. helper: it has mount.nfs, as after the installation of nfs-utils."""
    program(folder, "mount", MOUNT.format(folder=folder))
    if helper:
        program(folder, "mount.nfs", "exit 0")
    request = {
        "server": "127.0.0.1",
        "export": export,
        "homes": {"ada": 0},
        "mark": ".clusterctl-abc",
        "writes": True,
    }
    argv = ["unshare", "--user", "--map-root-user", sys.executable, "-c", LOOK, json.dumps(request)]
    path = f"{folder}/bin:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    return folder


def test_export_that_root_may_write_to_is_well_and_stays_as_it_was(
    tmp_path: Path, export: Path
) -> None:
    before = sorted(Path("/proc/self/mountinfo").read_text().splitlines())
    found = look(tmp_path)
    assert found == {
        "version": "",
        "owners": {},
        "mark": False,
        "refused": "",
        "owner": 0,
        "given": {"0": 0},
    }
    assert not list(export.iterdir())
    assert sorted(Path("/proc/self/mountinfo").read_text().splitlines()) == before


def test_export_with_root_squash_refuses_a_folder_and_shows_the_homes(
    tmp_path: Path, export: Path
) -> None:
    for name in ("home/ada", "home/.clusterctl-abc"):
        (export / name).mkdir(parents=True)
    for folder in (export, export / "home"):
        os.chown(folder, SERVERS, SERVERS)
    found = look(tmp_path)
    assert found["refused"] == "Permission denied"
    assert (found["owners"], found["mark"]) == ({"ada": 0}, True)
    assert not list(tmp_path.glob("export/home/.clusterctl-[!a]*"))


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("/gone", "said", "No such file or directory"),
        ("/denied", "said", "access denied by server"),
        ("/kernel", "untested", "unknown filesystem type"),
    ],
)
@pytest.mark.usefixtures("export")
def test_mounts_that_fail_are_told_in_mounts_words(
    tmp_path: Path, name: str, key: str, words: str
) -> None:
    found = look(tmp_path, name)
    assert [*found] == [key]
    assert words in found[key]


@pytest.mark.usefixtures("export")
def test_host_without_nfs_programs_tries_each_version(tmp_path: Path) -> None:
    """mount.nfs would negotiate the version, but nothing is installed yet."""
    assert look(tmp_path, "/old", helper=False)["owner"] == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    tried = [call.split()[:3] for call in calls]
    assert tried == [["-i", "-t", "nfs4"], ["-i", "-t", "nfs4"], ["-i", "-t", "nfs"]]
    assert all("addr=127.0.0.1" in call for call in calls)
    assert "vers=3,nolock" in calls[-1]
