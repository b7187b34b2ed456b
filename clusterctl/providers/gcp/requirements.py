"""What a cluster needs of a project, as preflight.yaml has it: rights, and an organization's policies.

Which of these rights a login lacks is told here, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from clusterctl.errors import ApiOffError, PermissionDeniedError
from clusterctl.providers.gcp.api import Api
from clusterctl.spec.base import Model
from clusterctl.spec.gcp import GcpSettings
from clusterctl.util.assets import table


class Role(Model):
    permissions: tuple[str, ...]
    of_new_network: tuple[str, ...] = ()
    of_images: tuple[str, ...] = ()
    key: str | None = Field(None, alias="for")
    unseen: str | None = None


class Constraint(Model):
    why: str
    needs: str | None = None
    unless: str | None = None


class Requirements(Model):
    roles: Mapping[str, Role]
    once: Mapping[str, tuple[str, ...]]
    granted: tuple[str, ...]
    constraints: Mapping[str, Constraint]


def requirements() -> Requirements:
    return table(Path(__file__).with_name("data") / "preflight.yaml", Requirements)


@dataclass(frozen=True, slots=True)
class Rights:
    """What the login may do in the project, and what of that the cluster called ``cluster`` needs.

    ``cluster_id`` is that of a cluster that is there in part.
    """

    api: Api
    settings: GcpSettings
    cluster: str
    cluster_id: str | None

    def lacking(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The roles that are missing, each with those of its permissions that are needed."""
        wanted = {role: (*self._wanted(one),) for role, one in requirements().roles.items()}
        body = {"permissions": [name for names in wanted.values() for name in names]}
        path = f"projects/{self.settings.project}:testIamPermissions"
        held = set(self.api.post("cloudresourcemanager", path, body).get("permissions", ()))
        for role, names in wanted.items():
            if missing := tuple(name for name in names if name not in held and not self.is_done(name)):
                yield role, missing

    def _wanted(self, role: Role) -> Iterator[str]:
        if role.key is None or getattr(self.settings, role.key):
            yield from role.permissions
            yield from () if self.settings.network.network else role.of_new_network
            yield from role.of_images if self.settings.bakes else ()

    def is_done(self, permission: str) -> bool:
        """Whether an earlier `up` has made all that this permission is there to make."""
        paths = requirements().once.get(permission, ())
        if not self.cluster_id or not paths:
            return False
        prefix, project = f"{self.cluster}-{self.cluster_id}", self.settings.project
        words = {"prefix": prefix, "region": self.settings.region_name, "project": project}
        with suppress(ApiOffError, PermissionDeniedError):  # then it can't be told
            return all(self._is_there(path.format_map(words)) for path in paths)
        return False

    def _is_there(self, path: str) -> bool:
        """Whether there is a resource; a member of the project, whether all roles are granted to it."""
        service, _, place = path.partition("/")
        if service != "cloudresourcemanager":
            return self.api.find(service, f"projects/{self.settings.project}/{place}") is not None
        policy = self.api.post(service, f"projects/{self.settings.project}:getIamPolicy")
        held = {one["role"] for one in policy.get("bindings", ()) if place in one.get("members", ())}
        return held.issuperset(requirements().granted)
