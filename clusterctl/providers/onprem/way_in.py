"""The user's own way in to the machines of one spec: its ssh_config, the keys it trusts, and who goes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from clusterctl.errors import ClusterctlError, MachineError, UsageError
from clusterctl.providers.onprem import this_machine
from clusterctl.providers.onprem.access import Access
from clusterctl.providers.onprem.account import Claim
from clusterctl.providers.onprem.hands import Hands
from clusterctl.providers.onprem.host_keys import HostKeys, Offered
from clusterctl.providers.onprem.ssh_files import access_config, last_hop
from clusterctl.spec.onprem import OnpremProvider as Settings
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.lifetime import temporary_folder


class WayIn:
    """What it needs lies in the workspace, and is written anew when this is made."""

    def __init__(self, settings: Settings, workspace: Workspace, hands: Hands) -> None:
        self._machines = settings.machines
        self._workspace = workspace
        self._config = workspace.access_config
        self._hands = hands
        write_atomic(self._config, access_config(self._machines, workspace.trusted_hosts))
        if hands.accepted:
            workspace.confirmed.touch(mode=0o600)
        self._keys = HostKeys(workspace.trusted_hosts, self._config, accepted=hands.accepted)
        self.access = Access(self._machines, self._config, password=hands.password)

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
        lost |= {name: exc for name in here if (exc := this_machine.check(name)) is not None}
        if there := {name: self._machines[name] for name in hosts if name not in here}:
            lost |= self._keys.trust(there, self._confirm)
        return lost

    def _confirm(self, offered: Sequence[Offered]) -> None:
        self._hands.confirm(offered)
        self._workspace.confirmed.touch(mode=0o600)

    def key_of(self, host: str) -> str:
        """A machine's trusted key. This machine's is ours: none but our own sshd shows it."""
        return self._workspace.draw_host_key() if self._machines[host].is_here else self._keys.key_of(host)

    def claim(self, cluster_id: str, cluster: str) -> Claim:
        """What these machines are told of the cluster that they become part of."""
        here = any(machine.is_here for machine in self._machines.values())
        owner = this_machine.Owner.caller(self._workspace.host_key) if here else None
        return Claim(cluster_id, cluster, self._workspace.public_key.read_text().strip(), owner)

    def proxies(self, hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """The programs that lead to those that are behind others, and to this machine; `%p` is the port."""
        return {name: proxy for name in hosts if (proxy := self._proxy(name))}

    def _proxy(self, name: str) -> tuple[str, ...]:
        machine = self._machines[name]
        if machine.is_here:
            return this_machine.PROXY
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


def check() -> None:
    """That there is an ssh here.

    Raises:
        MachineError: there is none.
    """
    if shutil.which("ssh") is None:
        raise MachineError(
            "missing tool: ssh", why="it leads to your machines", fix="install OpenSSH's client"
        )


@contextmanager
def place(workspace: Workspace | None) -> Iterator[Workspace]:
    """A workspace to write the way in to: the cluster's own, or one for the moment where it has none."""
    if workspace is not None and workspace.root.is_dir():
        yield workspace
        return
    with temporary_folder() as folder:
        one = Workspace(folder / (workspace.root.name if workspace else "lost"))
        one.create()
        yield one
