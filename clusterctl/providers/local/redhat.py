"""The base of a node image on Red Hat's family: made by dnf, from the repositories of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from clusterctl.providers.local.run import run

PACKAGES: Final = (
    *("ca-certificates", "dbus", "dnf", "iproute", "openssh-server", "procps-ng", "python3", "shadow-utils"),
    *("sudo", "systemd", "util-linux"),
)
MASKED: Final = (
    "console-getty.service",
    "dnf-makecache.timer",
    "fstrim.timer",
    "systemd-firstboot.service",
)
# What decides where packages come from; the image has the same as this machine.
_REPOSITORIES: Final = ("etc/dnf/vars", "etc/pki/rpm-gpg", "etc/yum.repos.d")
_DNF_CONF: Final = "etc/dnf/dnf.conf"
HERE: Final = Path("/")
# systemd-networkd is no part of the distribution: this puts into force what is written for it.
NETWORK_UNIT: Final = "clusterctl-network.service"
_NETWORK: Final = """\
[Unit]
Description=The address that clusterctl gave this node
Wants=network.target
Before=network.target sshd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/ip link set host0 up
ExecStart=/bin/sh -c 'exec /usr/sbin/ip address replace "$$(sed -n s/^Address=//p \
/etc/systemd/network/10-host0.network)" dev host0'

[Install]
WantedBy=multi-user.target
"""


def has_dnf() -> bool:
    """Whether packages of this machine are dnf's, whatever image it can make."""
    return shutil.which("dnf") is not None and shutil.which("apt-get") is None


def install(root: Path, name: str, *, through: tuple[str, ...] = ()) -> None:
    """A minimal tree of this machine's distribution, and its repositories in it.

    Raises:
        ProvisionError: the repositories lack something, or can't be reached.
    """
    root.mkdir(parents=True)
    # Which package says what a machine is differs: rocky-release, redhat-release...
    ask = ["rpm", "--query", "--whatprovides", "--queryformat=%{NAME}\n", "system-release"]
    says_so = run(ask, what="asking for the package that says which distribution this is").split()[0]
    argv = [
        "dnf",
        "--quiet",
        "--assumeyes",
        f"--installroot={root}",
        f"--releasever={name.rpartition('-')[2]}",
    ]
    argv += [f"--config=/{_DNF_CONF}", "--setopt=reposdir=/etc/yum.repos.d", "--setopt=varsdir=/etc/dnf/vars"]
    argv += ["--setopt=install_weak_deps=False", "--setopt=tsflags=nodocs", "--setopt=keepcache=False"]
    run(
        [*through, *argv, "install", says_so, *PACKAGES],
        what="building the base image",
        where="dnf, with the repositories of this machine",
        fix="check that `dnf makecache` works here, then run it again",
    )
    for folder in _REPOSITORIES:
        if (HERE / folder).is_dir():
            shutil.copytree(HERE / folder, root / folder, dirs_exist_ok=True)
    shutil.copy(HERE / _DNF_CONF, root / _DNF_CONF)
    shutil.rmtree(root / "var/cache/dnf", ignore_errors=True)
    (root / "etc/systemd/system" / NETWORK_UNIT).write_text(_NETWORK)
