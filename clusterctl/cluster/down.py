"""The steps of `down`: collect runs → find files that exist only on the cluster → write the usage →
destroy → verify.

Also removes orphans: clusters without records on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from clusterctl.cluster.controller_lock import lock_cluster
from clusterctl.cluster.losses import (
    check_only_copies,
    find_only_copies,
    is_whole,
    note_removal,
    without_known_losses,
)
from clusterctl.cluster.nodes import forget_machines, members_among
from clusterctl.cluster.phases import Phase, PhaseResult, PhaseRunner, provider_of, workspace_copy
from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    DiskError,
    Failure,
    LeftoversError,
    MachineError,
    Notice,
    NotUpError,
    OnlyCopyError,
    ProvisionError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.providers.base import (
    NO_PROMPTS,
    Leftover,
    Orphan,
    Prompts,
    Provider,
    pending_releases,
)
from clusterctl.providers.registry import may_have_hosts
from clusterctl.providers.templates import KeptImage
from clusterctl.runs.collect import collect_all, uncollected
from clusterctl.runs.only_copies import NOTHING, OnlyCopies
from clusterctl.runs.saved_usage import save_usage
from clusterctl.runs.usage import usage_since
from clusterctl.scheduler.session import SHORT_PATIENCE_S, connect_session
from clusterctl.spec.models import DEFAULT_PROVIDER, AnyProvider, settings_of_project
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import (
    applied_if_known,
    applied_spec,
    inventory_if_known,
    job_inventory,
)
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.removal import BegunRemoval, begun_removal
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import Workspace, new_id
from clusterctl.transport.master import end_all_connections
from clusterctl.util.numbers import counted
from clusterctl.util.process import remove_stale_folders, roomiest_temporary_folder


@dataclass(frozen=True, slots=True)
class DownOptions:
    """The options of `down`.

    discard: collect no runs, and delete everything that exists only on the cluster.
    discard_runs: ids of jobs. Runs of these jobs are deleted instead of collected.
    out: the folder for collected runs. Default: ./runs.
    on_run: called with each run after it was collected.
    gone: names of machines that the user owned and lost; `down` does not try to release them.
    prompts: how to ask the user about unknown host keys. Default: reject unknown keys without
        asking.
    """

    discard: bool = False
    discard_runs: Collection[str] = ()
    out: Path | None = None
    on_run: Callable[[RunRecord], None] = lambda _: None
    gone: Collection[str] = ()
    prompts: Prompts = NO_PROMPTS


@dataclass(frozen=True, slots=True)
class DownResult:
    """The result of `down`.

    runs: the runs that were collected before the cluster was removed.
    on_this_machine: whether the nodes ran on this machine.
    verified: whether the provider was searched for leftovers. False if nothing had been created.
    discarded: submissions with runs that the user chose not to collect.
    storage: the name of the storage with the shared folder, which stays. None: there is none.
    lost: jobs and files that existed only on the cluster and were deleted.
    images: node images that remain and are billed.
    """

    runs: tuple[RunRecord, ...] = ()
    phases: tuple[Phase, ...] = ()
    on_this_machine: bool = False
    verified: bool = False
    discarded: tuple[JobEntry, ...] = ()
    storage: str | None = None
    lost: OnlyCopies = NOTHING
    images: tuple[KeptImage, ...] = ()


def down(runner: PhaseRunner, options: DownOptions) -> DownResult:
    """Collect the remaining runs, then remove the cluster and verify that nothing is left.

    Raises:
        CollectError: a run could not be collected; the cluster is not removed.
        OnlyCopyError: something exists only on the cluster, and `discard` is not set; nothing is
            removed.
        DiskError: everything was removed except the workspace, which is on a read-only file system.
        LeftoversError: parts of the cluster still exist.
        NotUpError: there is no such cluster.
    """
    workspace = runner.workspace
    reject_unknown_unless_locked(workspace)
    with lock_cluster(workspace, "down", wait_s=runner.wait_s, waiting=runner.reporter.note):
        return down_locked(runner, options)


@dataclass(frozen=True, slots=True)
class ClusterRemoval:
    """The effect of `down`.

    hosts: the names of the hosts. collected, discarded: the jobs whose runs are collected, or
        deleted without that.
    copies: other jobs and files that exist only on the cluster. They stop `down` without --discard
        (see ``reject_losses``).
    """

    hosts: tuple[str, ...]
    collected: tuple[str, ...]
    discarded: tuple[str, ...]
    copies: OnlyCopies


def preview(workspace: Workspace, options: DownOptions) -> ClusterRemoval:
    """Return the effect of `down`. Raises the errors of ``down`` about the options."""
    reject_unknown(workspace)
    discarded = to_discard(workspace, options.discard_runs, everything=options.discard)
    entries = set(uncollected(workspace)) - set(discarded)
    removed, brought = (tuple(sorted(map(_name_of, jobs))) for jobs in (discarded, entries))
    gone = members_among(workspace, options.gone)
    copies = without_known_losses(workspace, find_only_copies(workspace, removed, gone))
    copies = replace(copies, files=tuple(f for f in copies.files if f.job_id not in brought))
    inventory = inventory_if_known(workspace)
    hosts = inventory.hosts if inventory is not None else ()
    return ClusterRemoval(tuple(host.name for host in hosts), brought, removed, copies)


def reject_unknown(workspace: Workspace) -> None:
    """Raise NotUpError if there is no such cluster."""
    if not workspace.root.is_dir():
        name = workspace.root.name
        raise NotUpError(
            f"there is no cluster {name!r}",
            code="not-found",
            about="cluster",
            fix="choose another cluster with --cluster (`clusterctl list` shows all); if the "
            "cluster's workspace was lost, find the cluster with `clusterctl orphans list "
            f"{name}`",
        )


def reject_unknown_unless_locked(workspace: Workspace) -> None:
    """Raise NotUpError if there is no such cluster, and no other command creates or removes it.

    To be called before the cluster is locked, because a lock leaves its file.
    """
    if workspace.lock_holder() is None:
        reject_unknown(workspace)


def down_locked(runner: PhaseRunner, options: DownOptions) -> DownResult:
    """Do the same as ``down``, for a caller that already holds the cluster's lock."""
    workspace = runner.workspace
    remove_stale_folders()
    reject_unknown(workspace)
    discarded = to_discard(workspace, options.discard_runs, everything=options.discard)
    with _writable(runner) as writing_runner:
        result = run_phases(writing_runner, options, discarded)
    # The list of copied files is useless once the cluster is gone.
    with suppress(OSError):
        workspace.copies.unlink(missing_ok=True)
    end_all_connections(workspace.ssh_config)
    workspace.remove()
    return result


def run_phases(
    runner: PhaseRunner, options: DownOptions, discarded: tuple[JobEntry, ...]
) -> DownResult:
    """Run the phases of `down`. ``discarded``: submissions with runs to delete instead of
    collect.
    """
    workspace = runner.workspace
    if not _has_begun(workspace):
        forget_machines(workspace, options.gone)
        return DownResult()
    settings = _applied_settings(workspace)
    provider = provider_of(settings, replace(options.prompts, reporter=runner.reporter))
    if settings.shares_kernel:
        restore_id(workspace, provider)
    not_collected = set(uncollected(workspace)) - set(discarded)
    runs = runner.run("collect_runs", collect_runs, options, discarded) if not_collected else ()
    gone = members_among(workspace, options.gone)
    lost = runner.run("look", check_only_copies, discarded, gone, discard=options.discard)
    if forgotten := forget_machines(workspace, options.gone):
        runner.reporter.note(f"forgotten: {'; '.join(forgotten)}")
    if not _has_begun(workspace):
        return DownResult(runs, tuple(runner.phases), discarded=discarded, lost=lost)
    spec = applied_if_known(workspace)
    if workspace.is_configured:
        runner.run("write_usage", write_usage)
    runner.run("destroy", destroy, provider, lost, discarded)
    images: tuple[KeptImage, ...] = ()
    # The cluster is down, so a failure to list images is no failure of `down`.
    with suppress(ClusterctlError):
        images = provider.kept_images()
    phases = tuple(runner.phases)
    storage = spec.storage.name if spec else None
    return DownResult(runs, phases, settings.shares_kernel, True, discarded, storage, lost, images)


def _name_of(entry: JobEntry) -> str:
    return entry.job_id or entry.token


def _has_begun(workspace: Workspace) -> bool:
    """Return whether `up` may have made or changed a host, or a removed host must be released."""
    if workspace.joining.exists() or workspace.inventory.exists() or pending_releases(workspace):
        return True
    has_files = workspace.spec.exists() or workspace.has_id or may_have_hosts(workspace)
    return has_files and not workspace.adopts_hosts


def restore_id(workspace: Workspace, provider: Provider) -> None:
    """If the id of a cluster here is damaged, find the cluster by its name, and record its id.

    Without such a cluster, only the workspace is left to be removed, and gets a new id.
    """
    try:
        workspace.known_id()
    except MachineError:
        ids = [orphan.id for orphan in provider.orphans(workspace.root.name).found]
        if len(ids) > 1:
            raise
        workspace.adopt_id(*(ids or [new_id()]))


@contextmanager
def _writable(runner: PhaseRunner) -> Iterator[PhaseRunner]:
    """Yield the runner, with a temporary copy of its workspace if that can't be written."""
    workspace = runner.workspace
    try:
        workspace.create()
    except DiskError as exc:
        text = (
            f"the folder {workspace.root} can't be written ({exc.why}); `down` works on a copy "
            "of it"
        )
        runner.reporter.note(Notice("works-on-a-copy", text))
        with workspace_copy(workspace, without=["logs"], place=roomiest_temporary_folder()) as copy:
            yield replace(runner, workspace=copy)
    else:
        yield runner


def collect_runs(
    runner: PhaseRunner, options: DownOptions, discarded: Collection[JobEntry]
) -> PhaseResult[tuple[RunRecord, ...]]:
    ids = [entry.job_id for entry in discarded if entry.job_id]
    try:
        spec = applied_spec(runner.workspace)
        runs = []
        for run in collect_all(spec, runner.workspace, out=options.out, discard=ids):
            options.on_run(run)
            runs.append(run)
    except (CollectError, SchedulerError, TransportError, UsageError) as exc:
        # `up` starts no machine of an owner.
        repair = exc.fix if runner.workspace.adopts_hosts else _REPAIR
        if runner.workspace.removing.exists():
            repair = ""
        raise not_collected_error(exc, ids, repair=repair) from exc
    return PhaseResult(tuple(runs), counted(len(runs), "run"))


def write_usage(runner: PhaseRunner) -> PhaseResult[None]:
    """Write what jobs used of the cluster, because its accounting is removed with it. `down` continues
    if that is impossible.
    """
    workspace = runner.workspace
    entries = Ledger(workspace.jobs).entries()
    try:
        inventory = job_inventory(workspace)
        with connect_session(inventory, workspace, patience_s=SHORT_PATIENCE_S) as session:
            usage = usage_since(session, 0, {entry.token for entry in entries})
        save_usage(workspace.cluster_id(), usage)
    except ClusterctlError as exc:
        text = f"what jobs have used of this cluster is not known after `down`: {exc.cause}"
        runner.reporter.note(Notice("usage-unknown", text))
        return PhaseResult(None, "unknown")
    return PhaseResult(None, counted(len({each.job for each in usage.held}), "job"))


def destroy(
    runner: PhaseRunner,
    provider: Provider,
    lost: OnlyCopies,
    discarded: Collection[JobEntry] = (),
) -> PhaseResult[None]:
    """Record the jobs and files that may be lost, then remove the cluster. After a crash, the next
    `down` continues.
    """
    workspace = runner.workspace
    note_removal(workspace, lost, discarded)
    try:
        remove_cluster(provider, workspace.cluster_id(), workspace)
    except ClusterctlError:
        # Users may continue to work there.
        if is_whole(workspace):
            workspace.removing.unlink(missing_ok=True)
        raise
    return PhaseResult(None)


def remove_cluster(provider: Provider, cluster_id: str, workspace: Workspace | None) -> None:
    """Remove everything that belongs to a cluster. ``workspace``: None if it was lost.

    Raise LeftoversError if parts of the cluster still exist, with a failure for each part and its
    cost.
    """
    provider.destroy(cluster_id, workspace=workspace)
    left = provider.leftovers(cluster_id, workspace=workspace)
    if left:
        fix = "run the same command again; remove by hand the parts that still exist after that"
        raise LeftoversError(
            "parts of the cluster still exist",
            why="; ".join(map(str, left)),
            fix=fix,
            failures=tuple(
                Failure(LeftoversError.code, str(x), phase="destroy", fix=fix) for x in left
            ),
        )


def to_discard(
    workspace: Workspace, ids: Collection[str], *, everything: bool
) -> tuple[JobEntry, ...]:
    """Return the submissions with runs to delete instead of collect. UsageError: an id is unknown.

    ids: job ids of these submissions, in addition to those that an unfinished `down` discards.
    everything: ignore ``ids``, and return all that are not collected.
    """
    not_collected = uncollected(workspace)
    submitted = Ledger(workspace.jobs).entries()
    if unknown_ids := [
        job_id for job_id in ids if job_id not in {entry.job_id for entry in submitted}
    ]:
        job_ids = ", ".join(entry.job_id for entry in not_collected if entry.job_id) or "none"
        raise UsageError(
            f"there is no run of job {', '.join(unknown_ids)} to discard",
            code="not-found",
            about="run",
            why="this machine has no record of a submission of that job",
            fix=f"the runs of these jobs can be discarded: {job_ids}",
        )
    if everything:
        return not_collected
    begun = begun_removal(workspace) or BegunRemoval()
    return tuple(
        entry for entry in submitted if entry.job_id in ids or entry.token in begun.discarded
    )


_REPAIR = "repair the cluster with `clusterctl up`, then run `down` again"


def not_collected_error(
    exc: ClusterctlError, discarded: Sequence[str] = (), *, repair: str = _REPAIR
) -> CollectError:
    """Return the error for uncollected runs in `down`: which runs, why, and how to discard them.

    discarded: ids of jobs that the user discards already; the suggested command repeats these ids.
    repair: how to make the runs collectable, if they are unknown. Empty: an earlier `down` has
        begun to remove the hosts, which must not be created again.
    """
    jobs = exc.jobs if isinstance(exc, CollectError) else ()
    remedy = exc.fix if jobs else repair
    options = (
        [f"--discard-run {job_id}" for job_id in (*discarded, *jobs)] if jobs else ["--discard"]
    )
    return CollectError(
        "the cluster was not removed: some runs can't be collected",
        code="would-lose",
        about="runs",
        where=exc.where,
        why=f"job {jobs[0]}: {exc.cause}" if len(jobs) == 1 else exc.cause,
        fix=f"{remedy}{'; or ' if remedy else ''}delete these runs: pass {' '.join(options)}",
        failures=exc.failures if jobs else (),
    )


def _applied_settings(workspace: Workspace) -> AnyProvider:
    """Return the provider settings that the cluster was created with.

    If the recorded spec is missing or damaged, return the settings of a local cluster. Raise
    UsageError if the cluster may have hosts at another provider, because these hosts would be left
    behind.
    """
    try:
        return applied_spec(workspace).provider
    except UsageError:
        if may_have_hosts(workspace):
            raise
        return DEFAULT_PROVIDER


@dataclass(frozen=True, slots=True)
class Orphans:
    """Clusters without a workspace here.

    clusters: each cluster, with its machines and disks.
    failures: a failure for each host that could not be searched.
    """

    name: str
    settings: AnyProvider
    provider: Provider
    clusters: tuple[tuple[Orphan, tuple[Leftover, ...]], ...]
    failures: tuple[Failure, ...]

    @property
    def ids(self) -> str:
        return ", ".join(orphan.id for orphan, _ in self.clusters)


def find_orphans(
    chosen: ChosenCluster, prompts: Prompts = NO_PROMPTS, *, project: str | None = None
) -> Orphans:
    """Ask the provider for clusters of the chosen name without a workspace here.

    The provider is read from the spec file or the workspace. Without both, search this machine.

    project: the Google Cloud project to search. Raise UsageError if the choice is not by cluster
        name.
    """
    name, settings = _find_provider(chosen, project)
    provider = provider_of(settings, prompts)
    own_id = None
    with suppress(MachineError):
        own_id = Workspace.of(name).known_id()
    search = provider.orphans(name)
    clusters = tuple(
        (orphan, provider.leftovers(orphan.id, workspace=None))
        for orphan in search.found
        if orphan.id != own_id
    )
    return Orphans(name, settings, provider, clusters, search.failures)


def _find_provider(chosen: ChosenCluster, project: str | None) -> tuple[str, AnyProvider]:
    if project is not None and (chosen.name is None or chosen.file is not None):
        raise UsageError(
            "--project needs the name of a cluster instead of a spec file",
            about="option-missing",
            fix="pass the cluster's name: `clusterctl orphans list NAME --project PROJECT`",
        )
    if chosen.name is not None:
        workspace = chosen.named_workspace()
        if project is not None:
            return chosen.name, settings_of_project(project)
        if not workspace.spec.exists():
            return chosen.name, DEFAULT_PROVIDER
        if applied_if_known(workspace) is None:
            # The recorded spec is damaged.
            return chosen.name, _applied_settings(workspace)
    spec = spec_of(chosen)
    return spec.name, spec.provider


def reject_orphans(orphans: Orphans, *, discard: bool) -> None:
    """Raise OnlyCopyError if there are orphans: other people may use them, and their files can't be
    listed. discard: accept that jobs end and files are lost.
    """
    if not orphans.clusters or discard:
        return
    if orphans.settings.adopts_hosts:
        running = [line for orphan, _ in orphans.clusters for line in orphan.running]
        raise OnlyCopyError(
            f"cluster {orphans.ids} may be in use",
            code="in-use",
            about="orphan",
            why="\n".join(running)
            or "another user, or another CLUSTERCTL_HOME, may have its records",
            fix="if somebody else uses the cluster, let that user run `clusterctl down`; to remove "
            "it now, pass --discard: its jobs end, and the files in users' homes stay",
        )
    raise OnlyCopyError(
        f"cluster {orphans.ids} may hold the only copy of files",
        why="its files can't be listed: the SSH keys of its hosts were lost with its workspace",
        fix="copy the files that you need from its hosts; then pass --discard to delete the "
        "cluster",
    )


def reject_unsearched(orphans: Orphans) -> None:
    """Raise ProvisionError if hosts could not be searched, because these may have orphans."""
    if orphans.failures:
        raise ProvisionError.of_hosts(
            "these hosts could not be searched for orphans: {hosts}",
            orphans.failures,
            code="would-lose",
            about="hosts-not-searched",
            then="then run the same command again; if a host is gone for good, remove it from the "
            "spec",
        )


def remove_orphans(runner: PhaseRunner, orphans: Orphans) -> None:
    """Remove these clusters. LeftoversError: parts of them still exist."""
    runner.reporter.step("destroy")
    for orphan, _ in orphans.clusters:
        remove_cluster(orphans.provider, orphan.id, None)
