"""Clusters of on-prem machines: tests create them, and `down` must give the machines back."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from clusterctl.state.workspace import cache_home
from tests.support.cluster import Cluster
from tests.support.lab import GATE, PASSWORD, Lab, LabHost
from tests.support.messages import shows
from tests.support.nested import Host
from tests.support.processes import as_root
from tests.support.verbs import SCRIPT, Clusterctl, CommandResult

# What anybody sees of a machine that can have become another: accounts, packages, units, files.
_STATE = r"""
cut -d: -f1,3,6 /etc/passwd | sort
if command -v dpkg-query >/dev/null; then
    dpkg-query -W -f '${Package} ${db:Status-Abbrev}\n' | sed 's/ *$//' | sort
else
    rpm -qa | sort
fi
systemctl list-unit-files --no-legend | awk '{print $1, $2}' | sort
find /etc /opt /usr/local /home ! -name '*-' ! -path '*/.cache*' -type f 2>/dev/null | sort | xargs sha256sum
"""
# Written again by whatever touches packages, accounts or links; what they say is seen above.
_REWRITTEN = re.compile(
    r"/etc/(ld\.so\.cache|\.pwd\.lock|(sub)?[ug]id|group|gshadow|shadow|passwd|machine-id|alternatives/|ssl/)|~$"
)


def state(lab: Lab, host: str) -> list[str]:
    lines = lab.enter(host, ["bash", "-c", _STATE]).stdout.splitlines()
    return [line for line in lines if not _REWRITTEN.search(line)]


def asking(folder: Path, password: str = PASSWORD) -> dict[str, str]:
    """Return the environment that answers sudo's question for the password."""
    program = folder / "askpass"
    program.write_text(f"#!/bin/sh\necho '{password}'\n")
    program.chmod(0o755)
    return {"SUDO_ASKPASS": str(program)}


def knowing(lab: Lab, home: Path) -> dict[str, str]:
    """Return the environment of a user whose known_hosts has the machines' keys."""
    environ = at_home(home)
    (home / ".ssh/known_hosts").write_text(lab.known_hosts.read_text())
    return environ


def at_home(home: Path) -> dict[str, str]:
    """Return the environment of a user whose known_hosts is in this folder, and empty at first."""
    (home / ".ssh").mkdir(mode=0o700, parents=True, exist_ok=True)
    return {"HOME": str(home), "XDG_CACHE_HOME": str(cache_home().parent)}


# The owner's ssh reads the ~/.ssh of the account, not of $HOME.
_OWNER = """\
#!/bin/sh
exec {root} env {variables} unshare --mount --propagation private sh -ec {run} sh "$@"
"""
_PASSED = ("CLUSTERCTL_HOME", "TMPDIR", "COLUMNS", "PATH", "HOME", "XDG_CACHE_HOME", "SUDO_ASKPASS")


def owner(lab: Lab, state: Path, home: Path, environ: Mapping[str, str]) -> Clusterctl:
    """The owner of machines behind a gate, whose ~/.ssh/config has it as their jump host."""
    assert lab.gate is not None
    ssh = home / ".ssh"
    names = " ".join(host.name for host in lab.hosts)
    (ssh / "config").write_text(
        f"Host {names}\n    ProxyJump {GATE}\n"
        f"Host {GATE}\n    HostName {lab.gate.address}\n"
        f"    User {lab.user}\n    IdentityFile {lab.key}\n"
    )
    real = Path.home() / ".ssh"
    real.mkdir(mode=0o700, exist_ok=True)
    become = f"setpriv --reuid {os.getuid()} --regid {os.getgid()} --init-groups --"
    run = f'{shlex.join(["mount", "--bind", str(ssh), str(real)])}; exec {become} {SCRIPT} "$@"'
    passed = dict.fromkeys([*_PASSED, *environ])
    program = home / "clusterctl"
    program.write_text(
        _OWNER.format(
            root=" ".join(as_root()),
            variables=" ".join(f'${{{name}+"{name}=${name}"}}' for name in passed),
            run=shlex.quote(run),
        )
    )
    program.chmod(0o755)
    return Clusterctl(state, home, {**at_home(home), **environ}, program)


def up(runner: Clusterctl, spec: Path, *more: str) -> CommandResult:
    """Run `up` without a terminal."""
    return runner("-o", "json", "-f", spec, "up", *more)


@contextmanager
def raised(
    lab: Lab,
    name: str,
    text: str,
    home: Path,
    cwd: Path,
    *more: str,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Cluster]:
    """A cluster of these machines, which `down` must give back. more: further arguments of `up`."""
    before = {host.name: state(lab, host.name) for host in lab.hosts}
    spec = cwd / "cluster.yaml"
    spec.write_text(text)
    known = {**knowing(lab, cwd), **environ}
    runner = owner(lab, home, cwd, known) if lab.gate else Clusterctl(home, cwd, known)
    try:
        yield Cluster(name, spec, runner, up(runner, spec, *more).json)
    finally:
        down = runner("-f", spec, "down", "--yes", "--discard", rc=None)
    assert down.rc == 0 or shows(down.stderr, "unknown-cluster"), str(down)
    as_before(lab, before)


def as_before(lab: Lab, before: Mapping[str, list[str]]) -> None:
    """Assert that machines have the state that they had before, except for packages, which stay."""
    for host, was in before.items():
        now = state(lab, host)
        packaged = packages_of(lab.host(host).inside)
        removed = sorted(set(was) - set(now))
        new = [line for line in sorted(set(now) - set(was)) if not is_of_package(line, packaged)]
        assert not removed, f"{host} lacks\n" + "\n".join(removed)
        assert not new, f"{host} has\n" + "\n".join(new)


# Everything that a cluster could change; the backups that useradd makes, and logs of packages, left
# out. Packages stay, and apt counts those that the roles name as wanted (apt-mark showmanual). Of a
# unit that is not there systemd knows for a moment that somebody asked for it: host_changes does.
_LOOK = r"""
find /etc /usr/local /opt /srv /home /shared -xdev ! -name '*-' \
    -printf '%y %m %U:%G %p %l\n' | sort
find /etc /usr/local /opt /srv /home /shared -xdev -type f ! -name '*-' -exec sha256sum {} + | sort -k2
dpkg-query -W -f '${db:Status-Status} ${binary:Package} ${Version}\n'
systemctl list-unit-files --no-legend --no-pager | grep -v ^run-
systemctl list-units --no-legend --no-pager --plain --type=service --all |
    awk '$2 != "not-found" || $3 != "inactive" {print $1}' | grep -v '^run-\|^user\|^session'
getent passwd; getent group
ls /var/lib /var/spool /opt /; cut -d' ' -f5 /proc/self/mountinfo | sort
"""


# What packages bring, which stay: their files and folders, what their scripts write, their accounts and
# units.
_OF_PACKAGES = r"""
if command -v dpkg-query >/dev/null; then
    cat /var/lib/dpkg/info/*.list; dpkg-query -W -f '${binary:Package}\n' | sed 's/:.*//'
else
    rpm -qal; rpm -qa
fi | sort -u
"""
_BY_SCRIPTS = re.compile(
    r"/etc/(alternatives|rc[0-6S]\.d|systemd/system/[^/]+\.(wants|requires)|ssl|pki|mysql|ld\.so|X11|selinux|udev)\b"
    r"|/etc/(default|logrotate\.d|modules-load\.d|init\.d|pam\.d|subuid|subgid|group|gshadow|passwd|shadow)\b"
    r"|/usr/local/(lib|share)/(python|fonts|man)|/etc/\.updated|/etc/machine-id"
)
# Lines of accounts, and of folders in /var/lib.
_ACCOUNTS = re.compile(
    r"(slurm|munge|mysql|_?chrony|messagebus|statd|_?rpc\w*|polkitd|rdma|systemd-\w+)(:|$)"
)


def picture(host: Host) -> list[str]:
    """Return a description of the machine, line by line. It must have a folder /shared."""
    return host.sh(_LOOK).splitlines()


def packages_of(host: Host) -> frozenset[str]:
    """Return the names of a machine's packages and their units, and the paths of their files."""
    lines = host.sh(_OF_PACKAGES).splitlines()
    units = (path.rpartition("/")[2] for path in lines if "/systemd/system/" in path)
    return frozenset([*lines, *units])


def is_of_package(line: str, packaged: frozenset[str]) -> bool:
    """Return whether a line of a machine's state is of a package, or what its scripts write."""
    is_by_script = _BY_SCRIPTS.search(line) or _ACCOUNTS.match(line)
    return bool(is_by_script) or not packaged.isdisjoint(line.replace(":", " ").split())


def differences(host: Host, before: Sequence[str], *, allowed: str = "$^") -> list[str]:
    """Return what `down` has left on a machine or taken from it, except packages and what they brought.

    allowed: a pattern of further lines.
    """
    now = picture(host)
    packaged = packages_of(host)
    new = [
        line
        for line in sorted(set(now) - set(before))
        if not re.search(allowed, line) and not is_of_package(line, packaged)
    ]
    gone = [
        line
        for line in sorted(set(before) - set(now))
        if not re.search(allowed, line) and not _BY_SCRIPTS.search(line)
    ]
    return [*(f"- {line}" for line in gone), *(f"+ {line}" for line in new)]


@dataclass(frozen=True)
class SharedFolder:
    """A folder of one machine, which the others can mount by sshfs: the kernel that runs the tests
    has no NFS. The machines need the option `--bind=/dev/fuse`.

    Files that anybody creates in it belong to ``user``, whose home is in it.
    """

    path: str
    user: str
    uid: int
    options: ClassVar[str] = "allow_other,default_permissions,cache=no,IdentityFile=/root/key"

    @property
    def home(self) -> str:
        return f"{self.path}/home/{self.user}"

    def serve(self, lab: Lab, server: LabHost) -> str:
        """Make the folder and the user's account on all machines. Return what the others mount."""
        account = f"{self.uid} {self.user}"
        for host in lab.hosts:
            host.inside.sh(
                f"groupadd -g {account}; useradd -d {self.home} -s /bin/bash -g {self.user} -u {account}; "
                f"install -d {self.path}"
            )
        own = f"-o {self.user} -g {self.user}"
        server.inside.sh(
            f"install -d {self.path}/home; install -d -m 755 {own} {self.home}; "
            f"install -d -m 700 {own} {self.home}/.ssh"
        )
        for host in lab.hosts:
            if host == server:
                continue
            host.inside.sh("apt-get -q update >/dev/null; apt-get -q -y install sshfs >/dev/null")
            key = host.inside.sh(
                "ssh-keygen -q -t ed25519 -N '' -f /root/key; cat /root/key.pub"
            ).strip()
            keys = f"{self.home}/.ssh/authorized_keys"
            server.inside.sh(f"echo '{key}' >>{keys}; chown {self.user}: {keys}")
            host.inside.sh(f"echo '{server.address} {server.host_key}' >/etc/ssh/ssh_known_hosts")
        return f"{self.user}@{server.address}:{self.path}"
