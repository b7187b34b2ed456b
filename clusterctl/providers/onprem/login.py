"""Logging in to on-prem machines: through their owner's access first, through the admin account afterwards.

The machine that clusterctl runs on can be a node, too: its owner is logged in already, and no port is opened.
The admin account comes in over SSH as everywhere, by an sshd that is started for one connection alone: GATE
starts it, as root, and a line of sudoers lets the owner run just that. remote_account.py makes both.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
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
    access_config,
    address_of,
    explain,
    no_ssh,
    ssh_host,
)
from clusterctl.spec.common import ADMIN_ID
from clusterctl.spec.hosts import OnpremHost, is_this_machine
from clusterctl.spec.names import ADMIN_USER
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import MARK, Connect, Conversation, Transport, remote_program, shown, wrapped
from clusterctl.transport.openssh import talking
from clusterctl.transport.ssh import SSHTransport
from clusterctl.util import process
from clusterctl.util.progress import NO_LIMIT, Limit

GATE: Final = Path("/etc/clusterctl/sshd")
# Without a terminal: sudo would put a pseudo-terminal of its own in between.
PROXY: Final = ("setsid", "--wait", "sudo", "-n", str(GATE))
_PLACES: Final = "/usr/sbin:/sbin:/usr/bin"
_JOBS: Final = Path("/opt/clusterctl")  # of the roles
_PACKAGE: Final = Path(__file__).resolve().parents[2]


def check_this_machine(host: str) -> AccessError | None:
    """What keeps the machine from being a host; None if nothing does."""
    if _JOBS in (one := Path(sys.prefix).resolve(), *one.parents):
        cause = f"clusterctl itself is installed in {one}, and nodes have the environment of jobs in {_JOBS}"
        fix = "install clusterctl elsewhere: pipx, or a virtual environment in your home"
        return AccessError.of(host, "own-place", cause, fix)
    if shutil.which("sshd", path=_PLACES) is None:
        cause = (
            "there is no sshd: clusterctl talks with its account here through one that it starts by itself"
        )
        fix = "install the package openssh-server; no service of it needs to run, and no port to be open"
        return AccessError.of(host, "no-sshd", cause, fix)
    return None


def connect(host: str, config: Path) -> SSHTransport:
    """The way to a machine through our own account, be it this one or another."""
    if is_this_machine(address_of(host, config)) and not GATE.exists():
        raise TransportError(
            f"{host} has no account of ours", code="no-admin-account", why=f"there is no {GATE}", host=host
        )
    return SSHTransport(host, config)


def is_installation(path: str) -> bool:
    """Whether something that is called like clusterctl is the installation that runs, or a part of it."""
    there = Path(path)
    script = shutil.which("clusterctl")
    own = [Path(sys.prefix), Path(sys.prefix).resolve(), _PACKAGE, *([Path(script)] if script else [])]
    return there.parent == _PACKAGE.parent or any(there in (one, *one.parents) for one in own)


Root = Callable[[str, Sequence[str], bytes], str]  # runs a command as root on a host

_PROGRAM: Final = remote_program("clusterctl.providers.onprem.remote_account")
_PYTHON: Final = ("/usr/bin/python3", "-I", "-S")
_UNIT: Final = "clusterctl-leave"
_GONE_S: Final = 30.0
_PAUSE_S: Final = 0.5
ANSWER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose a machine becomes: the cluster by id and name, and the key that may log in.

    ``owner`` has the ``uid`` that may open the gate and the ``host_key`` (a file) of the sshd behind it,
    where the machine is the one that clusterctl runs on.
    """

    cluster_id: str
    cluster: str
    key: str
    owner: Mapping[str, object] | None = None

    def request(self, do: str, host: str) -> str:
        said = {"do": do, "id": self.cluster_id, "name": self.cluster, "host": host, "user": ADMIN_USER}
        more = {"owner": self.owner} if self.owner else {}
        return json.dumps({**said, "number": ADMIN_ID, "key": self.key, **more})


def create_account(host: str, root: Root, claim: Claim, login: Connect) -> None:
    """Make the account on a host, and log in as it; doing it again changes nothing."""
    said = root(host, (*_PYTHON, "-", claim.request("join", host)), _PROGRAM.encode())
    try:
        answer = json.loads(said)
        if not answer["ok"]:
            raise AccessError.of(host, str(answer["code"]), str(answer["cause"]), str(answer["fix"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise ProvisionError(
            f"{host} gave no usable answer", code="answer-garbled", why=said[:500], host=host
        ) from exc
    try:
        check_sudo(login(host))
    except UnreachableError:
        raise
    except CommandError as exc:  # it is in
        cause = f"{ADMIN_USER} may not become root there: {exc.why or exc.what}"
        fix = "see that /etc/sudoers includes /etc/sudoers.d, and that nothing later takes the right away"
        raise AccessError.of(host, "no-sudo", cause, fix) from exc
    except TransportError as exc:
        allowed = "; ".join(answer.get("allowed", ()))
        cause = f"sshd there does not let {ADMIN_USER} in: {allowed or exc.why or exc.what}"
        fix = f"let {ADMIN_USER} in: AllowUsers or AllowGroups of sshd_config, or /etc/security/access.conf"
        raise AccessError.of(host, "login-refused", cause, fix) from exc


def check_sudo(transport: Transport) -> None:
    """Become root by our account, and hang up."""
    with closing(transport):
        transport.run(("sudo", "-n", "true"), timeout_s=ANSWER_S)


def remove_account(host: str, claim: Claim, login: Connect) -> None:
    """Take the account away, as the account itself; it has gone when this returns."""
    with closing(login(host)) as transport:
        unit = ("systemd-run", "--quiet", "--collect", f"--unit={_UNIT}")
        transport.run(("sudo", "-n", *unit, *_PYTHON, "-c", _PROGRAM, claim.request("leave", host)))
    deadline = time.monotonic() + _GONE_S
    while _lets_in(host, login):
        if time.monotonic() > deadline:
            cause = f"the account {ADMIN_USER} is still there"
            fix = f"see `journalctl -u {_UNIT}` there; userdel --remove --force {ADMIN_USER}"
            raise AccessError.of(host, "account", cause, fix)
        time.sleep(_PAUSE_S)


def _lets_in(host: str, login: Connect) -> bool:
    """Whether the account still can log in. No answer is none: a connection may be cut as it is made."""
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
# Their messages are read: they must be English. Credentials that sudo remembers would change what it reads.
_SUDO: Final = ("env", "LC_ALL=C", "sudo", "-k")


class Login:
    """The machines as their owner logs in to them. Its ssh_config is written when this is made."""

    def __init__(
        self,
        machines: Mapping[str, OnpremHost],
        workspace: Workspace,
        prompts: Prompts = NO_PROMPTS,
        *,
        answer_s: float = OWNER_ANSWER_S,
    ) -> None:
        """``answer_s``: how long a command may take."""
        self.workspace = workspace
        self.answer_s = answer_s
        self.prompts = prompts
        self._machines = machines
        self._config = workspace.access_config
        self._asks: dict[str, bool] = {}  # whether sudo wants the password, once that is known
        write_atomic(self._config, access_config(machines, workspace.trusted_hosts))
        if prompts.accepted:
            workspace.confirmed.touch(mode=0o600)
        self._keys = HostKeys(workspace.trusted_hosts, self._config, accepted=prompts.accepted)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._machines)

    def run(
        self, host: str, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float | None = None
    ) -> str:
        """Run a command as the user; its standard output."""
        timeout_s = timeout_s or self.answer_s
        try:
            line, script = wrapped(argv)
            done = process.run(self._words(host, line), stdin=script + stdin, timeout_s=timeout_s)
        except subprocess.TimeoutExpired as exc:
            what, why = f"{host} does not answer", f"`{shown(argv)}` did not end within {timeout_s:g} s"
            raise UnreachableError(what, why=why, host=host, fix="look at the host's load") from exc
        except OSError as exc:
            raise no_ssh(exc) from exc
        if done.rc == 0:
            return done.stdout.partition(MARK.decode())[2]
        if done.rc == _SSH_FAILED or "sudo" in argv:
            to = ssh_host(host, self._machines[host])
            known = explain(done.stderr, host=host, user=to.user or getpass.getuser(), address=to.where)
            if known is not None:
                raise known
        what = f"`{shown(argv)}` failed with exit status {done.rc}"
        raise CommandError(what, code="login-failed", rc=done.rc, stderr=done.stderr, where=host, host=host)

    def converse(self, host: str, argv: Sequence[str]) -> AbstractContextManager[Conversation]:
        """Start a command as the user; see ``Transport.converse``."""
        remote = None if self.is_here(host) else (host, argv)
        line, script = wrapped(argv)
        return talking(self._words(host, line), silence_s=self.answer_s, remote=remote, script=script)

    def _words(self, host: str, line: str) -> Sequence[str]:
        ssh = ("ssh", "-F", str(self._config), "-T", "--", host)
        return (*(("sh", "-c") if self.is_here(host) else ssh), line)

    def root(self, host: str, argv: Sequence[str], stdin: bytes = b"") -> str:
        """Run a command as root; its standard output. Errors as of ``run``."""
        if self._machines[host].become == "none":
            return self.run(host, argv, stdin)
        if self._wants_password(host):
            password = f"{self.prompts.password}\n".encode()
            return self.run(host, (*_SUDO, "-S", "-p", "", "--", *argv), password + stdin)
        return self.run(host, (*_SUDO, "-n", "--", *argv), stdin)

    def is_here(self, host: str) -> bool:
        return self._machines[host].is_here

    def _wants_password(self, host: str) -> bool:
        """Whether sudo asks for one there. A wrong one is tried once, with nothing behind it."""
        if host in self._asks:
            return self._asks[host]
        asks = False
        try:
            self.run(host, (*_SUDO, "-n", "true"))
        except AccessError as exc:
            if exc.code != "sudo-password" or self.prompts.password is None:
                raise
            self.run(host, (*_SUDO, "-S", "-p", "", "true"), f"{self.prompts.password}\n".encode())
            asks = True
        self._asks[host] = asks
        return asks

    def check_keys(self, hosts: Sequence[str]) -> None:
        """Refuse hosts whose key, where the spec names one, is not here; an agent needs the public half."""
        keys = {name: key for name in hosts if (key := self._machines[name].key)}
        # os.path.isfile is False, too, in a folder that we may not look into.
        missing = {n: key for n, key in keys.items() if not any(map(os.path.isfile, (key, f"{key}.pub")))}
        if missing:
            what = "; ".join(f"the key {key} is not here" for key in dict.fromkeys(missing.values()))
            fix = "correct `key` in the spec: relative to the spec's folder, or from ~"
            raise UsageError(what, code="key-file-missing", where=", ".join(missing), fix=fix)

    def trust(
        self, hosts: Sequence[str], limit: Limit = NO_LIMIT, *, find_all: bool = False
    ) -> Mapping[str, ClusterctlError]:
        """Have the keys of these; those that did not show one, and why. See ``HostKeys.trust``."""
        here = [name for name in hosts if self.is_here(name)]
        lost = {name: exc for name in here if (exc := check_this_machine(name)) is not None}
        there = {name: self._machines[name] for name in hosts if name not in here}
        return {**lost, **(self._keys.trust(there, self._confirm, limit, find_all=find_all) if there else {})}

    def _confirm(self, offered: Sequence[OfferedKey]) -> None:
        self.prompts.confirm(offered)
        self.workspace.confirmed.touch(mode=0o600)

    def key_of(self, host: str) -> str:
        """A machine's trusted key. This machine's is ours: none but our own sshd shows it."""
        return self.workspace.draw_host_key() if self.is_here(host) else self._keys.key_of(host)

    def claim(self, cluster_id: str, cluster: str) -> Claim:
        """What these machines are told of the cluster that they become part of."""
        here = any(map(self.is_here, self.hosts))
        owner = {"uid": os.getuid(), "host_key": str(self.workspace.host_key)} if here else None
        return Claim(cluster_id, cluster, self.workspace.public_key.read_text().strip(), owner)

    def proxies(self, hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """The programs that lead to those that are behind others, and to this machine; `%p` is the port."""
        found: dict[str, tuple[str, ...]] = {}
        for name in hosts:
            to = ssh_host(name, self._machines[name])
            if self.is_here(name):
                found[name] = PROXY
            elif to.before:
                found[name] = ("ssh", "-F", str(self._config), "-W", f"[{to.host}]:%p", to.before.alias)
        return found
