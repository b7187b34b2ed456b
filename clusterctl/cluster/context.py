"""The common inputs of all steps of `up` and `plan`, such as the spec and the state of the last
`up`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from clusterctl.cluster.controller_lock import lock_cluster
from clusterctl.cluster.phases import PhaseRunner, provider_of
from clusterctl.hosts.probe import TIMEOUT_S, HostReport, probe_hosts
from clusterctl.hosts.roles import probe_requests
from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.scheduler.admin import scheduler_of
from clusterctl.scheduler.base import Nodes
from clusterctl.scheduler.session import PATIENCE_S
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory, applied_if_known, inventory_if_known
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.transport.ssh import Connections
from clusterctl.util.progress import SILENT, Reporter


@dataclass(kw_only=True)
class ClusterContext(PhaseRunner):
    """The common inputs of all steps of `up` and `plan`: the spec, the provider, the connections."""

    spec: ClusterSpec
    provider: Provider
    connections: Connections
    verb: str = "up"

    @classmethod
    def of(
        cls,
        spec: ClusterSpec,
        *,
        workspace: Workspace | None = None,
        provider: Provider | None = None,
        reporter: Reporter = SILENT,
        prompts: Prompts = NO_PROMPTS,
        wait_s: float = WAIT_S,
        verb: str = "up",
    ) -> Self:
        """Create the object for this spec's cluster. Default workspace and provider: the spec's.

        prompts: how to ask the user about unknown host keys. Default: reject unknown keys without
            asking.
        """
        workspace = workspace or Workspace.of(spec.name)
        return cls(
            spec=spec,
            workspace=workspace,
            provider=provider or provider_of(spec.provider, replace(prompts, reporter=reporter)),
            connections=Connections(workspace.ssh_config, fans_out=True),
            reporter=reporter,
            wait_s=wait_s,
            verb=verb,
        )

    @cached_property
    def inventory(self) -> Inventory | None:
        """The inventory that the last `up` wrote, unless it is missing or damaged. The file is read
        once.
        """
        return inventory_if_known(self.workspace)

    @cached_property
    def applied(self) -> ClusterSpec | None:
        """The spec of the last `up`, unless it is missing or damaged. The file is read once."""
        return applied_if_known(self.workspace)

    def scheduler(self, inventory: Inventory, *, patience_s: float = PATIENCE_S) -> Nodes:
        """Return a client of these hosts' scheduler. The client runs commands as the admin user."""
        return scheduler_of(inventory, self.connections.to, patience_s=patience_s)

    def probe(
        self, inventory: Inventory, hosts: Collection[str], *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, HostReport]:
        """Return host -> its facts and checksums. TransportError: a host does not answer."""
        requests = probe_requests(self.spec, inventory, self.workspace)
        chosen = {host: request for host, request in requests.items() if host in hosts}
        return dict(probe_hosts(chosen, self.connections.to, timeout_s=timeout_s))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cluster's locks during the `with` block, and close the connections afterwards."""
        lock = lock_cluster(
            self.workspace, self.verb, wait_s=self.wait_s, waiting=self.reporter.note
        )
        with lock, self.workspace.begun(), self.connections:
            yield
