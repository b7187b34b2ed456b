"""Logging in to on-prem machines: first as their owner, later as clusterctl's admin account.

The machine that runs clusterctl can be a node too. On this machine, the owner is already logged in.
The admin account logs in over SSH, as on other nodes, but to an sshd that serves a single
connection and opens no port. The script GATE starts this sshd as root. A line in sudoers lets the
owner run GATE as root, and nothing else. remote_account.py creates the script and the line.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    ProvisionError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.providers.base import NO_PROMPTS, OfferedKey, Prompts
from clusterctl.providers.onprem.access import (
    AccessError,
    HostKeys,
    JumpConnections,
    access_config,
    address_of,
    explain,
    no_ssh,
    ssh_host,
)
from clusterctl.spec.hosts import OnpremHost, is_this_machine
from clusterctl.spec.names import ADMIN_ID, ADMIN_USER
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import (
    MARK,
    Connect,
    Conversation,
    Transport,
    remote_program,
    shown_command,
    wrap_command,
)
from clusterctl.transport.openssh import start_conversation
from clusterctl.transport.ssh import SSHTransport
from clusterctl.util import process
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import NO_LIMIT, Limit

GATE: Final = Path("/etc/clusterctl/sshd")
# setsid removes the terminal. With a terminal, sudo would insert its own pseudo-terminal.
PROXY: Final = ("setsid", "--wait", "sudo", "-n", str(GATE))
_PLACES: Final = "/usr/sbin:/sbin:/usr/bin"
# Folder that the Ansible roles create on nodes.
_JOBS: Final = Path("/opt/clusterctl")
_PACKAGE: Final = Path(__file__).resolve().parents[2]


def check_this_machine(host: str) -> AccessError | None:
    """Return an error if the machine that runs clusterctl can't be the host ``host`` of the
    cluster.
    """
    if _JOBS in (environment := Path(sys.prefix).resolve(), *environment.parents):
        cause = (
            f"clusterctl is installed in {environment}, but nodes keep the environment of jobs "
            f"in {_JOBS}"
        )
        fix = "install clusterctl elsewhere: with pipx, or a virtual environment in your home"
        return AccessError.of(host, "own-place", cause, fix)
    if shutil.which("sshd", path=_PLACES) is None:
        cause = (
            "no sshd is installed, and clusterctl starts one to reach its account on this machine"
        )
        fix = (
            "install the package openssh-server; its service need not run, and no port need be open"
        )
        return AccessError.of(host, "no-sshd", cause, fix)
    return None


def connect(host: str, config: Path) -> SSHTransport:
    """Connect to a host as the admin account. The host may be the machine that runs clusterctl."""
    if is_this_machine(address_of(host, config)) and not GATE.exists():
        summary = f"{host} has no clusterctl account"
        reason = f"{GATE} does not exist"
        fix = "run `clusterctl up`, which creates the account"
        raise TransportError(summary, code="no-admin-account", why=reason, host=host, fix=fix)
    return SSHTransport(host, config)


def is_installation(path: str) -> bool:
    """Return whether a path on this machine belongs to the running installation of clusterctl."""
    candidate = Path(path)
    script = shutil.which("clusterctl")
    parts = [
        Path(sys.prefix),
        Path(sys.prefix).resolve(),
        _PACKAGE,
        *([Path(script)] if script else []),
    ]
    return candidate.parent == _PACKAGE.parent or any(
        candidate in (part, *part.parents) for part in parts
    )


# Runs a command (host, argv, stdin) as root and returns its standard output.
Root = Callable[[str, Sequence[str], bytes], str]

_PROGRAM: Final = remote_program("clusterctl.providers.onprem.remote_account")
_PYTHON: Final = ("/usr/bin/python3", "-I", "-S")
_UNIT: Final = "clusterctl-leave"
_GONE_S: Final = 30.0
_PAUSE_S: Final = 0.5
ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Claim:
    """The cluster that a machine joins, and the public key that may log in to the machine.

    origin: the first three fields of ``remote_account.ORIGIN``, for a machine that joins.
    owner: None, unless the machine itself runs clusterctl. Then clusterctl logs in to an sshd of
        its own, which the account ``uid`` may start and which has the host key in the file
        ``host_key``.
    """

    cluster_id: str
    cluster: str
    key: str
    owner: Mapping[str, object] | None = None
    origin: Mapping[str, str] = field(default_factory=dict)

    def request(self, do: str, host: str) -> str:
        request = {
            "do": do,
            "id": self.cluster_id,
            "name": self.cluster,
            "host": host,
            "user": ADMIN_USER,
        }
        more: dict[str, object] = {"owner": self.owner} if self.owner else {}
        more["origin"] = self.origin
        return json.dumps({**request, "number": ADMIN_ID, "key": self.key, **more})


def create_account(host: str, root: Root, claim: Claim, login: Connect) -> None:
    """Create the admin account on a host, log in to it and test sudo. A repeated call changes
    nothing.

    If a new account can't log in or use sudo, it is removed again, because `down` would fail in the
    same way.
    """
    stdout = root(host, (*_PYTHON, "-", claim.request("join", host)), _PROGRAM.encode())
    try:
        answer = json.loads(stdout)
        if not answer["ok"]:
            raise AccessError.of(
                host, str(answer["code"]), str(answer["cause"]), str(answer["fix"])
            )
    except (ValueError, KeyError, TypeError) as exc:
        raise ProvisionError(
            f"{host} did not return valid JSON", code="answer-garbled", why=stdout[:500], host=host
        ) from exc
    try:
        check_sudo(login(host))
    except UnreachableError:
        raise
    except TransportError as exc:
        if answer["is_new"]:
            with suppress(ClusterctlError):
                root(host, (*_PYTHON, "-", claim.request("leave", host)), _PROGRAM.encode())
        raise _refusal_of(host, exc, answer["allowed"]) from exc


def _refusal_of(host: str, exc: TransportError, allowed: Sequence[str]) -> AccessError:
    """Return why the admin account failed to log in, or to become root after the login.

    allowed: sshd's lists of accounts.
    """
    if isinstance(exc, CommandError):
        cause = f"{ADMIN_USER} can't become root on this host: {exc.why or exc.what}"
        fix = "check that /etc/sudoers includes /etc/sudoers.d, and that no later line overrides it"
        return AccessError.of(host, "no-sudo", cause, fix)
    cause = f"the host's sshd refuses {ADMIN_USER}: {'; '.join(allowed) or exc.why or exc.what}"
    fix = (
        f"allow {ADMIN_USER} in AllowUsers or AllowGroups of sshd_config, or "
        "/etc/security/access.conf"
    )
    return AccessError.of(host, "login-refused", cause, fix)


def check_sudo(transport: Transport) -> None:
    """Check that the connected account can run sudo without a password, then close the
    connection.
    """
    with closing(transport):
        transport.run(("sudo", "-n", "true"), timeout_s=ANSWER_S)


def remove_account(host: str, claim: Claim, login: Connect) -> None:
    """Log in as the admin account and delete the account. Return when the account can no longer log
    in.
    """
    with closing(login(host)) as transport:
        unit = ("systemd-run", "--quiet", "--collect", f"--unit={_UNIT}")
        transport.run(("sudo", "-n", *unit, *_PYTHON, "-c", _PROGRAM, claim.request("leave", host)))
    deadline = time.monotonic() + _GONE_S
    while _lets_in(host, login):
        if time.monotonic() > deadline:
            cause = f"the account {ADMIN_USER} still exists"
            fix = (
                f"see `journalctl -u {_UNIT}` on this host, and run `userdel --remove --force "
                f"{ADMIN_USER}`"
            )
            raise AccessError.of(host, "account", cause, fix)
        time.sleep(_PAUSE_S)


def _lets_in(host: str, login: Connect) -> bool:
    """Return whether the host still accepts the admin account's login. True if the host does not
    answer.
    """
    try:
        with closing(login(host)) as transport:
            transport.run(("true",))
    except UnreachableError:
        return True
    except TransportError:
        return False
    return True


OWNER_ANSWER_S: Final = 120.0
_SSH_FAILED: Final = 255
# Rules match sudo's messages, so they must be English. Cached credentials (-k) would change the
# messages.
_SUDO: Final = ("env", "LC_ALL=C", "sudo", "-k")
_ASKING: Final = ("-S", "-p", "")
# With `requiretty`, sudo refuses a session without a terminal. This program gives the session of its
# arguments a terminal, and leaves their stdin, stdout and stderr as they are.
_TERMINAL: Final = """\
import fcntl, os, pty, sys, termios
main, end = pty.openpty()
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(end, termios.TIOCSCTTY, 0)
    os.execvp(sys.argv[1], sys.argv[1:])
os.close(end)
sys.exit(os.waitpid(pid, 0)[1] >> 8)
"""


@dataclass(frozen=True, slots=True)
class _Sudo:
    """How the owner runs sudo on a host.

    words: the command line, up to the options for passwords. asks: sudo asks for the password.
    """

    words: Sequence[str]
    asks: bool


def _needs_password(error: ClusterctlError) -> bool:
    return isinstance(error, AccessError) and error.code == "sudo-password"


class Login:
    """The owner's SSH logins to the machines. ``__init__`` writes the ssh_config for these
    logins.
    """

    def __init__(
        self,
        machines: Mapping[str, OnpremHost],
        workspace: Workspace,
        prompts: Prompts = NO_PROMPTS,
        *,
        answer_s: float = OWNER_ANSWER_S,
    ) -> None:
        """answer_s: time limit of each command, in seconds."""
        self.workspace = workspace
        self.answer_s = answer_s
        self.prompts = prompts
        self._machines = machines
        self._config = workspace.access_config
        self._sudo: dict[str, _Sudo] = {}
        write_atomic(self._config, access_config(machines, workspace))
        if prompts.accepted:
            workspace.confirmed.touch(mode=0o600)
        self._jumps = JumpConnections(self._config)
        self._keys = HostKeys(workspace.trusted_hosts, self._jumps, accepted=prompts.accepted)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._machines)

    def run(
        self, host: str, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float | None = None
    ) -> str:
        """Run a command on a host as the owner. Return the command's standard output."""
        timeout_s = timeout_s or self.answer_s
        try:
            line, script = wrap_command(argv)
            done = process.run(self._words(host, line), stdin=script + stdin, timeout_s=timeout_s)
        except subprocess.TimeoutExpired as exc:
            summary = f"{host} does not answer"
            fix = "check the host's load"
            reason = f"`{shown_command(argv)}` took longer than {timeout_s:g} s"
            raise UnreachableError(summary, why=reason, host=host, fix=fix) from exc
        except OSError as exc:
            raise no_ssh(exc) from exc
        if done.rc == 0:
            return done.stdout.partition(MARK.decode())[2]
        if done.rc == _SSH_FAILED or "sudo" in argv:
            peer = ssh_host(host, self._machines[host])
            refusal = explain(
                done.stderr, host=host, user=peer.user or getpass.getuser(), address=peer.address
            )
            if refusal is not None:
                raise refusal
        text = f"`{shown_command(argv)}` failed with exit status {done.rc}"
        raise CommandError(
            text, code="login-failed", rc=done.rc, stderr=done.stderr, where=host, host=host
        )

    def converse(self, host: str, argv: Sequence[str]) -> AbstractContextManager[Conversation]:
        """Start a command on a host as the owner, and exchange messages with it by stdin and
        stdout.
        """
        remote = None if self.is_here(host) else (host, argv)
        line, script = wrap_command(argv)
        return start_conversation(
            self._words(host, line), silence_s=self.answer_s, remote=remote, script=script
        )

    def _words(self, host: str, line: str) -> Sequence[str]:
        if self.is_here(host):
            return ("sh", "-c", line)
        self._jumps.open(ssh_host(host, self._machines[host]))
        return ("ssh", "-F", str(self._config), "-T", "--", host, line)

    def root(self, host: str, argv: Sequence[str], stdin: bytes = b"") -> str:
        """Run a command on a host as root. Return the standard output. Raise the same errors as
        ``run``.
        """
        if self._machines[host].become == "none":
            return self.run(host, argv, stdin)
        sudo = self._sudo_of(host, self.prompts.password)
        if sudo.asks:
            stdin = f"{self.prompts.password()}\n".encode() + stdin
            return self.run(host, (*sudo.words, *_ASKING, "--", *argv), stdin)
        return self.run(host, (*sudo.words, "-n", "--", *argv), stdin)

    def is_here(self, host: str) -> bool:
        return self._machines[host].is_here

    def _sudo_of(self, host: str, password: Callable[[], str | None]) -> _Sudo:
        if host not in self._sudo:
            try:
                self._sudo[host] = self._first_sudo(host, _SUDO, password)
            except AccessError as exc:
                if exc.code != "sudo-terminal":
                    raise
                on_terminal = (*_PYTHON, "-c", _TERMINAL, *_SUDO)
                self._sudo[host] = self._first_sudo(host, on_terminal, password)
        return self._sudo[host]

    def _first_sudo(
        self, host: str, words: Sequence[str], password: Callable[[], str | None]
    ) -> _Sudo:
        try:
            self.run(host, (*words, "-n", "true"))
        except AccessError as exc:
            if not _needs_password(exc) or (text := password()) is None:
                raise
            self.run(host, (*words, *_ASKING, "true"), f"{text}\n".encode())
            return _Sudo(words, asks=True)
        return _Sudo(words, asks=False)

    def try_sudo(
        self, hosts: Sequence[str], limit: Limit = NO_LIMIT
    ) -> Mapping[str, ClusterctlError]:
        """Try sudo without a password on these hosts. Return host -> error, where that fails."""
        using = [host for host in hosts if self._machines[host].become != "none"]
        free = partial(self._sudo_of, password=lambda: None)
        return call_on_hosts(using, free, limit=limit)[1]

    def ask_password(self, failed: Mapping[str, ClusterctlError]) -> Mapping[str, ClusterctlError]:
        """Ask the user for the sudo password if a host needs it. Return the hosts that failed for
        another reason. ``failed``: from ``try_sudo``.
        """
        lost = {host: exc for host, exc in failed.items() if not _needs_password(exc)}
        if len(lost) < len(failed):
            # The answer is kept.
            self.prompts.password()
        return lost

    def check_keys(self, hosts: Sequence[str]) -> None:
        """Raise a UsageError if a key file in the spec is missing. With ssh-agent, FILE.pub is
        enough.
        """
        keys = {name: key for name in hosts if (key := self._machines[name].key)}
        # Unlike Path.is_file, os.path.isfile does not raise in a folder that we can't read.
        missing = {
            n: key for n, key in keys.items() if not any(map(os.path.isfile, (key, f"{key}.pub")))
        }
        if missing:
            text = "; ".join(
                f"the key {key} does not exist" for key in dict.fromkeys(missing.values())
            )
            fix = "correct `key` in the spec: relative to the spec's folder, or from ~"
            raise UsageError(text, code="key-file-missing", where=", ".join(missing), fix=fix)

    def trust(
        self, hosts: Sequence[str], limit: Limit = NO_LIMIT, *, find_all: bool = False
    ) -> Mapping[str, ClusterctlError]:
        """Find a trusted host key of each host. Return host -> error, for hosts without a trusted
        key.
        """
        here = [name for name in hosts if self.is_here(name)]
        lost = {name: exc for name in here if (exc := check_this_machine(name)) is not None}
        remote = {name: self._machines[name] for name in hosts if name not in here}
        failed = self._keys.trust(remote, self._confirm, limit, find_all=find_all) if remote else {}
        return {**lost, **failed}

    def _confirm(self, offered: Sequence[OfferedKey]) -> None:
        self.prompts.confirm(offered)
        self.workspace.confirmed.touch(mode=0o600)

    def key_of(self, host: str) -> str:
        """Return a host's trusted host key. On this machine: that of the sshd that clusterctl
        starts.
        """
        return self.workspace.draw_host_key() if self.is_here(host) else self._keys.key_of(host)

    def claim(self, cluster_id: str, cluster: str) -> Claim:
        """Return the data that a machine needs to join this cluster. It is the same for all
        machines.
        """
        here = any(map(self.is_here, self.hosts))
        owner = {"uid": os.getuid(), "host_key": str(self.workspace.host_key)} if here else None
        origin = {
            "created_by": getpass.getuser(),
            "created_on": socket.gethostname(),
            "created_in": str(self.workspace.root),
        }
        key = self.workspace.public_key.read_text().strip()
        return Claim(cluster_id, cluster, key, owner, origin)

    def proxies(self, hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """Return host -> ProxyCommand, for this machine and hosts behind a jump host. `%p` is the
        port.
        """
        proxies: dict[str, tuple[str, ...]] = {}
        for name in hosts:
            target = ssh_host(name, self._machines[name])
            if self.is_here(name):
                proxies[name] = PROXY
            elif jump := target.jump:
                proxies[name] = (
                    "ssh",
                    "-F",
                    str(self._config),
                    "-W",
                    f"[{target.host}]:%p",
                    jump.alias,
                )
        return proxies
