"""The machine that clusterctl runs on, as a host of a cluster: its owner is here already, no port is opened.

Our own account comes in over SSH like everywhere, by an sshd that is started for one connection alone: GATE
starts it, as root, and a line of sudoers lets the owner run just that. remote_account.py makes both.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import Failure, TransportError
from clusterctl.providers.onprem.refusals import AccessError
from clusterctl.spec.onprem import is_this_machine
from clusterctl.transport.ssh import SSHTransport
from clusterctl.transport.target import Target

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


def check(host: str) -> AccessError | None:
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


def request(owner: Owner | None) -> dict[str, Any]:
    """What remote_account.py is told of it."""
    return {} if owner is None else {"owner": {"uid": owner.uid, "host_key": owner.host_key}}


def is_installation(path: str) -> bool:
    """Whether something that is called like clusterctl is the installation that runs, or a part of it."""
    there = Path(path)
    script = shutil.which("clusterctl")
    own = [Path(sys.prefix), Path(sys.prefix).resolve(), _PACKAGE, *([Path(script)] if script else [])]
    return there.parent == _PACKAGE.parent or any(there in (one, *one.parents) for one in own)
