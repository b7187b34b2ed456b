"""Kept storage: the shared folder of a cluster that is down, with all that is on it (`storage.keep: true`).

Its provider finds it by itself. A record beside the workspaces has what `list` shows of it, and whom to ask.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError

from clusterctl.errors import UsageError
from clusterctl.spec.common import Cluster, ProviderSettings, User
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.models import ClusterSpec, LocalSettings
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.spec.units import format_size
from clusterctl.state.workspace import state_home, write_atomic

_RECORD: Final = ".storage.json"  # after the cluster's name, which has no dot
REMOVE: Final = "clusterctl storage remove {name}"


class KeptStorage(BaseModel):
    """The shared folder that a cluster left, ``what`` and where it is, such as `disk demo-a1b2c3-shared`.

    ``id`` is how its provider knows it, ``kind`` its type where there are several; ``since`` is when its
    cluster went down (Unix time), where that is known. ``homes`` are the accounts that have one there, with
    their uid.
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
        """``disk demo-a1b2c3-shared in us-central1-a (100GiB, 10.00 USD a month)``."""
        size = "" if self.size_mib is None else format_size(self.size_mib)
        cost = f"{self.usd_per_month:.2f} USD a month" if self.usd_per_month else ""
        more = ", ".join(filter(None, (size, cost)))
        return f"{self.what} ({more})" if more else self.what

    @property
    def dated(self) -> str:
        """The same, and since when it has been kept."""
        return str(self) + (
            time.strftime(", kept since %F %R", time.localtime(self.since)) if self.since else ""
        )

    def as_dict(self) -> dict[str, Any]:
        """The storage as `-o json` shows it."""
        return self.model_dump(mode="json", exclude={"id", "kind", "homes"})


def to_take_up(spec: Cluster, found: Sequence[KeptStorage]) -> KeptStorage | None:
    """The kept storage that `up` takes up; None where there is none, or the spec does not keep any.

    Raises:
        UsageError: there are several, or its files are those of accounts that the spec has otherwise.
    """
    if not spec.storage.keep or not found:
        return None
    remove = REMOVE.format(name=spec.name)
    if len(found) > 1:
        what = f"there are {len(found)} kept storages of clusters called {spec.name!r}"
        why = "; ".join(map(str, found))
        fix = f"name the cluster otherwise, or remove them: `{remove}` lists them and asks"
        raise UsageError(what, code="storage-name-ambiguous", where="storage.keep", why=why, fix=fix)
    (kept,) = found
    if wrong := "; ".join(_others_files(spec, kept)):
        raise UsageError(
            f"the users of the spec are not those of the kept storage, {kept.what}",
            code="storage-users-differ",
            where="users",
            why=wrong,
            fix="give each account the uid that it had, name the cluster otherwise, or remove what was kept: "
            f"`{remove}`",
        )
    return kept


def _others_files(spec: Cluster, kept: KeptStorage) -> Iterator[str]:
    names = {uid: name for name, uid in kept.homes.items()}
    for user in spec.users:
        if (uid := kept.homes.get(user.name, user.uid)) != user.uid:
            yield f"{user.name} has uid {user.uid} in the spec, and files there belong to uid {uid}"
        elif (name := names.get(user.uid, user.name)) != user.name:
            yield f"uid {user.uid} is {user.name}'s in the spec, and {name}'s there"


def storage_left_alone(spec: ClusterSpec) -> tuple[str, ...]:
    """What to say of kept storage that a spec does not ask for.

    Raises:
        UsageError: the spec keeps storage, and what is kept of its name is in another place.
    """
    noted = recorded(spec.name)
    if noted is None:
        return ()
    if not spec.storage.keep:
        return tuple(f"this is not taken up, for storage.keep is false: {one}" for one in noted.kept)
    if noted.place != record_of(spec.provider, spec.users).place:
        what = f"there is kept storage of a cluster {spec.name!r} in another place"
        why = "; ".join(one.dated for one in noted.kept)
        fix = f"name the cluster otherwise, or remove it: `{REMOVE.format(name=spec.name)}`"
        raise UsageError(what, code="storage-elsewhere", where="storage.keep", why=why, fix=fix)
    return ()


def taken_up_note(kept: KeptStorage) -> str:
    return f"the kept storage of this name is taken up, with all that is on it: {kept}"


class Record(BaseModel):
    """What is noted of a name: whom to ask, and what it kept; ``users`` are those of its spec."""

    model_config = ConfigDict(frozen=True)

    provider: Annotated[LocalSettings | GcpSettings | OnpremSettings, Discriminator("type")]
    users: tuple[str, ...] = ()
    kept: tuple[KeptStorage, ...]

    @property
    def place(self) -> tuple[str | None, ...]:
        """Where its provider looks for kept storage of a name; Google's looks for that of the first user."""
        project = getattr(self.provider, "project", None)
        return (self.provider.type, project, *(self.users[:1] if project else ()))


def record_of(settings: ProviderSettings, users: Iterable[User]) -> Record:
    """The record of a cluster with this provider and these users, before anything is kept."""
    return Record.model_validate({"provider": settings, "users": [user.name for user in users], "kept": ()})


def _file(name: str) -> Path:
    return state_home() / f"{name}{_RECORD}"


def record(name: str, left: Record | None) -> None:
    """Note what a cluster of this name left; with nothing left, note nothing any more of that place."""
    noted = recorded(name)
    if left is not None and left.kept:
        write_atomic(_file(name), left.model_dump_json(indent=2) + "\n")
    elif left is None or noted is None or noted.place == left.place:
        _file(name).unlink(missing_ok=True)


def recorded(name: str) -> Record | None:
    """What is noted of this name; None where nothing is, or it is damaged."""
    with suppress(FileNotFoundError, ValidationError):
        return Record.model_validate_json(_file(name).read_bytes())
    return None


def all_recorded() -> Iterator[KeptStorage]:
    """All that is noted in this state folder."""
    for path in sorted(state_home().glob(f"*{_RECORD}")):
        if found := recorded(path.name.removesuffix(_RECORD)):
            yield from found.kept


def damaged_records() -> tuple[Path, ...]:
    """The records of this state folder that can't be read."""
    found = sorted(state_home().glob(f"*{_RECORD}"))
    return tuple(path for path in found if recorded(path.name.removesuffix(_RECORD)) is None)
