"""What "Google" has: the stand-in provider's file, with what only the double of the API knows of it.

"guest_attributes": {INSTANCE: {"ssh-ed25519": "AAAA..."}}    what an instance published, if not the usual key
"""

from __future__ import annotations

from typing import Any

from tests.support.google.provider.store import Store


class World(Store):
    """The file at ``path``, which may be a ``GoogleCloud``'s: ``World(cloud.store.path)``."""

    def put(self, kind: str, path: str, **attributes: Any) -> None:
        """Let a resource of a Terraform type exist, by its id; its name is the end of that."""
        with self.change() as state:
            name = path.rpartition("/")[2]
            state["resources"].setdefault(kind, {})[path] = {"id": path, "name": name, **attributes}

    def names(self, kind: str) -> list[str]:
        """The names of what there is of a Terraform type."""
        return sorted(row["name"] for row in self.read()["resources"].get(kind, {}).values())


def labels(cluster: str, cluster_id: str) -> dict[str, str]:
    """What the module labels every resource of a cluster with."""
    return {"clusterctl-cluster": cluster, "clusterctl-id": cluster_id}


def description(cluster: str, cluster_id: str) -> str:
    """The same in words, for what can't carry labels."""
    return f"clusterctl-cluster={cluster} clusterctl-id={cluster_id}"
