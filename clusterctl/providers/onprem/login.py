"""Logging in to on-prem machines: through their owner's access first, through the admin account afterwards.

The machine that clusterctl runs on can be a node, too: its owner is logged in already, and no port is opened.
The admin account comes in over SSH as everywhere, by an sshd that is started for one connection alone: GATE
starts it, as root, and a line of sudoers lets the owner run just that. remote_account.py makes both.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    Failure,
    MachineError,
    ProvisionError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.providers.onprem.access import Access, AccessError, access_config, last_hop
from clusterctl.providers.onprem.host_keys import HostKeys
from clusterctl.providers.prompts import OfferedKey, Prompts
from clusterctl.spec.models import ADMIN_USER
from clusterctl.spec.onprem import OnpremProvider as Settings
from clusterctl.spec.onprem import is_this_machine
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Transport
from clusterctl.transport.ssh import SSHTransport
from clusterctl.transport.target import Target
from clusterctl.util.process import temporary_folder

GATE: Final = Path("/etc/clusterctl/sshd")
# Without a terminal: sudo would put a pseudo-terminal of its own in between.
PROXY: Final = ("setsid", "--wait", "sudo", "-n", str(GATE))
_PLACES: Final = "/usr/sbin:/sbin:/usr/bin"
_JOBS: Final = Path("/opt/clusterctl")  # of the roles
_PACKAGE: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may open the gate, and the private host key that the sshd behind it shows."""

    uid: int
    host_key: str

    @classmethod
    def caller(cls, host_key: Path) -> Owner:
        """Who calls clusterctl."""
        return cls(os.getuid(), str(host_key))


def check_this_machine(host: str) -> AccessError | None:
    """What keeps the machine from being a host; None if nothing does."""
    if _JOBS in (one := Path(sys.prefix).resolve(), *one.parents):
        cause = f"clusterctl itself is installed in {one}, and nodes have the environment of jobs in {_JOBS}"
        fix = "install clusterctl elsewhere: pipx, or a virtual environment in your home"
        return AccessError(host, Failure("own-place", cause, host, "access", fix))
    if shutil.which("sshd", path=_PLACES) is None:
        cause = (
            "there is no sshd: clusterctl talks with its account here through one that it starts by itself"
        )
        fix = "install the package openssh-server; no service of it needs to run, and no port to be open"
        return AccessError(host, Failure("no-sshd", cause, host, "access", fix))
    return None


def connect(host: str, config: Path) -> SSHTransport:
    """The way to a machine through our own account, be it this one or another.

    Raises:
        TransportError: it is this one, and has no gate: it is not ours, or not any more.
    """
    if is_this_machine(Target.read(config, host, None).address) and not GATE.exists():
        raise TransportError(f"{host} has no account of ours", why=f"there is no {GATE}", host=host)
    return SSHTransport(host, config)


def owner_request(owner: Owner | None) -> dict[str, Any]:
    """What remote_account.py is told of it."""
    return {} if owner is None else {"owner": {"uid": owner.uid, "host_key": owner.host_key}}


def is_installation(path: str) -> bool:
    """Whether something that is called like clusterctl is the installation that runs, or a part of it."""
    there = Path(path)
    script = shutil.which("clusterctl")
    own = [Path(sys.prefix), Path(sys.prefix).resolve(), _PACKAGE, *([Path(script)] if script else [])]
    return there.parent == _PACKAGE.parent or any(there in (one, *one.parents) for one in own)


Root = Callable[[str, Sequence[str], bytes], str]  # runs a command as root on a host

_PROGRAM: Final = (Path(__file__).parent / "remote_account.py").read_text(encoding="utf-8")
_PYTHON: Final = ("/usr/bin/python3", "-I", "-S")
_UNIT: Final = "clusterctl-leave"
_GONE_S: Final = 30.0
_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose a machine becomes: the cluster by id and name, and the key that may log in.

    ``owner`` is who calls clusterctl, where the machine is the one that it runs on.
    """

    cluster_id: str
    cluster: str
    key: str
    owner: Owner | None = None

    def request(self, do: str, host: str) -> str:
        """What the program is asked for."""
        said = {"do": do, "id": self.cluster_id, "name": self.cluster, "host": host}
        return json.dumps({**said, "user": ADMIN_USER, "key": self.key, **owner_request(self.owner)})


def create_account(host: str, root: Root, claim: Claim, login: Callable[[str], Transport]) -> None:
    """Make the account on a host, and log in as it; doing it again changes nothing.

    Raises:
        AccessError: it can't be made, or sshd does not let it in.
        TransportError: the host does not answer.
    """
    said = root(host, (*_PYTHON, "-", claim.request("join", host)), _PROGRAM.encode())
    answer = _answer(host, said)
    if not answer["ok"]:
        raise _access_error(host, str(answer["code"]), str(answer["cause"]), str(answer["fix"]))
    transport = login(host)
    try:
        transport.run(("sudo", "-n", "true"))
    except UnreachableError:
        raise
    except CommandError as exc:  # it is in
        cause = f"{ADMIN_USER} may not become root there: {exc.why or exc.what}"
        fix = "see that /etc/sudoers includes /etc/sudoers.d, and that nothing later takes the right away"
        raise _access_error(host, "no-sudo", cause, fix) from exc
    except TransportError as exc:
        allowed = "; ".join(answer.get("allowed", ()))
        cause = f"sshd there does not let {ADMIN_USER} in: {allowed or exc.why or exc.what}"
        fix = f"let {ADMIN_USER} in: AllowUsers or AllowGroups of sshd_config, or /etc/security/access.conf"
        raise _access_error(host, "login-refused", cause, fix) from exc
    finally:
        transport.close()


def remove_account(host: str, claim: Claim, login: Callable[[str], Transport]) -> None:
    """Take the account away, as the account itself; it has gone when this returns.

    Raises:
        ProvisionError: it is still there.
        TransportError: the host does not answer.
    """
    transport = login(host)
    try:
        unit = ("systemd-run", "--quiet", "--collect", f"--unit={_UNIT}")
        transport.run(("sudo", "-n", *unit, *_PYTHON, "-c", _PROGRAM, claim.request("leave", host)))
    finally:
        transport.close()
    deadline = time.monotonic() + _GONE_S
    while _lets_in(host, login):
        if time.monotonic() > deadline:
            cause = f"the account {ADMIN_USER} is still there"
            fix = f"see `journalctl -u {_UNIT}` there; userdel --remove --force {ADMIN_USER}"
            raise _access_error(host, "account", cause, fix)
        time.sleep(_PAUSE_S)


def _lets_in(host: str, login: Callable[[str], Transport]) -> bool:
    """Whether the account still can log in. No answer is none: a connection may be cut as it is made."""
    try:
        with closing(login(host)) as transport:
            transport.run(("true",))
    except UnreachableError:
        return True
    except TransportError:
        return False
    return True


def _answer(host: str, said: str) -> Any:
    try:
        answer = json.loads(said)
        if isinstance(answer["ok"], bool):
            return answer
    except (ValueError, KeyError, TypeError):
        pass
    raise ProvisionError(f"{host} gave no usable answer", why=said[:500], host=host)


def _access_error(host: str, code: str, cause: str, fix: str) -> AccessError:
    return AccessError(host, Failure(code, cause, host, "access", fix))


def one_line(exc: ClusterctlError) -> str:
    """An error in one line."""
    return f"{exc.what}: {exc.why}" if exc.why else exc.what


class Login:
    """What it needs lies in the workspace, and is written anew when this is made."""

    def __init__(self, settings: Settings, workspace: Workspace, prompts: Prompts) -> None:
        self._machines = settings.machines
        self._workspace = workspace
        self._config = workspace.access_config
        self._prompts = prompts
        write_atomic(self._config, access_config(self._machines, workspace.trusted_hosts))
        if prompts.accepted:
            workspace.confirmed.touch(mode=0o600)
        self._keys = HostKeys(workspace.trusted_hosts, self._config, accepted=prompts.accepted)
        self.access = Access(self._machines, self._config, password=prompts.password)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every machine that it leads to."""
        return tuple(self._machines)

    def check_keys(self, hosts: Sequence[str]) -> None:
        """That the private keys of these, where the spec names any, are here; an agent needs the public half.

        Raises:
            UsageError: one is not.
        """
        named: dict[str, list[str]] = {}
        for name in hosts:
            if key := self._machines[name].key:
                named.setdefault(key, []).append(name)
        missing = {key: of for key, of in named.items() if not (_is_file(key) or _is_file(f"{key}.pub"))}
        if missing:
            raise UsageError(
                "; ".join(f"the key {key} is not here" for key in missing),
                where=", ".join(name for of in missing.values() for name in of),
                fix="correct `key` in the spec: relative to the spec's folder, or from ~",
            )

    def trust(self, hosts: Sequence[str]) -> Mapping[str, ClusterctlError]:
        """Have the keys of these; those that did not show one, and why. See ``HostKeys.trust``."""
        here = [name for name in hosts if self._machines[name].is_here]
        lost: dict[str, ClusterctlError] = {}
        lost |= {name: exc for name in here if (exc := check_this_machine(name)) is not None}
        if there := {name: self._machines[name] for name in hosts if name not in here}:
            lost |= self._keys.trust(there, self._confirm)
        return lost

    def _confirm(self, offered: Sequence[OfferedKey]) -> None:
        self._prompts.confirm(offered)
        self._workspace.confirmed.touch(mode=0o600)

    def key_of(self, host: str) -> str:
        """A machine's trusted key. This machine's is ours: none but our own sshd shows it."""
        return self._workspace.draw_host_key() if self._machines[host].is_here else self._keys.key_of(host)

    def claim(self, cluster_id: str, cluster: str) -> Claim:
        """What these machines are told of the cluster that they become part of."""
        here = any(machine.is_here for machine in self._machines.values())
        owner = Owner.caller(self._workspace.host_key) if here else None
        return Claim(cluster_id, cluster, self._workspace.public_key.read_text().strip(), owner)

    def proxies(self, hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """The programs that lead to those that are behind others, and to this machine; `%p` is the port."""
        return {name: proxy for name in hosts if (proxy := self._proxy(name))}

    def _proxy(self, name: str) -> tuple[str, ...]:
        machine = self._machines[name]
        if machine.is_here:
            return PROXY
        hop = last_hop(machine)
        if hop is None:
            return ()
        address = (machine.address or name).strip("[]")
        return ("ssh", "-F", str(self._config), "-W", f"[{address}]:%p", hop.alias)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # of a folder that we may not look into
        return False


def check_ssh() -> None:
    """That there is an ssh here.

    Raises:
        MachineError: there is none.
    """
    if shutil.which("ssh") is None:
        raise MachineError(
            "missing tool: ssh", why="it leads to your machines", fix="install OpenSSH's client"
        )


@contextmanager
def workspace_for(workspace: Workspace | None) -> Iterator[Workspace]:
    """A workspace to write the way in to: the cluster's own, or one for the moment where it has none."""
    if workspace is not None and workspace.root.is_dir():
        yield workspace
        return
    with temporary_folder() as folder:
        one = Workspace(folder / (workspace.root.name if workspace else "lost"))
        one.create()
        yield one
