"""A user of this machine with accounts on foreign sites: a key, an ssh configuration, known hosts.

Each command runs in a mount namespace with the user's `~/.ssh` and /etc/hosts. The files of this
machine do not change.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.foreign.site import LOGINS, Site
from tests.support.processes import as_root
from tests.support.verbs import SCRIPT, Clusterctl

# sudo drops the variables of its caller.
_PASSED = ("CLUSTERCTL_HOME", "TMPDIR", "COLUMNS", "TERM", "PATH", "SSH_AUTH_SOCK")
_PASSED_IF_SET = ("XDG_CACHE_HOME", "UV_PYTHON_DOWNLOADS_JSON_URL")
# What Python lacks on macOS, by "Availability" in the documentation of Python 3.11.
_ONLY_ON_LINUX = {
    "os": (
        "copy_file_range eventfd fdatasync getrandom getxattr listxattr memfd_create pidfd_open pipe2 "
        "posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity setxattr splice waitid "
        "O_DIRECT O_NOATIME O_PATH O_TMPFILE"
    ),
    "signal": "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX pidfd_send_signal",
    "select": "epoll",
    "socket": "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT",
    "fcntl": "F_SETPIPE_SZ F_OFD_SETLK F_ADD_SEALS",
    "resource": "prlimit",
    "time": "CLOCK_BOOTTIME",
}
_SITE = """\
import importlib
for name, words in {names!r}.items():
    module = importlib.import_module(name)
    for word in words.split():
        vars(module).pop(word, None)
"""
_SCRIPT = """\
#!/bin/sh
exec {words} unshare --mount --propagation private sh -ec {bind} sh "$@"
"""


@dataclass(frozen=True)
class User:
    """``clusterctl`` runs verbs as the user, in ``folder``, and ``runs`` any program.

    enter: the program that runs its arguments as the user. hosts: the user's /etc/hosts.
    """

    folder: Path
    clusterctl: Clusterctl
    enter: Path
    hosts: Path

    def runs(self, *argv: str | Path, rc: int = 0) -> str:
        """What a program prints."""
        done = subprocess.run(
            [self.enter, *argv],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == rc, done
        return done.stdout


def user_of(site: Site, person: str, folder: Path, *others: Site, has_linux: bool = True) -> User:
    """A user whose ssh knows a person's account at each site by several names. ``folder`` gets the
    user's files, and ``folder/work`` is the user's current folder.

    NAME is the first login node, NAME-jump is the same one through the second, and NAME-any is a
    host name with the addresses of both.

    has_linux: whether the user's programs have /proc, /sys and /dev/shm, and what Python has on Linux
        but not on macOS.
    """
    ssh = folder / "ssh"
    work = folder / "work"
    ssh.mkdir(mode=0o700)
    work.mkdir()
    runner = Clusterctl(folder / "home", work, {}, folder / "clusterctl")
    user = User(work, runner, folder / "as-user", folder / "hosts")
    for one in (site, *others):
        _add_site(one, person, ssh, user.hosts)
    own = Path.home() / ".ssh"
    own.mkdir(mode=0o700, exist_ok=True)
    mounts = shlex.join(["mount", "--bind", str(ssh), str(own)]) + "\n"
    mounts += shlex.join(["mount", "--bind", str(user.hosts), "/etc/hosts"]) + "\n"
    if not has_linux:
        modules = folder / "modules"
        modules.mkdir()
        (modules / "sitecustomize.py").write_text(_SITE.format(names=_ONLY_ON_LINUX))
        mounts += f"export PYTHONPATH={shlex.quote(str(modules))}\n"
        mounts += "".join(f"mount -t tmpfs none {one}\n" for one in ("/dev/shm", "/sys", "/proc"))
    words = [*as_root(), "env", *(f'{name}="${name}"' for name in _PASSED)]
    words += [f'${{{name}+"{name}=${name}"}}' for name in _PASSED_IF_SET]
    user.enter.write_text(
        _SCRIPT.format(words=" ".join(words), bind=shlex.quote(mounts + _become()))
    )
    user.clusterctl.script.write_text(
        f'#!/bin/sh\nexec {shlex.join([str(user.enter), str(SCRIPT)])} "$@"\n'
    )
    for program in (user.enter, user.clusterctl.script):
        program.chmod(0o755)
    return user


def _add_site(site: Site, person: str, ssh: Path, hosts: Path) -> None:
    """Add the key of a site and the names of its login nodes to the user's files."""
    name, (first, second) = f"login.{site.name}.test", site.addresses
    shutil.copy(site.lab.key, ssh / site.name)
    ways = {
        site.name: f"HostName {first}",
        f"{site.name}-second": f"HostName {second}",
        f"{site.name}-jump": f"HostName {first}\n    ProxyJump {site.name}-second",
        f"{site.name}-any": f"HostName {name}",
    }
    logins = [site.lab.host(login) for login in LOGINS]
    with (ssh / "config").open("a") as config, (ssh / "known_hosts").open("a") as known:
        for alias, words in ways.items():
            config.write(
                f"Host {alias}\n"
                f"    {words}\n"
                f"    User {person}\n"
                f"    IdentityFile ~/.ssh/{site.name}\n"
            )
        for login in logins:
            known.writelines(f"{host} {login.host_key}\n" for host in (login.address, name))
    with hosts.open("a") as file:
        file.writelines(f"{address} {name}\n" for address in site.addresses)


def _become() -> str:
    """The shell command that runs its arguments as the user of this process."""
    if os.geteuid() == 0:
        return 'exec "$@"'
    return f'exec setpriv --reuid {os.getuid()} --regid {os.getgid()} --init-groups -- "$@"'
