"""Logging in to on-prem machines as their owner, who becomes root with sudo.

The machine that runs clusterctl can be a node too. There, ssh logs in to an sshd that serves a single
connection as the owner and opens no port.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    NoAnswerError,
    ProvisionError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.providers.base import NO_PROMPTS, Prompts
from clusterctl.providers.onprem.access import (
    AccessError,
    HostKeys,
    JumpHost,
    access_config,
    explain_error,
    ssh_host,
)
from clusterctl.spec.hosts import OnpremHost
from clusterctl.state.inventory import Host
from clusterctl.state.workspace import Workspace, draw_key_pair, write_atomic
from clusterctl.transport.base import remote_program, shown_command
from clusterctl.transport.ssh import Connections
from clusterctl.transport.sudo import AS_ROOT, SudoError
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import NO_LIMIT, Deadline

_PLACES: Final = "/usr/sbin:/sbin:/usr/bin"
# Folder that the Ansible roles create on nodes.
_JOBS: Final = Path("/opt/clusterctl")
# On Debian, an sshd of root needs a folder that only its service creates.
_START_SSHD: Final = (
    '[ -d /usr/share/empty.sshd ] || mkdir -p -m 0755 /run/sshd 2>/dev/null; exec "$0" -i -f "$1"'
)
_SSHD_SETTINGS: Final = """\
# Written by clusterctl: the sshd of this machine, for you alone, while a command runs
HostKey "{host_key}"
AuthorizedKeysFile "{key}" .ssh/authorized_keys
AuthenticationMethods publickey
StrictModes no
UsePAM no
PidFile none
PrintMotd no
Subsystem sftp internal-sftp
"""


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
        return AccessError.of(host, "unsupported", cause, fix, about="own-place")
    if find_sshd() is None:
        cause = "no sshd is installed, and clusterctl starts one to log in to this machine"
        fix = (
            "install the package openssh-server; its service need not run, and no port need be open"
        )
        return AccessError.of(host, "tool-missing", cause, fix, about="sshd")
    return None


def find_sshd() -> str | None:
    return shutil.which("sshd", path=_PLACES)


_PROGRAM: Final = remote_program("clusterctl.providers.onprem.remote_claim")
_PYTHON: Final = ("/usr/bin/python3", "-I", "-S")
OWNER_ANSWER_S: Final = 120.0
NO_JUMPS: Final[Mapping[str, JumpHost]] = MappingProxyType({})


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
        jumps: Mapping[str, JumpHost] = NO_JUMPS,
        answer_s: float = OWNER_ANSWER_S,
    ) -> None:
        """jumps: host -> its jump host. All hosts behind a jump host share one connection to it.
        answer_s: time limit of each command, in seconds.
        """
        self.workspace = workspace
        self.answer_s = answer_s
        self.prompts = prompts
        self._machines = machines
        self._jumps = jumps
        # The settings of a jump host that several machines name differently are those of the first.
        self._shared_jumps = {jump.name: jump for jump in reversed([*jumps.values()])}
        self._connections = Connections(workspace.access_config)
        self._keys = HostKeys(workspace.trusted_hosts, self._connections)
        self._write_config()
        if here := [name for name, machine in machines.items() if machine.is_here]:
            self._keys.remember(dict.fromkeys(here, workspace.draw_host_key()))

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._machines)

    def run(
        self, host: str, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float | None = None
    ) -> str:
        """Run a command on a host as the owner. Return the command's standard output."""
        timeout_s = timeout_s or self.answer_s
        try:
            return self._connections.to(host).run(argv, stdin=stdin, timeout_s=timeout_s).stdout
        except NoAnswerError as exc:
            fix = "check the host's load"
            reason = f"`{shown_command(argv)}` took longer than {timeout_s:g} s"
            raise UnreachableError(exc.what, why=reason, host=host, fix=fix) from exc
        except TransportError as exc:
            if isinstance(exc, CommandError | SudoError):
                raise
            raise explain_error(exc, ssh_host(host, self._machines[host])) from exc

    def root(self, host: str, argv: Sequence[str], stdin: bytes = b"") -> str:
        """Run a command on a host as root. Return the standard output. Raise the same errors as
        ``run``, and SudoError.
        """
        return self.run(host, (*AS_ROOT, *argv), stdin)

    def is_here(self, host: str) -> bool:
        return self._machines[host].is_here

    def try_sudo(
        self, hosts: Sequence[str], limit: Deadline = NO_LIMIT
    ) -> Mapping[str, ClusterctlError]:
        """Become root on these hosts. Return host -> error, where that fails."""
        return call_on_hosts(hosts, lambda host: self.root(host, ("true",)), limit=limit)[1]

    def join(self, host: str, cluster_id: str, cluster: str) -> None:
        """Record on a host that it belongs to this cluster, and who created it. Raise AccessError."""
        origin = {
            "created_by": getpass.getuser(),
            "created_on": socket.gethostname(),
            "created_in": str(self.workspace.root),
        }
        self._claim("join", host, {"id": cluster_id, "name": cluster, "host": host, **origin})

    def leave(self, host: str, cluster_id: str) -> None:
        """Remove the record that a host belongs to this cluster. Raise AccessError."""
        self._claim("leave", host, {"id": cluster_id})

    def _claim(self, do: str, host: str, claim: Mapping[str, str]) -> None:
        request = json.dumps({"do": do, "claim": claim})
        stdout = self.root(host, (*_PYTHON, "-", request), _PROGRAM.encode())
        try:
            answer = json.loads(stdout)
            if answer["ok"]:
                return
            refusal = AccessError.of(
                host,
                str(answer["code"]),
                str(answer["cause"]),
                str(answer["fix"]),
                about=str(answer["about"]),
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise ProvisionError(
                f"{host} did not return valid JSON",
                code="internal",
                about="answer",
                why=stdout[:500],
                host=host,
            ) from exc
        raise refusal

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
            raise UsageError(
                text, code="not-found", about="key-file", where=", ".join(missing), fix=fix
            )

    def trust(
        self, hosts: Sequence[str], limit: Deadline = NO_LIMIT, *, find_all: bool = False
    ) -> Mapping[str, ClusterctlError]:
        """Find a trusted host key of each host. Return host -> error, for hosts without a trusted
        key.
        """
        here = [name for name in hosts if self.is_here(name)]
        lost = {name: exc for name in here if (exc := check_this_machine(name)) is not None}
        remote = {name: self._machines[name] for name in hosts if name not in here}
        failed: Mapping[str, ClusterctlError] = {}
        if remote:
            failed = self._keys.trust(remote, self.prompts.confirm, limit, find_all=find_all)
            self._write_config()
        return {**lost, **failed}

    def key_of(self, host: str) -> str:
        """Return a host's trusted host key. On this machine: that of the sshd that clusterctl
        starts.
        """
        return self._keys.key_of(host)

    def proxies(self) -> Mapping[str, tuple[str, ...]]:
        """Return host -> ProxyCommand, for this machine and hosts behind a jump host that they share.
        `%p` is the port.
        """
        config = str(self.workspace.access_config)
        proxies: dict[str, tuple[str, ...]] = {}
        for name, machine in self._machines.items():
            jump = self._jumps.get(name)
            if machine.is_here:
                proxies[name] = self._proxy_here()
            elif jump is not None and jump == self._shared_jumps[jump.name]:
                # ProxyJump does not quote the path of the file.
                target = ssh_host(name, machine).host
                proxies[name] = ("ssh", "-F", config, "-W", f"[{target}]:%p", jump.name)
        return proxies

    def reached(self, host: Host) -> Host:
        """Return the host with the key that this machine's sshd needs, if it is this machine."""
        return replace(host, key_file=str(self.workspace.key)) if self.is_here(host.name) else host

    def _write_config(self) -> None:
        """Write the ssh_config of the logins, with what is known of the host keys."""
        jumps = [j for j in self._shared_jumps.values() if j.name not in self._machines]
        config = access_config(
            self._machines, self.workspace, self.proxies(), self._keys.known, jumps
        )
        write_atomic(self.workspace.access_config, config)

    def _proxy_here(self) -> tuple[str, ...]:
        """Return the command of an sshd that lets the cluster's key in to this machine, as the owner."""
        workspace = self.workspace
        draw_key_pair(workspace.key, comment=b" clusterctl")
        workspace.draw_host_key()
        settings = _SSHD_SETTINGS.format(host_key=workspace.host_key, key=workspace.public_key)
        write_atomic(workspace.sshd_config, settings)
        return ("sh", "-c", _START_SSHD, find_sshd() or "sshd", str(workspace.sshd_config))
