"""The login of an attached cluster, to which clusterctl connects by the user's own SSH
configuration.

Others run an attached cluster. `attach` is given an SSH destination, or HERE on a login node of the
cluster.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from clusterctl.errors import ClusterctlError, TransportError, UsageError
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.disk import read_text

# The login as a host of the cluster, in hosts.json.
LOGIN_HOST: Final = "login"
# The destination that stands for this machine.
HERE: Final = "."
# The variables that a command on this machine gets of this program's, as a login by SSH would set
# them.
_KEPT: Final = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
_OWN_CONFIG: Final = "~/.ssh/config"
# ssh itself refuses these characters, and a backslash at the end. `$` is refused too: commands in
# the user's ssh_config may have the name in them.
_USER: Final = r"""(?:(?P<user>(?!-)[^:/\s\x00-\x1f'"`$;&<>|(){}]+)(?<!\\)@)?"""
_NAME: Final = r"[\w.%+][\w.%+-]*"
_IPV6: Final = r"(?:[0-9a-fA-F]*:){2,}[0-9a-fA-F.]*"
_PLAIN: Final = re.compile(rf"{_USER}(?P<host>{_NAME}|{_IPV6})", re.ASCII)
_PORT: Final = r"(?P<port>:[0-9]{1,5})?"
_LAST_PORT: Final = 65535
_URI: Final = re.compile(rf"ssh://{_USER}(?P<host>{_NAME}|\[{_IPV6}\]){_PORT}/?", re.ASCII)
# The size of the count of commands at which lines older than an hour are removed.
_MOST_COUNTED: Final = 1 << 16  # bytes
# Time for ssh to connect, unless the user has set another: to a login without proxy, and behind a
# proxy such as a jump host, which may wait for the user's second factor. The second is no round
# number, which a user might set.
_DIRECT_S: Final = 15
_PROXIED_S: Final = 61
# The user's settings come first; the last lines apply only to what the user has not set. A command
# of the user's own would replace every command of clusterctl.
_CONFIG: Final = """\
# Written by clusterctl; use it with: ssh -F THIS_FILE {login}
RemoteCommand none
Include {own_config}
Include /etc/ssh/ssh_config
Host *
    ConnectTimeout {connect_s}
    ServerAliveInterval 15
    ServerAliveCountMax 4
"""
# ssh passes the name of its file to the ssh that connects to a jump host, but no options. So no ssh
# asks, and the words with which a site refuses a login, which ssh prints at INFO, are not lost.
_BACKGROUND_CONFIG: Final = """\
# Written by clusterctl: ssh_config for commands that must not ask for a password
BatchMode yes
ClearAllForwardings yes
LogLevel INFO
Include "{config}"
"""


def checked_login(login: str) -> str:
    """Return the login in the form to write down: HERE if it is this machine, otherwise unchanged.

    login: `HOST`, `USER@HOST`, `ssh://USER@HOST:PORT`, an alias of ~/.ssh/config, or HERE. Raises
        UsageError.
    """
    if login == HERE:
        return HERE
    match = _URI.fullmatch(login) or _PLAIN.fullmatch(login)
    port = match.groupdict().get("port") if match else None
    is_port = port is None or 0 < int(port[1:]) <= _LAST_PORT
    if match is None or not is_port:
        raise UsageError(
            f"{login!r} is no destination for ssh",
            about="login",
            fix="use USER@HOST, ssh://USER@HOST:PORT, an alias of your ~/.ssh/config, "
            f"or `{HERE}` on a login node of the cluster",
        )
    name = os.uname().nodename
    is_here = match["host"] in {"localhost", name, name.partition(".")[0]}
    is_me = match["user"] in {None, pwd.getpwuid(os.geteuid()).pw_name}
    return HERE if is_here and is_me and not port else login


def write_login_files(login: str, workspace: Workspace, own_config: str = _OWN_CONFIG) -> None:
    """Write the ssh_config files and the login of an attached cluster. Raises UsageError.

    Unchanged files are not replaced: that would end open connections. own_config: the user's
        ssh_config.
    """
    login = checked_login(login)
    write_atomic(workspace.login, f"{login}\n")
    config = _CONFIG.format(login=login, own_config=own_config, connect_s=_PROXIED_S)
    write_atomic(workspace.ssh_config, config)
    write_atomic(
        workspace.background_config,
        _BACKGROUND_CONFIG.format(config=workspace.ssh_config.absolute()),
    )


def connect_options(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options with which ssh waits less for the server of a login without proxy.

    settings: ssh's, as `ssh -G` prints them. A time that the user has set stays.
    """
    is_proxied = not {"proxyjump", "proxycommand"}.isdisjoint(settings)
    if is_proxied or settings.get("connecttimeout") != str(_PROXIED_S):
        return ()
    return ("-o", f"ConnectTimeout={_DIRECT_S}")


def login_of(config: Path) -> str | None:
    """Return the login of the attached cluster whose `ssh_config` this is; None if it is not
    attached.
    """
    try:
        return Workspace(config.parent).login.read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def here_words(command: str | Sequence[str]) -> list[str]:
    """Return the words that run a command of a login on this machine. Empty command: a login shell.

    command: a line for a shell, or words. clusterctl's own variables do not reach the command: they
    would reach the jobs that it submits.
    """
    environment = [f"{name}={value}" for name, value in os.environ.items() if name in _KEPT]
    shell = os.environ.get("SHELL", "/bin/sh")
    words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    return ["env", "-i", *environment, *(words or [shell, "-l"])]


def no_login_error(host: str) -> TransportError:
    """Return the error for a host of an attached cluster that is not its login."""
    return TransportError(
        f"{host}: clusterctl logs in only to the login node of an attached cluster",
        about="not-the-login",
        fix=f"for a shell on a compute node: `clusterctl shell --slurm=--nodelist={host}`",
        host=host,
    )


def count_call(path: Path) -> None:
    """Add a line with the time to the count of commands. Without an exception: no command depends
    on it.
    """
    with suppress(OSError, ClusterctlError):
        with path.open("a") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"{time.time():.0f}\n")
            is_large = file.tell() > _MOST_COUNTED
        if is_large:
            write_atomic(path, "".join(f"{second}\n" for second in calls_of_last_hour(path)))


def calls_of_last_hour(path: Path) -> list[int]:
    """Return the times of the commands that ran on the login in the last hour."""
    seconds = [int(line) for line in read_text(path).splitlines() if line.isdecimal()]
    return [second for second in seconds if second > time.time() - 3600]  # seconds
