"""The provider of a cluster that other people operate: it creates, changes and removes no host."""

from __future__ import annotations

from typing import NoReturn

from clusterctl.providers.attached import (
    AttachedCluster,
    AttachedPlace,
    AttachRequest,
    MpiProof,
    SiteFact,
)
from clusterctl.providers.base import Leftover, OrphanSearch, Prompts, Provider
from clusterctl.providers.existing.attach import attach, record_proof
from clusterctl.providers.existing.detach import AttachedFolder
from clusterctl.providers.existing.facts import examine_site
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.existing import ExistingSettings, operators_only
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport


class ExistingProvider(Provider):
    _settings: ExistingSettings
    takes_single_hosts = False
    recreates_hosts = False

    def __init__(self, settings: ExistingSettings, prompts: Prompts) -> None:
        self._settings = settings
        self._prompts = prompts

    def check(self, spec: ClusterSpec) -> None:
        raise operators_only(spec.name)

    def plan(self, spec: ClusterSpec, *_: object, **__: object) -> NoReturn:
        raise operators_only(spec.name)

    def apply(self, spec: ClusterSpec, *_: object, **__: object) -> NoReturn:
        raise operators_only(spec.name)

    def alive(self, cluster_id: str) -> bool:  # noqa: ARG002
        return True

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> NoReturn:
        raise operators_only(workspace.root.name if workspace else cluster_id)

    def leftovers(self, cluster_id: str, *, workspace: Workspace | None) -> tuple[Leftover, ...]:  # noqa: ARG002
        return ()

    def orphans(self, name: str) -> OrphanSearch:  # noqa: ARG002
        return OrphanSearch()

    def attach(self, request: AttachRequest) -> AttachedCluster:
        return attach(request)

    def record_proof(self, attached: AttachedCluster, proof: MpiProof) -> AttachedCluster:
        return record_proof(attached, proof)

    def examine_site(self, workspace: Workspace) -> tuple[SiteFact, ...]:
        return examine_site(workspace)

    def attached_place(self) -> AttachedPlace:
        return AttachedPlace(self._settings.login, self._settings.folder)

    def attached_folder(self, transport: Transport, path: str, cluster_id: str) -> AttachedFolder:
        return AttachedFolder(transport, path, cluster_id)
