"""The meaning of the messages of ssh, and of programs that carry its connections, such as
gcloud.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import (
    HostKeyError,
    KeyRefusedError,
    TransportError,
    TunnelError,
    TunnelRefusedError,
)
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import unreachable_error
from clusterctl.transport.login import login_of
from clusterctl.util import assets
from clusterctl.util.assets import fill_in, first_rule, read_table
from clusterctl.util.disk import read_text

_PROBLEM: Final = "clusterctl can't connect by SSH"
_CHANGED: Final = "REMOTE HOST IDENTIFICATION HAS CHANGED"
# ssh's own lines, among the words of the site. A server with `MaxAuthTries 1` ends the connection
# after the first key, also of an account that does not exist.
_REFUSED: Final = r"Permission denied \(|Too many authentication failures"
_UNANSWERED: Final = re.compile(rf"{_REFUSED}|Host key verification failed")
# No server has answered: a later attempt does no harm, and may succeed.
_NO_SERVER: Final = re.compile(
    r"^(ssh: |no answer within |Connection (to \S+ port \d+ )?timed out|Timeout, server "
    r"|stdio forwarding failed|channel \d+: open failed)",
    re.MULTILINE,
)
_MOST_LINES: Final = 20
_NO_KEY: Final = re.compile(
    r"(?:Load key |no such identity: )\"?(?P<file>[^\"\r\n]+?)\"?: (?P<why>[^\r\n]+)"
)
_MISTAKE: Final = re.compile(
    r"^(?P<file>/[^\r\n]+): terminating, \d+ bad configuration option"
    r"|^Bad owner or permissions on (?P<open>/[^\r\n]+)",
    re.MULTILINE,
)
_OPTION: Final = re.compile(r"--(project|zone)=(\S+)")


@dataclass(frozen=True, kw_only=True)
class _Rule(assets.ErrorRule):
    """An entry of tunnels.yaml. See there for its fields."""

    grace: bool = False
    jump: bool = False


@dataclass(frozen=True, slots=True)
class Proxy:
    """How an `ssh_config` reaches a host without a route.

    command: the words of the program that carries the connection. Empty: ssh connects directly.
    jump: the jump host.
    """

    command: tuple[str, ...] = ()
    jump: str | None = None

    @property
    def is_gcloud(self) -> bool:
        return bool(self.command) and Path(self.command[0]).name == "gcloud"


def entry_of(host: str, config: Path) -> Mapping[str, str]:
    """Return keyword -> value of the host in this `ssh_config`, which clusterctl wrote. No file, or
    no such host: {}.
    """
    _, _, rest = f"\n{read_text(config)}".partition(f"\nHost {host}\n")
    words = (line.split(maxsplit=1) for line in rest.partition("\nHost ")[0].split("\n"))
    return {pair[0]: pair[1] for pair in words if len(pair) > 1}


def proxy_of(host: str, config: Path) -> Proxy:
    """Return how this `ssh_config`, which clusterctl wrote, reaches the host. No file: directly."""
    try:
        command = shlex.split(entry_of(host, config).get("ProxyCommand", ""))
    except ValueError:
        # The file is damaged. ssh reports its own error.
        return Proxy()
    # The last word of an ssh is its host.
    is_jump = bool(command) and bool(entry_of(command[-1], config))
    return Proxy(tuple(command), command[-1] if is_jump else None)


def connection_error(
    host: str, config: Path, stderr: str, user: str | None = None
) -> TransportError:
    """Return the error for a host that ssh could not connect to. stderr: messages of ssh."""
    lines = [line.rstrip("\r") for line in stderr.strip().split("\n")]
    reason = "\n".join(line for line in lines if not line.startswith("@"))
    if (login := login_of(config)) is not None:
        return _login_error(login, config, stderr, reason)
    return _host_error(host, config, stderr, reason, user)


def _host_error(
    host: str, config: Path, stderr: str, reason: str, user: str | None
) -> TransportError:
    """Return the error for a host that clusterctl has configured. reason: ssh's messages."""
    if _CHANGED in stderr:
        return changed_key_error(host, config, reason)
    if "Host key verification failed" in stderr:
        return unknown_key_error(host, config, reason)
    # ssh also names keys of the user's that it can't read, and goes on with the others.
    is_users_login = user is None and Workspace(config.parent).adopts_hosts
    if not is_users_login and (damaged := _NO_KEY.search(stderr)):
        return damaged_key_error(host, damaged["file"], damaged["why"])
    if is_users_login and re.search(_REFUSED, stderr):
        login = entry_of(host, config).get("User", "you")
        problem = f"{host} refuses the SSH login of {login}"
        fix = (
            f"make `ssh -F {config} {host}` work: a key with a passphrase must be in ssh-agent, a "
            "Kerberos ticket must not have expired; if this is another person's login, run "
            "`clusterctl up`, which writes yours"
        )
        return KeyRefusedError(problem, where=str(config), why=reason, fix=fix, host=host)
    if re.search(_REFUSED, stderr):
        return refused_key_error(host, config, user, reason)
    mistake = find_mistake(stderr)
    if mistake is not None and mistake.where != str(config):
        mistake.host = host
        return mistake
    if "Can't open user config file" in stderr or mistake is not None:
        return incomplete_config_error(host, config, reason)
    proxy = proxy_of(host, config)
    if proxy.jump or proxy.is_gcloud:
        return _tunnel_error(host, config, reason, proxy)
    return unreachable_error(host, config, _PROBLEM, reason)


def changed_key_error(host: str, config: Path, why: str) -> HostKeyError:
    """Return the error for a host that clusterctl has configured, and that shows another key."""
    fix = (
        "if you reinstalled or replaced the host, run `clusterctl up`; "
        "otherwise another machine may be answering in its place"
    )
    problem = f"the host key of {host} has changed"
    return HostKeyError(problem, where=str(config), why=why, fix=fix, host=host)


def unknown_key_error(host: str, config: Path, why: str = "") -> HostKeyError:
    """Return the error for a host whose key is not in the known_hosts of the cluster."""
    fix = (
        "run `clusterctl up`, which records the hosts' keys; clusterctl trusts no key on first use"
    )
    problem = f"the host key of {host} is not known"
    return HostKeyError(problem, where=str(config), why=why, fix=fix, host=host)


def damaged_key_error(host: str, file: str, why: str) -> KeyRefusedError:
    """Return the error for a private key of the cluster that can't be read."""
    return KeyRefusedError(
        f"the SSH key for {host} can't be read",
        code="record-damaged",
        about="ssh-key",
        where=file,
        why=why,
        fix="restore the file from a backup; without it, `clusterctl down --discard` removes the "
        "cluster",
        host=host,
    )


def refused_key_error(host: str, config: Path, user: str | None, why: str) -> KeyRefusedError:
    """Return the error for a host that does not admit the cluster's key. user: default, the admin."""
    problem = f"{host} does not accept the cluster's SSH key" + (
        f" for user {user}" if user else ""
    )
    fix = (
        "run `clusterctl up` again, which installs the key; if it is refused again, `sudo "
        "journalctl -u 'ssh*'` on the host says why, such as AllowUsers or FIPS mode"
    )
    return KeyRefusedError(problem, where=str(config), why=why, fix=fix, host=host)


def incomplete_config_error(host: str, config: Path, why: str = "") -> TransportError:
    """Return the error for a host that the `ssh_config` of the cluster does not have."""
    return TransportError(
        f"the SSH configuration has no valid entry for {host}",
        code="record-damaged",
        about="ssh-config",
        where=str(config),
        why=why,
        fix="run `clusterctl up`, which writes the SSH configuration",
        host=host,
    )


def find_mistake(stderr: str) -> TransportError | None:
    """Return the error for an ssh_config that ssh can't read; None if ssh has read all. stderr:
    messages of ssh.
    """
    if (match := _MISTAKE.search(stderr)) is None:
        return None
    return TransportError(
        "ssh can't read your SSH configuration",
        code="file-invalid",
        about="ssh-config",
        where=match["file"] or match["open"],
        why=stderr.strip(),
        fix="correct the file: plain `ssh` refuses it, too",
    )


def may_need_answers(stderr: str) -> bool:
    """Return whether ssh failed because it may not ask the user for a password, a code or a
    confirmation.
    """
    return _UNANSWERED.search(stderr) is not None and _CHANGED not in stderr


def _login_error(login: str, config: Path, stderr: str, reason: str) -> TransportError:
    """Return the error for the login of an attached cluster. reason: messages of ssh and of the
    site.
    """
    reason = "\n".join(reason.split("\n")[-_MOST_LINES:])
    if _CHANGED in stderr:
        fix = (
            f"if the site has replaced the machine, remove its old key, which `ssh {login}` names; "
        )
        fix += "otherwise another machine may be answering in its place"
        problem = f"the host key of {login} has changed"
        return HostKeyError(problem, where=str(config), why=reason, fix=fix, host=login)
    if may_need_answers(stderr):
        fix = (
            f"log in once in a terminal with `clusterctl ssh --cluster {config.parent.name} -- "
            "true`; the connection stays open until it is unused for 8 h"
        )
        # The cluster has no name before `attach` ends.
        if not Workspace(config.parent).inventory.exists():
            fix = (
                f"run `ssh {login}` once in a terminal, or `clusterctl attach` there if ssh asks "
                "each time"
            )
        return KeyRefusedError(
            f"{login}: ssh can't log in without asking you, and this command may not ask",
            about="needs-answer",
            where=str(config),
            why=reason,
            fix=fix,
            host=login,
        )
    if not reason or _NO_SERVER.search(reason):
        return unreachable_error(login, config, _PROBLEM, reason)
    return KeyRefusedError(
        f"{login} refused the login",
        code="login-refused",
        where=str(config),
        why=reason,
        fix=f"wait until the site accepts logins, which `ssh {login}` shows; clusterctl does not "
        "try again",
        host=login,
    )


def login_refused_error(config: Path) -> KeyRefusedError:
    """Return the error for a login of an attached cluster that failed after ssh has asked the
    user.
    """
    login = login_of(config)
    fix = f"see ssh's messages above; `ssh -v {login}` tells more"
    return KeyRefusedError(
        f"{login} refused the login", code="login-refused", where=str(config), fix=fix
    )


def _tunnel_error(
    host: str, config: Path, reason: str, proxy: Proxy
) -> TunnelError | TunnelRefusedError:
    """Return the error for a host that gcloud or an open jump host did not connect to. reason:
    messages.
    """
    tunnel = proxy.jump or host
    rules = read_table(Path(__file__).with_name("data") / "tunnels.yaml", tuple[_Rule, ...])
    match = first_rule((rule for rule in rules if rule.jump == bool(proxy.jump)), reason)
    # After gcloud's error come advice, a traceback and ssh's message about the closed connection.
    first_line = next((line for line in reason.split("\n") if line.startswith("ERROR: ")), reason)
    if match is None:
        plain = unreachable_error(host, config, _PROBLEM, first_line)
        return TunnelError(plain.what, where=plain.where, why=plain.why, fix=plain.fix, host=host)
    rule, _ = match
    words = {"host": host, "tunnel": tunnel, **dict(_OPTION.findall(" ".join(proxy.command)))}
    kind = TunnelError if rule.retryable else TunnelRefusedError
    error = kind(
        f"{host}: {_PROBLEM}",
        code=rule.code,
        about=rule.about,
        where=str(config),
        why=f"{fill_in(rule.cause, words)}\n{first_line}",
        fix=fill_in(rule.fix, words),
        host=host,
    )
    error.has_grace = rule.grace
    return error
