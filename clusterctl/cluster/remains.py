"""Kept storage and orphans, which outlive a cluster: find them, and remove them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from clusterctl.cluster.down import find_kept, keep_storage, remove_cluster
from clusterctl.cluster.look import note_discarded
from clusterctl.cluster.phases import PhaseRunner, provider_of
from clusterctl.errors import NotUpError, OnlyCopyError, UsageError
from clusterctl.providers.base import NO_PROMPTS, Leftover, Prompts, Provider
from clusterctl.providers.storage import KeptStorage, Record, all_recorded, record, record_of, recorded
from clusterctl.runs.only_copies import OnlyCopies
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.gcp import whole_project
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of, spec_of_existing
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import SILENT

_BRING = "bring it here: `up` with `storage: {keep: true}`, `collect --all`, `down`"
# Homes on machines of the user's own: nothing brings them here.
_COPY = "copy what you need from there"


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage that clusters called ``name`` left, as their provider finds it."""

    name: str
    provider: Provider
    record: Record
    kept: tuple[KeptStorage, ...]


def find_storage(chosen: ChosenCluster, prompts: Prompts = NO_PROMPTS, *, named: bool = False) -> Storage:
    """Ask the provider for the storage that earlier clusters of the chosen name left.

    A spec finds storage whose record was lost. By name alone, without a record, it is looked for on this
    machine.

    named: reject a cluster that is chosen only because no other is up.

    Raises:
        NotUpError: nothing is known of that name.
    """
    name = chosen.workspace(named=named).root.name
    noted = recorded(name)
    by_spec = noted is None and chosen.name is None
    if by_spec:
        # The workspace has noted which cluster is meant.
        spec = spec_of_existing(replace(chosen, note=SILENT.note))
        left = record_of(spec.provider, spec.users)
    else:
        left = noted or record_of(DEFAULT_PROVIDER, ())
    provider = provider_of(left.provider, prompts)
    kept = find_kept(name, provider, left)
    if not kept and noted is None and not by_spec:
        known = ", ".join(dict.fromkeys(f"kept storage of {one.cluster}" for one in all_recorded()))
        raise NotUpError(
            f"there is no kept storage of a cluster {name!r}",
            code="unknown-cluster",
            why=f"there is {known or 'none of any name'}",
            fix="name what there is; storage whose record was lost is found with the cluster's spec: -f",
        )
    return Storage(name, provider, left, kept)


def reject_storage(storage: Storage, *, discard: bool) -> None:
    """Refuse to remove storage that a cluster has, or whose files are not to be discarded.

    Raises:
        OnlyCopyError: not ``discard``: nobody can look at what is on it before a cluster has it.
        UsageError: a cluster has it, or may, or another machine.
    """
    if storage.kept and Workspace.of(storage.name).root.is_dir():
        raise UsageError(
            f"a cluster {storage.name!r} may have the kept storage",
            code="storage-in-use",
            why="it is up, or an `up` or `down` of it has not ended",
            fix=f"take it down first: `clusterctl down --cluster {storage.name}`",
        )
    for one in storage.kept:
        storage.provider.refuse_used(one)
    if storage.kept and not discard:
        bring = _COPY if storage.record.provider.user_owned else _BRING
        raise _lost(storage).error(
            f"the kept storage of cluster {storage.name!r} stays: this may exist only there",
            fix=f"{bring}\nthen, or to lose all of it: --discard",
        )


def _lost(storage: Storage) -> OnlyCopies:
    why = "what is on it can be told only while a cluster has it"
    return OnlyCopies(unknown=tuple(f"{one.dated}: {why}" for one in storage.kept))


def remove_storage(runner: PhaseRunner, storage: Storage) -> None:
    """Remove the storage with all that is on it, and its record."""
    with runner.workspace.lock("down", wait_s=runner.wait_s, waiting=runner.reporter.note):
        runner.reporter.step("remove_storage")
        note_discarded(runner.workspace, _lost(storage).lines)
        for one in storage.kept:
            storage.provider.remove_storage(one)
        record(storage.name, storage.record.model_copy(update={"kept": ()}) if storage.kept else None)
        if not runner.workspace.root.is_dir():  # else these are copies of a cluster's files
            with suppress(OSError):
                runner.workspace.copies.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Orphans:
    """Clusters called ``name`` that no workspace knows: their ids, and what there is of each."""

    name: str
    settings: ProviderSettings
    provider: Provider
    clusters: Mapping[str, tuple[Leftover, ...]]


def find_orphans(
    chosen: ChosenCluster, prompts: Prompts = NO_PROMPTS, *, project: str | None = None
) -> Orphans:
    """Ask the provider for clusters of the chosen name other than that of the workspace.

    By name alone, these are orphans of the provider of that workspace, else of this machine.

    project: a Google Cloud project, for a cluster that is chosen by its name.

    Raises:
        UsageError: a project without a name.
    """
    name, settings = _place_of_orphans(chosen, project)
    provider, known = provider_of(settings, prompts), Workspace.of(name).known_id()
    ids = [cluster_id for cluster_id in provider.orphans(name) if cluster_id != known]
    return Orphans(name, settings, provider, {one: provider.leftovers(one) for one in ids})


def _place_of_orphans(chosen: ChosenCluster, project: str | None) -> tuple[str, ProviderSettings]:
    if project is not None and (chosen.name is None or chosen.file is not None):
        raise UsageError(
            "a project needs the name of a cluster and no spec file",
            code="option-needs-option",
            fix="name the cluster as well: `clusterctl orphans list NAME --project PROJECT`",
        )
    if chosen.name is not None:
        workspace = chosen.named_workspace()
        if project is not None:
            return chosen.name, whole_project(project)
        if not workspace.spec.exists():
            return chosen.name, DEFAULT_PROVIDER
    spec = spec_of(chosen)
    return spec.name, spec.provider


def reject_orphans(orphans: Orphans, *, discard: bool) -> None:
    """Refuse to remove clusters on which nobody can look, unless all on them is to be discarded.

    Machines of the user's own keep their files.

    Raises:
        OnlyCopyError: not ``discard``.
    """
    if orphans.clusters and not (discard or orphans.settings.user_owned):
        raise OnlyCopyError(
            f"what exists only on cluster {', '.join(orphans.clusters)} can't be told",
            why="it is an orphan: the keys to its hosts were lost with its workspace",
            fix="copy what you need from there; then lose the rest: --discard",
        )


def remove_orphans(runner: PhaseRunner, orphans: Orphans) -> tuple[KeptStorage, ...]:
    """Remove the clusters, and verify that nothing is left but the storage that they kept, which is returned.

    Raises:
        LeftoversError: something of a cluster is still there.
    """
    runner.reporter.step("destroy")
    for cluster_id in orphans.clusters:
        remove_cluster(orphans.provider, cluster_id, None)
    if not orphans.settings.shares_kernel:
        return ()
    return keep_storage(runner, orphans.provider, record_of(orphans.settings, ())).value
