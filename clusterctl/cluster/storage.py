"""The search for storages and their removal: `storage list` and `storage remove`."""

from __future__ import annotations

from dataclasses import dataclass

from clusterctl.cluster.losses import note_discarded
from clusterctl.cluster.phases import provider_of
from clusterctl.errors import NotUpError, OnlyCopyError
from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.models import DEFAULT_PROVIDER, settings_of_project
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Storages:
    """The storages that a provider found, by name."""

    provider: Provider
    found: tuple[KeptStorage, ...]


def find_storages(
    chosen: ChosenCluster, prompts: Prompts = NO_PROMPTS, *, project: str | None = None
) -> Storages:
    """Search the chosen cluster's provider; without a chosen cluster, this machine.

    project: search this Google Cloud project instead.
    """
    if project is not None:
        settings = settings_of_project(project)
    elif chosen.name is None and chosen.spec_file is None:
        settings = DEFAULT_PROVIDER
    else:
        settings = spec_of(chosen).provider
    provider = provider_of(settings, prompts)
    found = sorted(provider.storages(), key=lambda storage: (storage.name, storage.id))
    return Storages(provider, tuple(found))


def choose_storage(storages: Storages, name: str) -> tuple[KeptStorage, ...]:
    """Return the storages with a name. NotUpError: there is no such storage. UsageError: a storage
    is in use.
    """
    chosen = tuple(storage for storage in storages.found if storage.name == name)
    if not chosen:
        names = ", ".join(dict.fromkeys(storage.name for storage in storages.found))
        raise NotUpError(
            f"there is no storage {name!r}",
            code="not-found",
            about="storage",
            why=f"there is {names}" if names else "no storage was found",
            fix="`clusterctl storage list` lists those of this machine; pass -f SPEC or --project "
            "PROJECT to search at Google",
        )
    for storage in chosen:
        storage.reject_use()
    return chosen


def reject_unexamined(storages: tuple[KeptStorage, ...], *, discard: bool) -> None:
    """Raise OnlyCopyError unless ``discard``, which accepts that files are lost. They can't be
    listed, because no cluster uses the storage.
    """
    if not discard:
        raise OnlyCopyError(
            f"storage {storages[0].name!r} was not removed: it may hold the only copy of files",
            why="; ".join(_unexamined(storages)),
            fix="collect the files: run `clusterctl up` with it, then `clusterctl collect --all`, "
            "then `clusterctl down`\nthen, or to delete all files, pass --discard",
        )


def remove_storages(provider: Provider, storages: tuple[KeptStorage, ...]) -> None:
    """Remove storages with all their files, and record that these were discarded."""
    for storage in storages:
        provider.remove_storage(storage)
    note_discarded(Workspace.of(storages[0].name), _unexamined(storages))


def _unexamined(storages: tuple[KeptStorage, ...]) -> tuple[str, ...]:
    reason = "its files can be listed only while a cluster uses it"
    return tuple(f"{storage}: {origin_of(storage)}{reason}" for storage in storages)


def origin_of(storage: KeptStorage) -> str:
    """Return words that begin a text about a storage that may be another person's; "" otherwise."""
    if storage.is_from_here:
        return ""
    accounts = f" for the account {', '.join(storage.homes)}" if storage.homes else ""
    return f"it was not created from here, but elsewhere{accounts}, and may be another person's; "
