"""Our own account on a machine: made there once through its owner's way in, and taken away again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    Failure,
    ProvisionError,
    TransportError,
    UnreachableError,
)
from clusterctl.providers.onprem.refusals import AccessError
from clusterctl.providers.onprem.this_machine import Owner
from clusterctl.providers.onprem.this_machine import request as gate
from clusterctl.spec.models import ADMIN_USER
from clusterctl.transport.base import Transport

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
        return json.dumps({**said, "user": ADMIN_USER, "key": self.key, **gate(self.owner)})


def join(host: str, root: Root, claim: Claim, login: Callable[[str], Transport]) -> None:
    """Make the account on a host, and log in as it; doing it again changes nothing.

    Raises:
        AccessError: it can't be made, or sshd does not let it in.
        TransportError: the host does not answer.
    """
    said = root(host, (*_PYTHON, "-", claim.request("join", host)), _PROGRAM.encode())
    answer = _answer(host, said)
    if not answer["ok"]:
        raise _refused(host, str(answer["code"]), str(answer["cause"]), str(answer["fix"]))
    transport = login(host)
    try:
        transport.run(("sudo", "-n", "true"))
    except UnreachableError:
        raise
    except CommandError as exc:  # it is in
        cause = f"{ADMIN_USER} may not become root there: {exc.why or exc.what}"
        fix = "see that /etc/sudoers includes /etc/sudoers.d, and that nothing later takes the right away"
        raise _refused(host, "no-sudo", cause, fix) from exc
    except TransportError as exc:
        allowed = "; ".join(answer.get("allowed", ()))
        cause = f"sshd there does not let {ADMIN_USER} in: {allowed or exc.why or exc.what}"
        fix = f"let {ADMIN_USER} in: AllowUsers or AllowGroups of sshd_config, or /etc/security/access.conf"
        raise _refused(host, "login-refused", cause, fix) from exc
    finally:
        transport.close()


def leave(host: str, claim: Claim, login: Callable[[str], Transport]) -> None:
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
            raise _refused(host, "account", cause, fix)
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


def _refused(host: str, code: str, cause: str, fix: str) -> AccessError:
    return AccessError(host, Failure(code, cause, host, "access", fix))


def told(exc: ClusterctlError) -> str:
    """An error in one line."""
    return f"{exc.what}: {exc.why}" if exc.why else exc.what
