"""Kept storage: the shared folder of a cluster that is down, with all that is on it (`storage.keep: true`).

Its provider finds it by itself. A record beside the workspaces has what `list` shows of it, and whom to ask.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError

from clusterctl.errors import UsageError
from clusterctl.spec.base import format_size
from clusterctl.spec.common import Cluster, ProviderSettings
from clusterctl.spec.gcp import GcpSettings
from clusterctl.spec.models import LocalSettings
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.state.workspace import state_home, write_atomic

_RECORD: Final = ".storage.json"  # after the cluster's name, which has no dot
REMOVE: Final = "clusterctl down --storage --cluster {name}"


class KeptStorage(BaseModel):
    """The shared folder that a cluster left, ``what`` and where it is, such as `disk demo-a1b2c3-shared`.

    ``id`` is how its provider knows it. ``homes`` are the accounts that have one there, with their uid.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    id: str
    what: str
    size_mib: int | None = None
    usd_per_month: float | None = None
    since: float = Field(default_factory=time.time)
    homes: Mapping[str, int] = Field(default_factory=dict)

    def __str__(self) -> str:
        """``disk demo-a1b2c3-shared in us-central1-a (100GiB, 10.00 USD a month)``."""
        size = "" if self.size_mib is None else format_size(self.size_mib)
        cost = f"{self.usd_per_month:.2f} USD a month" if self.usd_per_month else ""
        more = ", ".join(filter(None, (size, cost)))
        return f"{self.what} ({more})" if more else self.what

    def as_dict(self) -> dict[str, Any]:
        """The storage as `-o json` shows it."""
        return self.model_dump(mode="json", exclude={"id", "homes"})


def to_take_up(spec: Cluster, found: Sequence[KeptStorage]) -> KeptStorage | None:
    """The kept storage that `up` takes up; None where there is none, or the spec does not keep any.

    Raises:
        UsageError: there are several, or its files are those of accounts that the spec has otherwise.
    """
    if not spec.storage.keep or not found:
        return None
    remove = REMOVE.format(name=spec.name)
    if len(found) > 1:
        raise UsageError(
            f"there are {len(found)} kept storages of clusters called {spec.name!r}",
            where="storage.keep",
            why="; ".join(map(str, found)),
            fix=f"name the cluster otherwise, or remove them: `{remove}` lists them and asks",
        )
    (kept,) = found
    if wrong := "; ".join(_others_files(spec, kept)):
        raise UsageError(
            f"the users of the spec are not those of the kept storage, {kept.what}",
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


def storage_left_alone(spec: Cluster) -> tuple[str, ...]:
    """What to say of kept storage that a spec does not ask for."""
    kept = () if spec.storage.keep else (recorded(spec.name) or (None, ()))[1]
    return tuple(f"this is not taken up, for storage.keep is false: {one}" for one in kept)


def taken_up_note(kept: KeptStorage) -> str:
    return f"the kept storage of this name is taken up, with all that is on it: {kept}"


class _Record(BaseModel):
    provider: Annotated[LocalSettings | GcpSettings | OnpremSettings, Discriminator("type")]
    kept: tuple[KeptStorage, ...]


def _file(name: str) -> Path:
    return state_home() / f"{name}{_RECORD}"


def record(name: str, provider: ProviderSettings | None, kept: Sequence[KeptStorage]) -> None:
    """Note what a cluster of this name left, and where; with nothing left, note nothing any more."""
    if provider is None or not kept:
        _file(name).unlink(missing_ok=True)
        return
    noted = _Record.model_validate({"provider": provider, "kept": kept})
    write_atomic(_file(name), noted.model_dump_json(indent=2) + "\n")


def recorded(name: str) -> tuple[ProviderSettings, tuple[KeptStorage, ...]] | None:
    """Whom to ask for the kept storage of this name, and what is known of it; None where none is noted."""
    with suppress(FileNotFoundError, ValidationError):
        found = _Record.model_validate_json(_file(name).read_bytes())
        return found.provider, found.kept
    return None


def all_recorded() -> Iterator[tuple[ProviderSettings, KeptStorage]]:
    """All that is noted in this state folder."""
    for path in sorted(state_home().glob(f"*{_RECORD}")):
        if found := recorded(path.name.removesuffix(_RECORD)):
            yield from ((found[0], one) for one in found[1])
