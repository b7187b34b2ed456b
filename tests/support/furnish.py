"""Turn a root file system into a user's machine: a user with a key and sudo, addresses, a host key.

Its /etc/os-release may name another distribution, which Ansible reads. An Ubuntu-shaped machine is
Debian 12 with the os-release of Ubuntu; its packages are Debian's, of the same names. An
EL-10-shaped machine is the EL-shaped node (tests/support/el) with the os-release of Rocky Linux 10.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.providers.local import system
from clusterctl.providers.local.system import run
from tests.support.lab import Box, Request
from tests.support.lab_web import PROXY_PORT

# The base has clusterctl's own account, which a machine of somebody's own has not; and it ends
# units quickly.
_USER = """\
limits=/etc/systemd/system.conf.d
! id clusterctl >/dev/null 2>&1 || userdel --remove clusterctl 2>/dev/null
rm -f /etc/sudoers.d/clusterctl
[ ! -e $limits/clusterctl.conf ] || mv $limits/clusterctl.conf $limits/lab.conf
(cd /etc/systemd/system.conf.d && mv clusterctl.conf soon.conf 2>/dev/null) || true
id {user} >/dev/null 2>&1 || useradd --create-home --shell /bin/bash {user}
[ {user} = root ] || echo {password} | chpasswd
home=$(getent passwd {user} | cut -d: -f6)
mkdir -p -m 700 $home/.ssh
echo {key} > $home/.ssh/authorized_keys
chmod 600 $home/.ssh/authorized_keys
chown -R {user}: $home/.ssh
"""


@dataclass(frozen=True)
class Services:
    """Where machines find what serves them, and the hosts on the web that it plays."""

    address: str
    web_hosts: tuple[str, ...]


def layer(lower: tuple[Path, ...], folder: Path, request: Request) -> Path:
    """What all machines of a lab have in common, as a layer of its own."""
    root = system.mount_overlay(lower, folder)
    password = shlex.quote(f"{request.user}:{request.password}")
    script = _USER.format(user=request.user, password=password, key=shlex.quote(request.public_key))
    run(["chroot", str(root), "sh", "-ec", script], action="making the user")
    shape(root, request.kind)
    run(["umount", str(root)], action="unmounting a layer")
    return folder / "upper"


def machine(
    root: Path, box: Box, addresses: Mapping[str, str], services: Services, request: Request
) -> None:
    """What differs between machines. ``addresses`` by interface;"""
    (root / "etc/hostname").write_text(f"{box.name}\n")
    hosts = f"127.0.0.1 localhost\n{addresses['host0']} {box.name}\n"
    hosts += "".join(f"{services.address} {name}\n" for name in services.web_hosts)
    (root / "etc/hosts").write_text(hosts)
    for link, address in addresses.items():
        # Numbered below systemd's own 80-container-host0.network, which would ask for DHCP.
        text = f"[Match]\nName={link}\n\n[Network]\nAddress={address}/24\nLinkLocalAddressing=no\n"
        (root / f"etc/systemd/network/10-{link}.network").write_text(text)
    key = root / "etc/ssh/ssh_host_ed25519_key"
    run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", box.name, "-f", str(key)],
        action="making a key",
    )
    rights = {"free": "NOPASSWD: ALL", "password": "ALL"}.get(box.sudo)
    if rights and request.user != "root":
        sudoers = root / "etc/sudoers.d/90-user"
        sudoers.touch(mode=0o440)
        sudoers.write_text(f"{request.user} ALL=(ALL:ALL) {rights}\n")
    if request.internet:
        settings = (
            f'Acquire::http::Proxy "http://{services.address}:{PROXY_PORT}";\n'
            f'Acquire::Languages "none";\n'
        )
        (root / "etc/apt/apt.conf.d/80proxy").write_text(settings)
        (root / "etc/dpkg/dpkg.cfg.d/80fast").write_text("force-unsafe-io\n")


_UBUNTU: Final = """\
PRETTY_NAME="Ubuntu 24.04 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
"""
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
        for path in (root / "etc/os-release", root / "usr/lib/os-release"):
            path.unlink(missing_ok=True)
            path.write_text(_UBUNTU)
    elif version == "10":
        says = {root / "etc" / name: (root / "etc" / name).read_text() for name in _SAYS}
        swap = "rpm -e --nodeps rocky-release; rpm -i --force-debian /usr/share/rocky-release10.rpm"
        run(["chroot", str(root), "sh", "-ec", swap], action="making it Rocky Linux 10")
        for path, text in says.items():
            path.write_text(_NINE.sub(lambda found: _TENS[found[0]], text))
    if version:
        _add_python(root)


def _add_python(root: Path) -> None:
    """The Python 3.12 that neither Debian 12 nor the EL-shaped node has: this machine's, or
    uv's.
    """
    prefix = python_prefix("3.12")
    (root / "usr/bin/python3.12").unlink(missing_ok=True)
    shutil.copy(prefix / "bin/python3.12", root / "usr/bin/python3.12")
    for library in prefix.glob("lib/libpython3.12.so*"):
        shutil.copy(library, root / "usr/lib" / library.name)
    left = shutil.ignore_patterns(
        "test", "site-packages", "__pycache__", "config-*", "idlelib", "*.a"
    )
    shutil.copytree(
        prefix / "lib/python3.12", root / "usr/lib/python3.12", ignore=left, dirs_exist_ok=True
    )
    run(["chroot", str(root), "ldconfig"], action="finding its library")


def python_prefix(version: str) -> Path:
    """The prefix of a Python of this version, as `3.12`: this machine's, or uv's."""
    name = f"python{version}"
    here = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/{name}"))
    path = shutil.which(name)
    for program in map(str, (*here, path) if path else here):
        ask = [program, "-c", "import sys; print(sys.base_prefix)"]
        done = subprocess.run(ask, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(done.stdout.strip())
    subprocess.run([_UV, "python", "install", "--quiet", version], check=True)
    find = [str(_UV), "python", "find", "--managed-python", version]
    found = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    return Path(found).resolve().parents[1]
