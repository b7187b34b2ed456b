"""The story of `down`: collect runs → look for only copies → destroy → verify that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clusterctl.cluster.context import Outcome, Phase, PhaseRunner, provider_of, workspace_copy
from clusterctl.cluster.look import (
    all_answer,
    clear_removal,
    is_of_own_machines,
    look,
    look_at_storage,
    note_removal,
    note_storage_stays,
)
from clusterctl.cluster.nodes import forget
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
from clusterctl.providers.storage import REMOVE, KeptStorage, Record
from clusterctl.providers.storage import record as record_storage
from clusterctl.providers.storage import recorded as recorded_storage
from clusterctl.runs.collect import collect_all, uncollected
from clusterctl.runs.only_copies import NOTHING, Found, note_copies
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.state.inventory import applied_spec, keeps_storage, may_keep_storage
from clusterctl.state.ledger import RunRecord
from clusterctl.state.submissions import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.transport.master import end_all
from clusterctl.util.process import roomiest, sweep
from clusterctl.util.progress import ProgressReporter


@dataclass(frozen=True, slots=True)
class DownOptions:
    """How `down` goes about it.

    Under ``discard`` no run is collected, and all that exists only on the cluster is lost; without it, all
    runs are but those of the jobs ``discard_runs``, into the folder ``out``; ``on_run`` gets each as soon as
    it is here. Machines of the user's own that are ``gone`` for good are not waited for. With
    ``remove_storage`` the shared folder goes, too, where the spec keeps it.
    """

    discard: bool = False
    discard_runs: Collection[str] = ()
    out: Path | None = None
    on_run: Callable[[RunRecord], None] = lambda _: None
    gone: Collection[str] = ()
    prompts: Prompts = NO_PROMPTS
    remove_storage: bool = False


@dataclass(frozen=True, slots=True)
class DownResult:
    """A cluster that is removed, and the runs that were collected before, and those that were discarded.

    ``on_this_machine``: its nodes were parts of it. ``looked``: whether there was anything to look for.
    ``kept`` is the shared folder that stays, ``removed`` the one that was kept until now; ``lost`` is what
    existed only there. ``refused`` is why kept storage that was to be removed stays. ``images`` are those of
    nodes that stay where they cost.
    """

    runs: tuple[RunRecord, ...] = ()
    phases: tuple[Phase, ...] = ()
    on_this_machine: bool = True
    looked: bool = True
    discarded: tuple[JobEntry, ...] = ()
    kept: tuple[KeptStorage, ...] = ()
    removed: tuple[KeptStorage, ...] = ()
    lost: Found = NOTHING
    refused: ClusterctlError | None = None
    images: tuple[KeptImage, ...] = ()


def down(runner: PhaseRunner, options: DownOptions) -> DownResult:
    """Collect the runs that are not home, then remove the cluster and verify that nothing is left.

    Raises:
        CollectError: a run could not be collected; the cluster stays.
        OnlyCopyError: something exists only on the cluster, and is not to be discarded; the cluster stays.
        DiskError: all is removed but the workspace, which stands on a read-only file system.
        LeftoversError: something of the cluster is still there.
        UsageError: the cluster is down, but its storage is not removed: it is kept.
    """
    workspace = runner.workspace
    with workspace.lock("down", wait_s=runner.wait_s, waiting=runner.reporter.note):
        return down_locked(runner, options)


def down_locked(runner: PhaseRunner, options: DownOptions) -> DownResult:
    """`down`, for one that holds the cluster's lock."""
    workspace = runner.workspace
    sweep()
    discarded = to_discard(workspace, options.discard_runs, everything=options.discard)
    there = workspace.root.is_dir()
    if there:
        with _writable(runner):
            result = take_down(runner, options, discarded)
    else:
        result = _down_without_workspace(runner, discard=options.discard)
    if recorded_storage(workspace.root.name) is None:  # nothing is there of which these would be copies
        with suppress(OSError):
            workspace.copies.unlink(missing_ok=True)
    if there:
        end_all(workspace.ssh_config)
        workspace.remove()
    if result.refused is not None:
        raise result.refused
    return result


def take_down(runner: PhaseRunner, options: DownOptions, discarded: tuple[JobEntry, ...]) -> DownResult:
    """The phases of `down`: collect runs, discard runs, look, destroy."""
    workspace = runner.workspace
    records = (workspace.spec, workspace.inventory, workspace.joining, workspace.terraform)
    there = workspace.known_id() or pending_releases(workspace) or any(path.exists() for path in records)
    if not there or _has_taken_none(workspace):  # `up` ended before any host was made or joined
        forget(workspace, options.gone)
        return DownResult(on_this_machine=False, looked=False)
    settings = _settings(workspace)
    provider = provider_of(settings, options.prompts)
    collected: tuple[RunRecord, ...] = ()
    if set(uncollected(workspace)) - set(discarded):
        collected = runner.run("collect_runs", collect_runs, options.out, discarded, options.on_run)
    if discarded:
        runner.run("discard_runs", discard_runs, discarded)
    others = _other_kept_storage(workspace, provider) if options.remove_storage else ()
    beside = look_at_storage(provider, workspace, others)
    lost = runner.run(
        "look", look, discarded, discard=options.discard, storage=options.remove_storage, kept=beside
    )
    if forgotten := forget(workspace, options.gone):
        options.prompts.note(f"forgotten: {'; '.join(forgotten)}")
    looked = not _has_taken_none(workspace)
    left = Record.model_validate({"provider": settings, "users": _users(workspace), "kept": ()})
    may_keep = may_keep_storage(workspace)
    is_seen = options.discard or not may_keep or keeps_storage(workspace, if_damaged=True)
    may_keep |= recorded_storage(workspace.root.name) is not None
    what = (*(f"the run of {entry.shown}" for entry in discarded), *lost.lines)
    note = partial(note_removal, discarded=what, looked=not lost.unknown) if looked else None
    may_keep |= runner.run(
        "destroy", destroy, provider, note, orphans=settings.shares_kernel, discard=options.discard
    )
    kept: tuple[KeptStorage, ...] = ()
    removed: tuple[KeptStorage, ...] = ()
    refused: ClusterctlError | None = None
    if looked and options.remove_storage:
        try:
            removed = runner.run(
                "remove_looked_at", remove_looked_at, provider, others, left, is_seen=is_seen
            )
        except ClusterctlError as exc:
            refused = exc
            stays = {*beside.lines, *(str(one) for one in lost.files if not one.host)}
            note_storage_stays(workspace, [line for line in what if line not in stays])
    if looked and (refused or (may_keep and not options.remove_storage)):
        kept = runner.run("keep_storage", keep_storage, provider, left)
    images: tuple[KeptImage, ...] = ()
    with suppress(ClusterctlError):  # it is down, whether they can be looked at or not
        images = kept_images(settings)
    return DownResult(
        collected,
        tuple(runner.phases),
        settings.shares_kernel,
        looked,
        discarded,
        kept,
        removed,
        lost,
        refused,
        images,
    )


def _other_kept_storage(workspace: Workspace, provider: Provider) -> tuple[KeptStorage, ...]:
    """The storage of this name that is not the shared folder of the cluster; none where they can't be told
    from each other.
    """
    is_looked_at = _settings(workspace).user_owned and workspace.configured.exists()
    if keeps_storage(workspace) or is_looked_at:
        return ()
    return provider.kept_storage(workspace.root.name, _users(workspace))


@contextmanager
def _writable(runner: PhaseRunner) -> Iterator[None]:
    """Work on a copy of the workspace where its disk takes nothing more: `down` must not need it."""
    workspace = runner.workspace
    try:
        workspace.create()
    except DiskError as exc:
        copy = f"{workspace.root} takes nothing more ({exc.why}); working on a copy of it"
        runner.reporter.note(Notice("works-on-a-copy", copy))
        with workspace_copy(workspace, without=["logs"], place=roomiest()) as runner.workspace:
            yield
    else:
        yield


def collect_runs(
    runner: PhaseRunner,
    out: Path | None,
    discarded: Collection[JobEntry] = (),
    on_run: Callable[[RunRecord], None] = lambda _: None,
) -> Outcome[tuple[RunRecord, ...]]:
    ids = [entry.job_id for entry in discarded if entry.job_id]
    try:
        spec = applied_spec(runner.workspace)
        found = collect_all(spec, runner.workspace, out=out, discard=ids, on_run=on_run)
    except (CollectError, SchedulerError, TransportError, UsageError) as exc:
        raise not_collected_error(exc, ids) from exc
    return Outcome(found, f"{len(found)} runs")


def discard_runs(_: PhaseRunner, discarded: Collection[JobEntry]) -> Outcome[None]:
    """Note whose runs are discarded; they are removed with the cluster."""
    return Outcome(None, f"runs of {', '.join(entry.shown for entry in discarded)}")


def destroy(
    runner: PhaseRunner,
    provider: Provider,
    note: Callable[[Workspace], None] | None,
    *,
    orphans: bool,
    discard: bool,
) -> Outcome[bool]:
    """Remove the cluster, if there is one to ``note`` it of, and orphans of its name; whether there were any.

    An `up` that created no hosts took the name of these.
    """
    workspace = runner.workspace
    found = find_orphans(provider, workspace) if orphans and not workspace.inventory.exists() else {}
    reject_orphans(found, discard=discard)
    if note is not None:
        note(workspace)  # a `down` that is killed in here is finished by the next
        try:
            remove_cluster(provider, workspace.cluster_id(), workspace, runner.reporter.progress)
        except ClusterctlError:
            if all_answer(workspace):
                clear_removal(workspace)
            raise
    for cluster_id in found:
        remove_cluster(provider, cluster_id, None, runner.reporter.progress)
    return Outcome(bool(found))


def keep_storage(runner: PhaseRunner, provider: Provider, left: Record) -> Outcome[tuple[KeptStorage, ...]]:
    """Note the shared folder that the cluster ``left``: `list` shows it, and the next `up` takes it up."""
    name = runner.workspace.root.name
    noted = recorded_storage(name)
    before = {one.id: one.since for one in noted.kept} if noted else {}
    kept = tuple(
        one.model_copy(update={"since": one.since or before.get(one.id) or time.time()})
        for one in provider.kept_storage(name, left.users)
    )
    if any(one.id not in before for one in kept) and runner.workspace.root.is_dir():
        note_copies(runner.workspace)
    record_storage(name, left.model_copy(update={"kept": kept}))
    return Outcome(kept, "; ".join(map(str, kept)) or "there is none")


def remove_storage(
    runner: PhaseRunner, provider: Provider, found: tuple[KeptStorage, ...], left: Record
) -> Outcome[tuple[KeptStorage, ...]]:
    """Remove these shared folders that clusters of this name ``left`` in one place: none is there then."""
    name = runner.workspace.root.name
    for kept in found:
        provider.remove_storage(kept, report=runner.reporter.progress)
    record_storage(name, left.model_copy(update={"kept": ()}))
    runner.workspace.copies.unlink(missing_ok=True)
    return Outcome(found, "; ".join(map(str, found)) or "there is none")


def remove_looked_at(
    runner: PhaseRunner, provider: Provider, others: Collection[KeptStorage], left: Record, *, is_seen: bool
) -> Outcome[tuple[KeptStorage, ...]]:
    """Remove the shared folder that the cluster has just ``left``, and the ``others`` that were looked at.

    Raises:
        UsageError: there are more of this name, or nobody could look at its own: none is removed.
    """
    name = runner.workspace.root.name
    looked_at = {one.id for one in others}
    found = provider.kept_storage(name, left.users)
    if len([one for one in found if one.id not in looked_at]) > is_seen:
        raise UsageError(
            f"cluster {name!r} is down, and its storage is kept: there are {len(found)} of this name",
            code="storage-name-ambiguous",
            why="; ".join(map(str, found)),
            fix=f"`{REMOVE.format(name=name)}` looks at each of them, and asks",
        )
    return remove_storage(runner, provider, found, left)


def _users(workspace: Workspace) -> tuple[str, ...]:
    """The accounts of the applied spec; none where that is damaged, or lost."""
    try:
        return tuple(user.name for user in applied_spec(workspace).users)
    except UsageError:
        return ()


def _down_without_workspace(runner: PhaseRunner, *, discard: bool) -> DownResult:
    """Remove local clusters whose workspace is missing."""
    provider, name = provider_of(DEFAULT_PROVIDER), runner.workspace.root.name
    found = find_orphans(provider, runner.workspace)
    if not found:
        raise NotUpError(
            f"there is no cluster {name!r}",
            code="unknown-cluster",
            fix="name another with --cluster (`clusterctl list` shows them); one on Google Cloud or "
            "on machines of your own whose workspace is missing is found with --orphans",
        )
    reject_orphans(found, discard=discard)
    runner.reporter.step("destroy")
    for cluster_id in found:
        remove_cluster(provider, cluster_id, None, runner.reporter.progress)
    return DownResult(kept=keep_storage(runner, provider, Record(provider=DEFAULT_PROVIDER, kept=())).value)


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
    jobs: tuple[str, ...] = ()
    remedy = "converge it with `clusterctl up`, then take it down"
    if isinstance(exc, CollectError):
        jobs, remedy = exc.jobs, exc.fix
    whose = f"job {jobs[0]}: " if len(jobs) == 1 else ""
    given_up = (*discarded, *jobs) if jobs else ()
    options = " ".join(f"--discard-run {job_id}" for job_id in given_up) or "--discard"
    return CollectError(
        "the cluster stays up: runs that are not home yet can't be collected",
        code="runs-not-collected",
        where=exc.where,
        why=f"{whose}{exc.cause}",
        fix=f"{remedy}; or give these runs up: {options}",
        failures=exc.failures if jobs else (),
    )


def find_orphans(provider: Provider, workspace: Workspace) -> dict[str, tuple[Leftover, ...]]:
    """The clusters of the workspace's name that it does not know: their ids, and what there is of each."""
    known = workspace.known_id()
    ids = (cluster_id for cluster_id in provider.orphans(workspace.root.name) if cluster_id != known)
    return {cluster_id: provider.leftovers(cluster_id) for cluster_id in ids}


def reject_orphans(found: Collection[str], *, discard: bool) -> None:
    """Raise OnlyCopyError at clusters without a workspace, unless what is on them is to be discarded."""
    if found and not discard:
        raise OnlyCopyError(
            f"what exists only on cluster {', '.join(found)} can't be told",
            why="it is an orphan: the keys to its hosts were lost with its workspace",
            fix="see what there is (`clusterctl down --orphans`), copy what you need; then lose the "
            "rest: --discard",
        )


def remove_cluster(
    provider: Provider, cluster_id: str, workspace: Workspace | None, report: ProgressReporter
) -> None:
    """Remove everything of a cluster, and look whether anything is left.

    Raises:
        LeftoversError: something is; one failure each, with its cost.
    """
    provider.destroy(cluster_id, workspace=workspace, report=report)
    left = provider.leftovers(cluster_id)
    if left:
        fix = "run `clusterctl down` again; what stays then has to be removed by hand"
        raise LeftoversError(
            "something of the cluster is still there",
            why="; ".join(map(str, left)),
            fix=fix,
            failures=tuple(Failure(LeftoversError.code, str(one), phase="destroy", fix=fix) for one in left),
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


def _has_taken_none(workspace: Workspace) -> bool:
    """Whether it is of machines of the user's own, and none of them was joined to the cluster yet."""
    return is_of_own_machines(workspace) and not (
        workspace.joining.exists() or workspace.inventory.exists() or pending_releases(workspace)
    )
