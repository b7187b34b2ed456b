"""The user's own way in to the machines of one spec: its ssh_config, the keys it trusts, and who goes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from clusterctl.errors import ClusterctlError, MachineError
from clusterctl.mortal import temporary_folder
from clusterctl.providers.onprem.access import Access
from clusterctl.providers.onprem.hands import Hands
from clusterctl.providers.onprem.host_keys import HostKeys
from clusterctl.providers.onprem.ssh_files import access_config, last_hop
from clusterctl.spec import OnpremProvider as Settings
from clusterctl.workspace import Workspace, write_atomic


class WayIn:
    """What it needs lies in the workspace, and is written anew when this is made."""

    def __init__(self, settings: Settings, workspace: Workspace, hands: Hands) -> None:
        self._machines = settings.machines
        self._config = workspace.access_config
        self._hands = hands
        write_atomic(self._config, access_config(self._machines, workspace.trusted_hosts))
        self._keys = HostKeys(workspace.trusted_hosts, self._config, accepted=hands.accepted)
        self.access = Access(self._machines, self._config, password=hands.password)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every machine that it leads to."""
        return tuple(self._machines)

    def trust(self, hosts: Sequence[str]) -> Mapping[str, ClusterctlError]:
        """Have the keys of these; those that did not show one, and why. See ``HostKeys.trust``."""
        if not hosts:
            return {}
        return self._keys.trust({name: self._machines[name] for name in hosts}, self._hands.confirm)

    def key_of(self, host: str) -> str:
        """A machine's trusted key."""
        return self._keys.key_of(host)

    def proxies(self, hosts: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        """The programs that lead to those that are behind others; `%p` is the port."""
        return {name: proxy for name in hosts if (proxy := self._proxy(name))}

    def _proxy(self, name: str) -> tuple[str, ...]:
        machine = self._machines[name]
        hop = last_hop(machine)
        if hop is None:
            return ()
        address = (machine.address or name).strip("[]")
        return ("ssh", "-F", str(self._config), "-W", f"[{address}]:%p", hop.alias)


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
