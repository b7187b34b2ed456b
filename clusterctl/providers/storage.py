"""Kept storage: the shared folder that `down` keeps, with its data, if the spec has `storage.keep:
true`.

A provider can find its kept storage by searching. clusterctl also writes a record file for each
cluster name, from which `list` gets the details and the provider to ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError

from clusterctl.errors import UsageError
from clusterctl.spec.common import Cluster, ProviderSettings, User
from clusterctl.spec.models import AnyProvider, ClusterSpec
from clusterctl.state.workspace import state_home, write_atomic
from clusterctl.util import formatting

# The suffix of a record. The cluster's name before it has no dot.
_RECORD: Final = ".storage.json"
REMOVE: Final = "clusterctl storage remove {name}"


class KeptStorage(BaseModel):
    """The shared folder that remains of a cluster after `down`.

    id: the provider's name of the storage. what: a description: `disk demo-a1b2c3-shared in ZONE`.
    kind: the type of disk or file server. Empty if the provider has a single type.
    since: when the cluster went down (Unix time). None: unknown.
    homes: account -> uid, for each account with a home folder on the storage.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    id: str
    what: str
    kind: str = ""
    size_mib: int | None = None
    usd_per_month: float | None = None
    since: float | None = None
    homes: Mapping[str, int] = Field(default_factory=dict)

    def __str__(self) -> str:
        """Return text such as ``disk demo-a1b2c3-shared in us-central1-a (100GiB, 10.00 USD a
        month)``.
        """
        size = "" if self.size_mib is None else formatting.exact_size(self.size_mib)
        cost = f"{formatting.cost(self.usd_per_month)} a month" if self.usd_per_month else ""
        more = ", ".join(filter(None, (size, cost)))
        return f"{self.what} ({more})" if more else self.what

    @property
    def dated(self) -> str:
        return str(self) + (f", kept since {formatting.moment(self.since)}" if self.since else "")

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"id", "kind", "homes"})


def choose_storage_to_reuse(spec: Cluster, storages: Sequence[KeptStorage]) -> KeptStorage | None:
    """Return the kept storage that `up` reuses. None: `storage.keep` is false, or ``storages`` is
    empty.

    Raises:
        UsageError: there are several kept storages, or their files' owners differ from the spec's
            users.
    """
    if not spec.storage.keep or not storages:
        return None
    remove = REMOVE.format(name=spec.name)
    if len(storages) > 1:
        message = (
            f"the name {spec.name!r} is ambiguous: {len(storages)} clusters with it have kept "
            "storage"
        )
        reason = "; ".join(map(str, storages))
        fix = (
            f"rename the cluster, or remove storages: `{remove}` lists them and asks for "
            "confirmation"
        )
        raise UsageError(
            message, code="storage-name-ambiguous", where="storage.keep", why=reason, fix=fix
        )
    (kept,) = storages
    if conflicts := "; ".join(_others_files(spec, kept)):
        raise UsageError(
            f"the users of the spec differ from those of the kept storage, {kept.what}",
            code="storage-users-differ",
            where="users",
            why=conflicts,
            fix="give each account its former uid, rename the cluster, or remove the kept storage: "
            f"`{remove}`",
        )
    return kept


def _others_files(spec: Cluster, kept: KeptStorage) -> Iterator[str]:
    names = {uid: name for name, uid in kept.homes.items()}
    for user in spec.users:
        if (uid := kept.homes.get(user.name, user.uid)) != user.uid:
            yield (
                f"{user.name} has uid {user.uid} in the spec, but uid {uid} owns the files in "
                "the storage"
            )
        elif (name := names.get(user.uid, user.name)) != user.name:
            yield f"uid {user.uid} belongs to {user.name} in the spec, but to {name} in the storage"


def reject_storage_elsewhere(spec: ClusterSpec) -> None:
    """Raise a UsageError if `storage.keep` is true, but the kept storage of this cluster name is
    with another provider or project.
    """
    saved = load_record(spec.name)
    if saved is None or not spec.storage.keep:
        return
    if saved.place != new_record(spec.provider, spec.users).place:
        raise UsageError(
            f"the kept storage of cluster {spec.name!r} belongs to another provider or project",
            code="storage-elsewhere",
            where="storage.keep",
            why="; ".join(storage.dated for storage in saved.kept),
            fix="rename the cluster, or remove the kept storage: "
            f"`{REMOVE.format(name=spec.name)}`",
        )


def notes_on_unused_storage(spec: ClusterSpec) -> tuple[str, ...]:
    """Return notes about kept storage of this cluster name that `up` won't use, because
    `storage.keep` is false.
    """
    saved = load_record(spec.name)
    if saved is None or spec.storage.keep:
        return ()
    return tuple(
        f"kept storage is not reused because storage.keep is false: {storage}"
        for storage in saved.kept
    )


def reuse_note(kept: KeptStorage) -> str:
    return f"the kept storage of this name is reused, with its data: {kept}"


class StorageRecord(BaseModel):
    """The kept storages of all clusters with the same name, and the provider and user names of
    their spec.
    """

    model_config = ConfigDict(frozen=True)

    provider: Annotated[AnyProvider, Discriminator("type")]
    users: tuple[str, ...] = ()
    kept: tuple[KeptStorage, ...]

    @property
    def place(self) -> tuple[str | None, ...]:
        """(provider's type, Google Cloud project or None, and the first user if there is a
        project).
        """
        project = self.provider.location.get("project")
        return (self.provider.type, project, *(self.users[:1] if project else ()))


def new_record(settings: ProviderSettings, users: Iterable[User]) -> StorageRecord:
    return StorageRecord.model_validate(
        {"provider": settings, "users": [user.name for user in users], "kept": ()}
    )


def _file(name: str) -> Path:
    return state_home() / f"{name}{_RECORD}"


def save_record(name: str, record: StorageRecord | None) -> None:
    """Write the record of a cluster name to its file. If the record lists no storage, delete the
    file.

    But keep the file if its ``place`` differs from the record's. Without a ``record``, always
    delete it.
    """
    saved = load_record(name)
    if record is not None and record.kept:
        write_atomic(_file(name), record.model_dump_json(indent=2) + "\n")
    elif record is None or saved is None or saved.place == record.place:
        _file(name).unlink(missing_ok=True)


def load_record(name: str) -> StorageRecord | None:
    """Return the record of this cluster name. None: its file is missing or damaged."""
    with suppress(FileNotFoundError, ValidationError):
        return StorageRecord.model_validate_json(_file(name).read_bytes())
    return None


def load_all_kept() -> Iterator[KeptStorage]:
    for path in sorted(state_home().glob(f"*{_RECORD}")):
        if saved := load_record(path.name.removesuffix(_RECORD)):
            yield from saved.kept


def damaged_records() -> tuple[Path, ...]:
    paths = sorted(state_home().glob(f"*{_RECORD}"))
    return tuple(path for path in paths if load_record(path.name.removesuffix(_RECORD)) is None)
