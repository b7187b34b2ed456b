"""The provider of a cluster that other people operate: it creates, changes and removes no host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from clusterctl.providers.base import Leftover, Prompts, Provider
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.existing import ExistingSettings, operators_only
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace


class ExistingProvider(Provider):
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

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:  # noqa: ARG002
        return ()

    def orphans(self, name: str) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    def kept_storage(self, name: str, users: Sequence[str]) -> tuple[KeptStorage, ...]:  # noqa: ARG002
        return ()

    def remove_storage(self, kept: KeptStorage) -> None:  # noqa: ARG002
        return
