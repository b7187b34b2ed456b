"""Machines that call themselves by another distribution's name: what Ansible goes by, and no more.

An Ubuntu-shaped machine is Debian 12 that says it is Ubuntu. Its packages are Debian's, of the same names.
An EL-10-shaped one is the EL-shaped node (tests/support/el) that says it is Rocky Linux 10.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from clusterctl.providers.local.system import run

_UBUNTU: Final = """\
PRETTY_NAME="Ubuntu {version} LTS"
NAME="Ubuntu"
VERSION_ID="{version}"
VERSION="{version} LTS ({title})"
VERSION_CODENAME={codename}
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME={codename}
"""
_CODENAMES: Final = {"22.04": ("jammy", "Jammy Jellyfish"), "24.04": ("noble", "Noble Numbat")}
_SAYS: Final = ("os-release", "redhat-release", "rocky-release", "system-release")
_TENS: Final = {
    "9.6": "10.0",
    "Blue Onyx": "Red Quartz",
    "el9": "el10",
    "rocky:9": "rocky:10",
    "Linux-9": "Linux-10",
}
_NINE: Final = re.compile("|".join(map(re.escape, _TENS)))
_UV: Final = Path(sys.executable).with_name("uv")


def shape(root: Path, kind: str) -> None:
    """Make a tree what it is to be taken for. ``kind`` is as `ubuntu-24.04`, or `el-10`."""
    family, _, version = kind.partition("-")
    if family == "ubuntu":
        codename, title = _CODENAMES[version]
        for path in (root / "etc/os-release", root / "usr/lib/os-release"):
            path.unlink(missing_ok=True)
            path.write_text(_UBUNTU.format(version=version, codename=codename, title=title))
    elif version == "10":
        says = {root / "etc" / name: (root / "etc" / name).read_text() for name in _SAYS}
        swap = "rpm -e --nodeps rocky-release; rpm -i --force-debian /usr/share/rocky-release10.rpm"
        run(["chroot", str(root), "sh", "-ec", swap], what="making it Rocky Linux 10")
        for path, said in says.items():
            path.write_text(_NINE.sub(lambda found: _TENS[found[0]], said))
    if version in {"24.04", "10"}:
        _add_python(root)


def _add_python(root: Path) -> None:
    """The Python 3.12 that neither Debian 12 nor the EL-shaped node has: this machine's, or uv's."""
    prefix = _python()
    (root / "usr/bin/python3.12").unlink(missing_ok=True)
    shutil.copy(prefix / "bin/python3.12", root / "usr/bin/python3.12")
    for library in prefix.glob("lib/libpython3.12.so*"):
        shutil.copy(library, root / "usr/lib" / library.name)
    left = shutil.ignore_patterns("test", "site-packages", "__pycache__", "config-*", "idlelib", "*.a")
    shutil.copytree(prefix / "lib/python3.12", root / "usr/lib/python3.12", ignore=left, dirs_exist_ok=True)
    run(["chroot", str(root), "ldconfig"], what="finding its library")


def _python() -> Path:
    """The prefix of a Python 3.12."""
    here = sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"))
    path = shutil.which("python3.12")
    for program in map(str, (*here, path) if path else here):
        ask = [program, "-c", "import sys; print(sys.base_prefix)"]
        done = subprocess.run(ask, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(done.stdout.strip())
    subprocess.run([_UV, "python", "install", "--quiet", "3.12"], check=True)
    find = [str(_UV), "python", "find", "--managed-python", "3.12"]
    found = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    return Path(found).resolve().parents[1]
