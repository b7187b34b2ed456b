"""What makes a tree somebody's machine: a user with a key and sudo, a name, addresses, a host key."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterctl.providers.local import system
from clusterctl.providers.local.system import run
from tests.support.lab import Box, Request
from tests.support.lab_web import PROXY_PORT
from tests.support.shapes import shape

# The base has clusterctl's own account, which a machine of somebody's own has not; and it ends units quickly.
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
    run(["chroot", str(root), "sh", "-ec", script], what="making the user")
    shape(root, request.kind)
    run(["umount", str(root)], what="unmounting a layer")
    return folder / "upper"


def machine(root: Path, box: Box, addresses: Mapping[str, str], services: Services, request: Request) -> None:
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
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", box.name, "-f", str(key)], what="making a key")
    rights = {"free": "NOPASSWD: ALL", "password": "ALL"}.get(box.sudo)
    if rights and request.user != "root":
        sudoers = root / "etc/sudoers.d/90-user"
        sudoers.touch(mode=0o440)
        sudoers.write_text(f"{request.user} ALL=(ALL:ALL) {rights}\n")
    if request.internet:
        settings = (
            f'Acquire::http::Proxy "http://{services.address}:{PROXY_PORT}";\nAcquire::Languages "none";\n'
        )
        (root / "etc/apt/apt.conf.d/80proxy").write_text(settings)
        (root / "etc/dpkg/dpkg.cfg.d/80fast").write_text("force-unsafe-io\n")
