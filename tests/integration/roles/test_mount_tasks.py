"""The tasks that mount the shared folder and the bucket, with stand-ins for the kernel's mounts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.plays import changes, program, role_data, run_tasks

SOURCE = "10.80.0.2:/shared"
THEIRS = "UUID=1 / ext4 defaults 0 1\n"
# The lines of the file `kernel` are mounts: source, path, kind and options.
STAND_INS = {
    "findmnt": """\
for path; do :; done
grep " $path " {kernel} | { read -r source rest && echo $source; }
""",
    "mount": """\
echo "mount $*" >>{calls}
[ ! -e {refuses} ] || { echo "the server is away" >&2; exit 32; }
case $1,$2 in
-o,remount,*) [ ! -e {keeps} ] || exit 32; sed -i "s|\\( $3 .*\\) [^ ]*|\\1 ${2#remount,}|" {kernel} ;;
-t,*) echo "$5 $6 $2 $4" >>{kernel} ;;
esac
""",
    "umount": 'echo "umount $*" >>{calls}; sed -i "\\, $1 ,d" {kernel}',
}


class Machine:
    """A host that mounts a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "shared"
        self.files = {name: folder / name for name in ("kernel", "calls", "refuses", "keeps")}
        self.kernel = self.files["kernel"]
        self.fstab = folder / "fstab"
        self.kernel.touch()
        self.fstab.write_text(THEIRS)
        places = "|".join(self.files)
        for name, script in STAND_INS.items():
            filled = re.sub(rf"{{({places})}}", lambda found: str(self.files[found[1]]), script)
            program(folder, name, filled)

    def variables(self) -> dict[str, Any]:
        server, export = SOURCE.split(":")
        return {
            "shared_storage_kind": "nfs",
            "shared_storage_server": server,
            "shared_storage_export": export,
            "shared_storage_path": str(self.path),
            "shared_storage_fstab": str(self.fstab),
        }

    def changes(self, *, check: bool = False) -> int:
        return changes(self.folder, "shared_storage", "mount", check=check, **self.variables())

    def calls(self) -> list[str]:
        """Return and forget the programs that were called."""
        found = self.files["calls"].read_text().splitlines() if self.files["calls"].exists() else []
        self.files["calls"].unlink(missing_ok=True)
        return found

    def state(self) -> tuple[str, str]:
        return self.kernel.read_text(), self.fstab.read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_folder_is_mounted_once_and_listed_in_fstab(machine: Machine) -> None:
    options = role_data("shared_storage")["shared_storage_options"]["nfs"]
    assert machine.changes(check=True) == 2
    assert (machine.state(), machine.calls()) == (("", THEIRS), [])
    assert not machine.path.exists()
    assert machine.changes() == 2
    assert machine.path.is_dir()
    line = f"{SOURCE} {machine.path} nfs {options} 0 0\n"
    assert machine.state() == (f"{SOURCE} {machine.path} nfs {options}\n", f"{THEIRS}{line}")
    machine.calls()
    assert [machine.changes(), machine.changes(check=True)] == [0, 0]
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("broken", "keeps", "seen"),
    [
        ("unmounted", False, ["mount -t nfs"]),
        ("not listed", False, ["mount -o remount"]),
        ("other options", False, ["mount -o remount"]),
        ("other options", True, ["mount -o remount", "umount", "mount -t nfs"]),
        ("other source", False, ["umount", "mount -t nfs"]),
    ],
)
def test_broken_mount_is_repaired(
    machine: Machine, *, broken: str, keeps: bool, seen: list[str]
) -> None:
    """keeps: whether the file system can't change its options."""
    machine.changes()
    whole = machine.state()
    kernel, fstab = whole
    if broken == "unmounted":
        machine.kernel.write_text("")
    elif broken == "not listed":
        machine.fstab.write_text(THEIRS)
    elif broken == "other options":
        machine.kernel.write_text(kernel.replace("hard", "soft"))
        machine.fstab.write_text(fstab.replace("hard", "soft"))
    else:
        machine.kernel.write_text(kernel.replace(SOURCE, "old:/shared"))
        machine.fstab.write_text(fstab.replace(SOURCE, "old:/shared"))
    if keeps:
        machine.files["keeps"].touch()
    machine.calls()
    before = machine.state()
    assert machine.changes(check=True) == 1
    assert (machine.state(), machine.calls()) == (before, [])
    assert machine.changes() == (1 if broken == "unmounted" else 2)
    assert machine.state() == whole
    calls = machine.calls()
    assert len(calls) == len(seen), calls
    assert all(call.startswith(start) for call, start in zip(calls, seen, strict=True)), calls
    assert machine.changes() == 0


def test_mount_that_fails_is_not_listed_and_tried_again(machine: Machine) -> None:
    """systemd would wait for it at the next boot, and a later run would find nothing to do."""
    machine.files["refuses"].touch()
    done = run_tasks(machine.folder, "shared_storage", "mount", **machine.variables())
    assert done.returncode != 0
    assert "the server is away" in done.stdout
    assert machine.state() == ("", THEIRS)
    machine.files["refuses"].unlink()
    assert machine.changes() == 2
    assert machine.state()[1] != THEIRS
