"""The files of users on a host's own disks: wherever they are, by their owner."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from clusterctl.transport.remote_copies import CopySearch, digest, is_of_person, tops_of
from clusterctl.transport.remote_open import NO_BEAT

# A person of the spec, one whom it no longer has, one of a directory service, one of the ids that a
# container of a user has, and the last one of systemd-homed.
PEOPLE = (10000, 1005, 1_234_567, 100_999, 60_513)
# root, Debian's slurm and munge, the admin user of clusterctl's nodes, a service, and nobody.
OTHERS = (0, 60_514, 64030, 64031, 64100, 61184, 65534)
# Folders that a system has.
OF_THE_SYSTEM = (
    *("opt/x", "var/lib/x", "var/opt/y", "var/www/h", "var/spool/cron", "etc/x", "root/sub"),
    *("usr/local/share/x", "usr/local/src/z", "usr/share/mine", "lib/mine", "boot/mine", "tmp/a"),
    "var/tmp/a",
)
# Folders that no system has, or that no system puts files into.
OF_ANYBODY = ("data/d", "scratch", "srv/s", "mnt/m", "home/ada/sub", "home/ada/.config/a")
# Folders in which nothing is a user's, or is on a disk.
OF_NOBODY = (
    *("proc/1", "sys/x", "dev/shm", "run/user/10000", "lost+found", "shared/home/ada"),
    *("var/lib/docker/overlay2/a", "var/lib/containers/s", "var/lib/containerd/c"),
    *("home/ada/.cache/pip", "tmp/ompi.n1.1234", "tmp/spmix_appdir_64100_7.0", "opt/x/__pycache__"),
)
# Files beside folders.
TOP_FILES = ("x.csv", "home/y.csv", "tmp/t.pt", "tmp/results-ompi.txt")


def write(root: Path, path: str, uid: int) -> str:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("data\n")
    os.chown(file, uid, uid)
    return path


def found_on(root: Path, copied: Mapping[int, int] = {}) -> set[str]:
    """The paths that a search of a host's own disks finds."""
    request = {
        "shared": str(root / "shared"),
        "look_at_shared": False,
        "host": "n1",
        "local": True,
        "folder": "",
        "jobs": [],
        "root": str(root),
    }
    numbers = array("Q", sorted(copied))
    times = array("Q", (copied[number] for number in numbers))
    walk = CopySearch(numbers, times, (), (), NO_BEAT)
    tops = [*tops_of(request)]
    paths = [os.path.join(top.path, path) for top in tops for path, _ in walk.files(top)]
    assert not walk.unread
    assert len({*paths}) == len(paths), "a file is found twice"
    return {os.path.relpath(os.fsdecode(path), root) for path in paths}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_every_file_of_a_person_is_found_and_no_other(tmp_path: Path) -> None:
    wanted = {
        *(
            write(tmp_path, f"{folder}/{uid}", uid)
            for folder in (*OF_THE_SYSTEM, *OF_ANYBODY)
            for uid in PEOPLE
        ),
        # By sudo, or in a container.
        *(write(tmp_path, f"{folder}/{uid}", uid) for folder in OF_ANYBODY for uid in OTHERS),
        *(write(tmp_path, path, PEOPLE[0]) for path in TOP_FILES),
        write(tmp_path, "opt/x/new\nline\udcff", PEOPLE[1]),
    }
    for folder in OF_THE_SYSTEM:
        for uid in OTHERS:
            write(tmp_path, f"{folder}/{uid}", uid)
    for folder in OF_NOBODY:
        for uid in (*PEOPLE, *OTHERS):
            write(tmp_path, f"{folder}/{uid}", uid)
    write(tmp_path, "root.csv", 0)
    (tmp_path / "opt/x/link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "opt/x/pipe")
    for name in ("link", "pipe"):
        os.chown(tmp_path / "opt/x" / name, PEOPLE[0], -1, follow_symlinks=False)
    (tmp_path / "opt/x/empty").touch()
    os.chown(tmp_path / "opt/x/empty", PEOPLE[0], -1)
    found = found_on(tmp_path)
    assert found == wanted
    status = {path: (tmp_path / path).stat() for path in found}

    def copied(at_ns: Callable[[os.stat_result], int]) -> dict[int, int]:
        return {
            digest(b"n1", os.fsencode(tmp_path / path), one.st_size, one.st_mtime_ns): at_ns(one)
            for path, one in status.items()
        }

    assert found_on(tmp_path, copied(lambda _: 0)) == set()
    assert found_on(tmp_path, copied(lambda one: one.st_ctime_ns)) == set()
    # Changed since, with the same size and time.
    assert found_on(tmp_path, copied(lambda one: one.st_ctime_ns - 1)) == found


def test_accounts_of_the_system_are_not_those_of_people() -> None:
    assert all(map(is_of_person, PEOPLE))
    assert not any(map(is_of_person, OTHERS))
