"""The story of `down`: collect runs → look for only copies → destroy → verify that nothing is left.

Kept storage and orphans, which outlive a cluster, are found and removed here as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.cluster.look import all_answer, is_of_own_machines, look, note_discarded, note_removal
from clusterctl.cluster.nodes import forget
from clusterctl.cluster.phases import Outcome, Phase, PhaseRunner, provider_of, workspace_copy
from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    DiskError,
    Failure,
    LeftoversError,
    Notice,
    NotUpError,
    OnlyCopyError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.providers.base import NO_PROMPTS, Leftover, Prompts, Provider, pending_releases
from clusterctl.providers.node_class import KeptImage
from clusterctl.providers.registry import kept_images
from clusterctl.providers.storage import KeptStorage, Record, all_recorded, record, record_of, recorded
from clusterctl.runs.collect import collect_all, uncollected
from clusterctl.runs.only_copies import NOTHING, OnlyCopies, note_copies
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.gcp import whole_project
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of, spec_of_existing
from clusterctl.state.inventory import applied_if_known, applied_spec, may_keep_storage
from clusterctl.state.ledger import RunRecord
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh import end_all
from clusterctl.util.process import roomiest, sweep
from clusterctl.util.progress import SILENT

_BRING = "bring it here: `up` with `storage: {keep: true}`, `collect --all`, `down`"
# Homes on machines of the user's own: nothing brings them here.
_COPY = "copy what you need from there"


@dataclass(frozen=True, slots=True)
class DownOptions:
    """How `down` goes about it.

    discard: collect no run, and lose all that exists only on the cluster.
    discard_runs: ids of jobs whose runs are not collected but lost. All others are collected.
    out: the folder for collected runs. Default: ./runs.
    on_run: called with each run as soon as it is here.
    gone: machines of the user's own that are gone for good: they are not waited for.
    """

    discard: bool = False
    discard_runs: Collection[str] = ()
    out: Path | None = None
    on_run: Callable[[RunRecord], None] = lambda _: None
    gone: Collection[str] = ()
    prompts: Prompts = NO_PROMPTS


@dataclass(frozen=True, slots=True)
class DownResult:
    """A cluster that is removed.

    runs, discarded: the runs that were collected before, and the jobs whose runs were given up.
    on_this_machine: whether its nodes were parts of this machine.
    verified: whether the world was looked at for leftovers. False if nothing had been put on any machine.
    kept: the shared folder that stays.
    lost: what existed only on the cluster.
    images: images of nodes that stay where they cost.
    """

    runs: tuple[RunRecord, ...] = ()
    phases: tuple[Phase, ...] = ()
    on_this_machine: bool = False
    verified: bool = False
    discarded: tuple[JobEntry, ...] = ()
    kept: tuple[KeptStorage, ...] = ()
    lost: OnlyCopies = NOTHING
    images: tuple[KeptImage, ...] = ()


def down(runner: PhaseRunner, options: DownOptions) -> DownResult:
    """Collect the runs that are not home, then remove the cluster and verify that nothing is left.

    Raises:
        CollectError: a run could not be collected; the cluster stays.
        OnlyCopyError: something exists only on the cluster, and is not to be discarded; the cluster stays.
        DiskError: all is removed but the workspace, which stands on a read-only file system.
        LeftoversError: something of the cluster is still there.
        NotUpError: there is no such cluster.
    """
    workspace = runner.workspace
    with workspace.lock("down", wait_s=runner.wait_s, waiting=runner.reporter.note):
        return down_locked(runner, options)


def down_locked(runner: PhaseRunner, options: DownOptions) -> DownResult:
    """`down`, for a caller that holds the cluster's lock."""
    workspace = runner.workspace
    sweep()
    if not workspace.root.is_dir():
        name = workspace.root.name
        raise NotUpError(
            f"there is no cluster {name!r}",
            code="unknown-cluster",
            fix="name another with --cluster (`clusterctl list` shows them); a cluster whose workspace "
            f"was lost is found with `clusterctl orphans list {name}`",
        )
    discarded = to_discard(workspace, options.discard_runs, everything=options.discard)
    with _writable(runner) as writing_runner:
        result = take_down(writing_runner, options, discarded)
    if recorded(workspace.root.name) is None:  # no kept storage, of which these would be copies
        with suppress(OSError):
            workspace.copies.unlink(missing_ok=True)
    end_all(workspace.ssh_config)
    workspace.remove()
    return result


def take_down(runner: PhaseRunner, options: DownOptions, discarded: tuple[JobEntry, ...]) -> DownResult:
    """The phases of `down`: collect runs, look, destroy, keep storage."""
    workspace = runner.workspace
    if not _has_begun(workspace):
        forget(workspace, options.gone)
        return DownResult()
    settings = _settings(workspace)
    provider = provider_of(settings, replace(options.prompts, reporter=runner.reporter))
    out = set(uncollected(workspace)) - set(discarded)
    runs = runner.run("collect_runs", collect_runs, options, discarded) if out else ()
    lost = runner.run("look", look, discarded, discard=options.discard)
    if forgotten := forget(workspace, options.gone):
        runner.reporter.note(f"forgotten: {'; '.join(forgotten)}")
    if not _has_begun(workspace):
        return DownResult(runs, tuple(runner.phases), discarded=discarded, lost=lost)
    spec = applied_if_known(workspace)
    left = record_of(settings, spec.users if spec else ())
    may_keep = may_keep_storage(workspace) or recorded(workspace.root.name) is not None
    runner.run("destroy", destroy, provider, lost)
    kept = runner.run("keep_storage", keep_storage, provider, left) if may_keep else ()
    images: tuple[KeptImage, ...] = ()
    with suppress(ClusterctlError):  # the cluster is down, whether images can be listed or not
        images = kept_images(settings)
    phases = tuple(runner.phases)
    return DownResult(runs, phases, settings.shares_kernel, True, discarded, kept, lost, images)


def _has_begun(workspace: Workspace) -> bool:
    """Return whether `up` may have made or joined a host, or whether a release is pending."""
    if workspace.joining.exists() or workspace.inventory.exists() or pending_releases(workspace):
        return True
    begun = workspace.spec.exists() or workspace.terraform.exists() or workspace.known_id() is not None
    return begun and not is_of_own_machines(workspace)


@contextmanager
def _writable(runner: PhaseRunner) -> Iterator[PhaseRunner]:
    """Yield a runner that works on a copy of the workspace if its disk takes nothing more."""
    workspace = runner.workspace
    try:
        workspace.create()
    except DiskError as exc:
        copied = f"{workspace.root} takes nothing more ({exc.why}); working on a copy of it"
        runner.reporter.note(Notice("works-on-a-copy", copied))
        with workspace_copy(workspace, without=["logs"], place=roomiest()) as copy:
            yield replace(runner, workspace=copy)
    else:
        yield runner


def collect_runs(
    runner: PhaseRunner, options: DownOptions, discarded: Collection[JobEntry]
) -> Outcome[tuple[RunRecord, ...]]:
    ids = [entry.job_id for entry in discarded if entry.job_id]
    try:
        spec = applied_spec(runner.workspace)
        found = []
        for run in collect_all(spec, runner.workspace, out=options.out, discard=ids):
            options.on_run(run)
            found.append(run)
    except (CollectError, SchedulerError, TransportError, UsageError) as exc:
        raise not_collected_error(exc, ids) from exc
    return Outcome(tuple(found), f"{len(found)} runs")


def destroy(runner: PhaseRunner, provider: Provider, lost: OnlyCopies) -> Outcome[None]:
    """Remove the cluster, after a note of what is ``lost``: the next `down` finishes one that is killed."""
    workspace = runner.workspace
    note_removal(workspace, lost)
    try:
        remove_cluster(provider, workspace.cluster_id(), workspace)
    except ClusterctlError:
        if all_answer(workspace):  # no host is removed, and users may go on working there
            workspace.removing.unlink(missing_ok=True)
        raise
    return Outcome(None)


def remove_cluster(provider: Provider, cluster_id: str, workspace: Workspace | None) -> None:
    """Remove everything of a cluster, and look whether anything is left.

    Raises:
        LeftoversError: something is; one failure each, with its cost.
    """
    provider.destroy(cluster_id, workspace=workspace)
    left = provider.leftovers(cluster_id)
    if left:
        fix = "run `clusterctl down` again; what stays then has to be removed by hand"
        raise LeftoversError(
            "something of the cluster is still there",
            why="; ".join(map(str, left)),
            fix=fix,
            failures=tuple(Failure(LeftoversError.code, str(one), phase="destroy", fix=fix) for one in left),
        )


def keep_storage(runner: PhaseRunner, provider: Provider, left: Record) -> Outcome[tuple[KeptStorage, ...]]:
    """Note the shared folder that the cluster ``left``: `list` shows it, and the next `up` takes it up."""
    name, now = runner.workspace.root.name, time.time()
    noted = recorded(name)
    before = {storage.id for storage in noted.kept} if noted else set()
    found = find_kept(name, provider, left)
    kept = tuple(storage.model_copy(update={"since": storage.since or now}) for storage in found)
    if any(storage.id not in before for storage in kept) and runner.workspace.root.is_dir():
        note_copies(runner.workspace)
    record(name, left.model_copy(update={"kept": kept}))
    return Outcome(kept, "; ".join(map(str, kept)) or "there is none")


def find_kept(name: str, provider: Provider, left: Record) -> tuple[KeptStorage, ...]:
    """Ask the provider for the storage of this name, with since when it is kept as far as that is noted."""
    noted = recorded(name)
    since = {storage.id: storage.since for storage in noted.kept} if noted else {}
    return tuple(
        storage.model_copy(update={"since": storage.since or since.get(storage.id)})
        for storage in provider.kept_storage(name, left.users)
    )


def to_discard(workspace: Workspace, ids: Collection[str], *, everything: bool) -> tuple[JobEntry, ...]:
    """The submissions that are given up: those of the jobs ``ids``, or all whose runs are not home.

    Raises:
        UsageError: one of the ids is of no job that was submitted from here.
    """
    not_home = uncollected(workspace)
    submitted = Ledger(workspace.jobs).entries()
    if unknown := [job_id for job_id in ids if job_id not in {entry.job_id for entry in submitted}]:
        there = ", ".join(entry.job_id for entry in not_home if entry.job_id) or "none"
        raise UsageError(
            f"there is no run of job {', '.join(unknown)} to discard",
            code="unknown-run",
            why="no such job was submitted from here",
            fix=f"the jobs whose runs are not home: {there}",
        )
    return not_home if everything else tuple(entry for entry in submitted if entry.job_id in ids)


def not_collected_error(exc: ClusterctlError, discarded: Sequence[str] = ()) -> CollectError:
    """The error of a `down` that could not collect: which jobs' runs, why, and how to give up these alone,
    beside those that are ``discarded`` already.
    """
    jobs = exc.jobs if isinstance(exc, CollectError) else ()
    remedy = exc.fix if jobs else "converge it with `clusterctl up`, then take it down"
    options = [f"--discard-run {job_id}" for job_id in (*discarded, *jobs)] if jobs else ["--discard"]
    return CollectError(
        "the cluster stays up: runs that are not home yet can't be collected",
        code="runs-not-collected",
        where=exc.where,
        why=f"job {jobs[0]}: {exc.cause}" if len(jobs) == 1 else exc.cause,
        fix=f"{remedy}; or give these runs up: {' '.join(options)}",
        failures=exc.failures if jobs else (),
    )


def _settings(workspace: Workspace) -> ProviderSettings:
    """The provider of the cluster as it was raised. Of a local one, that may be damaged or missing."""
    try:
        return applied_spec(workspace).provider
    except UsageError:
        made = workspace.terraform.is_dir() and (workspace.spec.exists() or workspace.inventory.exists())
        if made or is_of_own_machines(workspace) or any(workspace.terraform.glob("*.tfstate*")):
            raise  # what Terraform has made would be forgotten
        return DEFAULT_PROVIDER  # the spec is written before anything is made at Google


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
