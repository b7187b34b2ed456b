"""Storage: a shared folder with a name of its own, `storage.name`, which outlives clusters.

A provider finds its storage by searching; nothing else records it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from clusterctl.errors import UsageError
from clusterctl.spec.common import ClusterBase
from clusterctl.util import formatting

REMOVE: Final = "clusterctl storage remove {name}"


@dataclass(frozen=True, slots=True)
class KeptStorage:
    """A storage that exists.

    id: the provider's name of the storage. what: a description: `disk mydata in ZONE`.
    kind: the type of disk or file server. Empty if the provider has a single type.
    users: the hosts or clusters that use it now, each with its cluster's id. Id "": unknown.
    homes: account -> uid, for each account with a home folder on the storage, as far as known.
    is_from_here: whether clusterctl created it from here. False: elsewhere, perhaps by another person.
    """

    name: str
    id: str
    what: str
    kind: str = ""
    size_mib: int | None = None
    usd_per_month: float | None = None
    users: Collection[tuple[str, str]] = ()
    homes: Mapping[str, int] = field(default_factory=dict)
    is_from_here: bool = True

    def __str__(self) -> str:
        """Return text such as ``disk mydata in us-central1-a (100GiB, 10.00 USD a month)``."""
        size = "" if self.size_mib is None else formatting.exact_size(self.size_mib)
        cost = f"{formatting.cost(self.usd_per_month)} a month" if self.usd_per_month else ""
        more = ", ".join(filter(None, (size, cost)))
        return f"{self.what} ({more})" if more else self.what

    @property
    def used_by(self) -> tuple[str, ...]:
        """The names of the hosts or clusters that use it now."""
        return tuple(sorted({name for name, _ in self.users}))

    def as_dict(self) -> dict[str, Any]:
        keys = ("name", "what", "size_mib", "usd_per_month", "used_by", "is_from_here")
        return {key: getattr(self, key) for key in keys}

    def reject_use(self, by: str | None = None) -> None:
        """Raise a UsageError if anything but the cluster with the id ``by`` uses the storage."""
        if others := sorted({name for name, cluster_id in self.users if cluster_id != by}):
            raise UsageError(
                f"storage {self.name!r} is in use",
                code="in-use",
                about="storage",
                where="storage.name",
                why=f"{self.what} is used by {', '.join(others)}",
                fix="take that cluster down first (`clusterctl down`; without its workspace: "
                "`clusterctl orphans remove`), or choose another name",
            )


def storage_of(spec: ClusterBase, storages: Sequence[KeptStorage]) -> KeptStorage | None:
    """Return the storage that the spec names. None: the spec names no storage, or the storage does
    not exist yet.

    Raises:
        UsageError: the owners of its files differ from the spec's users, or several storages have
            this name.
    """
    found = [storage for storage in storages if storage.name == spec.storage.name]
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} storages are called {spec.storage.name!r}",
            code="ambiguous",
            about="storage",
            where="storage.name",
            why="; ".join(map(str, found)),
            fix="choose another name, or remove a storage at the provider",
        )
    storage = found[0] if found else None
    if storage and (conflicts := "; ".join(_others_files(spec, storage))):
        raise UsageError(
            f"the users of the spec differ from those of storage {storage.name!r}",
            about="storage-users",
            where="users",
            why=conflicts,
            fix="give each account its former uid, or choose another storage",
        )
    return storage


def _others_files(spec: ClusterBase, storage: KeptStorage) -> Iterator[str]:
    names = {uid: name for name, uid in storage.homes.items()}
    for user in spec.users:
        if (uid := storage.homes.get(user.name, user.uid)) != user.uid:
            yield (
                f"{user.name} has uid {user.uid} in the spec, but uid {uid} owns the files in "
                "the storage"
            )
        elif (name := names.get(user.uid, user.name)) != user.name:
            yield f"uid {user.uid} belongs to {user.name} in the spec, but to {name} in the storage"


def other_storage(cluster: str, name: str | None) -> UsageError:
    """Return the error for a spec whose storage differs from ``name``, the cluster's storage."""
    difference = f"with `storage.name: {name}`" if name else "without `storage.name`"
    return UsageError(
        f"cluster {cluster!r} is already up {difference}",
        code="exists",
        about="cluster",
        where="storage.name",
        fix="take the cluster down first, or give the new cluster another name",
    )


def storage_note(spec: ClusterBase, storage: KeptStorage | None) -> tuple[str, ...]:
    """Return a note about the use of the storage by a new cluster of this spec."""
    if spec.storage.name is None:
        return ()
    if storage is None:
        return (f"storage {spec.storage.name!r} does not exist and is created; `down` keeps it",)
    return (f"storage {storage.name!r} is used, with its files: {storage}",)
