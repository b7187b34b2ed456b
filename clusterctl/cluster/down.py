"""How a cluster goes: its runs come home, all of it is removed, and an independent look proves that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterctl.cluster.nodes import forget
from clusterctl.cluster.plan import copied
from clusterctl.cluster.session import Phase, Run, provider_of
from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    DiskError,
    Failure,
    LeftoversError,
    NotUpError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.providers.base import Leftover, Provider
from clusterctl.providers.pending import pending_releases
from clusterctl.providers.prompts import NO_PROMPTS, Prompts
from clusterctl.runs.collect import collect_all, uncollected
from clusterctl.scheduler.session import applied_spec
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.spec.models import Provider as ProviderSettings
from clusterctl.state.journal import Journal
from clusterctl.state.ledger import JobEntry, Ledger, RunRecord
from clusterctl.state.lock import WAIT_S as LOCK_WAIT_S
from clusterctl.state.workspace import Workspace
from clusterctl.util.lifetime import roomiest, sweep
from clusterctl.util.progress import WAITING, PhaseReporter, Reporter


@dataclass(frozen=True, slots=True)
class Orphan:
    """A cluster that no workspace here knows any more, and what there is of it."""

    cluster_id: str
    left: tuple[Leftover, ...]


def to_discard(workspace: Workspace, ids: Collection[str], *, everything: bool) -> tuple[JobEntry, ...]:
    """The submissions whose runs are not home and are given up: those of the jobs ``ids``, or all.

    Raises:
        UsageError: one of the ids is of no job that was submitted from here.
    """
    not_home = uncollected(workspace)
    submitted = {entry.job_id for entry in Ledger(workspace.jobs).entries()}
    if unknown := [job_id for job_id in ids if job_id not in submitted]:
        there = ", ".join(entry.job_id for entry in not_home if entry.job_id) or "none"
        raise UsageError(
            f"there is no run of job {', '.join(unknown)} to discard",
            why="no such job was submitted from here",
            fix=f"the jobs whose runs are not home: {there}",
        )
    return tuple(entry for entry in not_home if everything or entry.job_id in ids)


def bring_home(
    workspace: Workspace, out: Path | None, discard: Collection[JobEntry] = ()
) -> tuple[RunRecord, ...]:
    """Collect what was not collected yet, but for what is to be discarded.

    Raises:
        CollectError: a run could not be brought home; all others were.
    """
    ids = [entry.job_id for entry in discard if entry.job_id]
    try:
        return collect_all(applied_spec(workspace), workspace, out=out, discard=ids)
    except (CollectError, SchedulerError, TransportError, UsageError) as exc:
        raise stays_up(exc, ids) from exc


def stays_up(exc: ClusterctlError, discarded: Sequence[str] = ()) -> CollectError:
    """The error of a `down` that could not collect: which jobs' runs, why, and how to give up these alone,
    beside those that are ``discarded`` already.
    """
    jobs = exc.jobs if isinstance(exc, CollectError) else ()
    whose = f"job {jobs[0]}: " if len(jobs) == 1 else ""
    given_up = (*discarded, *jobs) if jobs else ()
    options = " ".join(f"--discard-run {job_id}" for job_id in given_up) or "--discard-runs"
    remedy = (
        exc.fix if isinstance(exc, CollectError) else "converge it with `clusterctl up`, then take it down"
    )
    return CollectError(
        "the cluster stays up: runs that are not home yet can't be collected",
        where=exc.where,
        why=f"{whose}{exc.what}: {exc.why}" if exc.why else f"{whose}{exc.what}",
        fix=f"{remedy}; or give these runs up: {options}",
        failures=exc.failures if jobs else (),
    )


def find_orphans(provider: Provider, name: str, *, known: str | None) -> tuple[Orphan, ...]:
    """The clusters of that name that the provider has, but for the one whose id is ``known``."""
    ids = (cluster_id for cluster_id in provider.orphans(name) if cluster_id != known)
    return tuple(Orphan(cluster_id, provider.leftovers(cluster_id)) for cluster_id in ids)


def destroy_lost(provider: Provider, name: str, workspace: Workspace, report: Reporter) -> None:
    """Remove the clusters of that name that were lost: an `up` that came to no hosts took their name.

    Raises:
        LeftoversError: something of one is still there.
    """
    for orphan in find_orphans(provider, name, known=workspace.known_id()):
        destroy(provider, orphan.cluster_id, None, report)


def destroy(provider: Provider, cluster_id: str, workspace: Workspace | None, report: Reporter) -> None:
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


@dataclass(frozen=True, slots=True)
class Down:
    """A cluster that is gone, and the runs that were brought home before, and those that were not.

    ``on_this_machine``: its nodes were parts of it. ``looked``: whether there was anything to look for.
    """

    runs: tuple[RunRecord, ...]
    phases: tuple[Phase, ...]
    on_this_machine: bool = True
    looked: bool = True
    discarded: tuple[JobEntry, ...] = ()


def down(
    workspace: Workspace,
    *,
    name: str,
    reporter: PhaseReporter,
    discard_runs: bool = False,
    discard: Collection[str] = (),
    out: Path | None = None,
    gone: Collection[str] = (),
    prompts: Prompts = NO_PROMPTS,
    wait_s: float = LOCK_WAIT_S,
) -> Down:
    """Bring home what was not collected, then remove the cluster and prove that nothing is left.

    The runs of the jobs to ``discard`` are not brought home, nor is any with ``discard_runs``.
    Machines of the user's own that are ``gone`` for good are not waited for.
    ``wait_s`` bounds how long another clusterctl that works on the cluster is waited for.

    Raises:
        CollectError: a run could not be brought home; the cluster stays.
        DiskError: all is removed but the workspace, which stands on a read-only file system.
        LeftoversError: an independent look found something of the cluster.
        LockedError: another clusterctl was still at work after ``wait_s``.
        UsageError: there is no such cluster, it knows nothing of a machine that is gone, or a job to discard
            was not submitted from here.
    """
    with workspace.lock("down", wait_s=wait_s, waiting=lambda text: reporter(WAITING, text)):
        sweep()
        discarded = to_discard(workspace, discard, everything=discard_runs)
        if not workspace.root.is_dir():
            return _down_lost(name, reporter)
        with _writable(workspace, lambda text: reporter(WAITING, text)) as records:
            done = _taken_down(
                records,
                name=name,
                reporter=reporter,
                discarded=discarded,
                out=out,
                gone=gone,
                prompts=prompts,
            )
        workspace.remove()
    return done


@contextmanager
def _writable(workspace: Workspace, report: Callable[[str], None]) -> Iterator[Workspace]:
    """The workspace, or a copy elsewhere where its disk takes nothing more: `down` must not need it."""
    try:
        workspace.create()
    except DiskError as exc:
        report(f"{workspace.root} takes nothing more ({exc.why}); working on a copy of it")
        with copied(workspace, without=["logs"], place=roomiest()) as copy:
            yield copy
    else:
        yield workspace


def _taken_down(
    workspace: Workspace,
    *,
    name: str,
    reporter: PhaseReporter,
    discarded: Collection[JobEntry],
    out: Path | None,
    gone: Collection[str],
    prompts: Prompts,
) -> Down:
    if _has_made_nothing(workspace):
        forget(workspace, gone)
        return Down((), (), on_this_machine=False, looked=False)
    settings = _settings(workspace)
    provider = provider_of(settings, prompts)
    run = Run("down", Journal(workspace.journal), reporter)
    runs: tuple[RunRecord, ...] = ()
    if set(uncollected(workspace)) - set(discarded):
        with run.phase("collect") as (step, _):
            runs = bring_home(workspace, out, discarded)
            step.note = f"{len(runs)} runs"
    if discarded:
        with run.phase("discard") as (step, _):
            step.note = f"runs of {', '.join(entry.shown for entry in discarded)}"
    if forgotten := forget(workspace, gone):
        prompts.note(f"forgotten: {'; '.join(forgotten)}")
    with run.phase("destroy") as (_, report):
        if looked := not _has_taken_none(workspace):
            destroy(provider, workspace.cluster_id(), workspace, report)
        if settings.shares_kernel and not workspace.hosts.exists():
            destroy_lost(provider, name, workspace, report)
    return Down(runs, tuple(run.phases), settings.shares_kernel, looked, tuple(discarded))


def _settings(workspace: Workspace) -> ProviderSettings:
    """The provider of the cluster as it was raised. Of a local one, that may be damaged or missing.

    Raises:
        UsageError: it can't be read, and what Terraform has made would be forgotten.
    """
    try:
        return applied_spec(workspace).provider
    except UsageError:
        states = [*workspace.terraform.glob("*.tfstate*")]
        if (
            states
            or is_of_own_machines(workspace)
            or (workspace.terraform.is_dir() and (workspace.spec.exists() or workspace.hosts.exists()))
        ):
            raise
        return DEFAULT_PROVIDER  # the spec is written before anything is made at Google


def is_of_own_machines(workspace: Workspace) -> bool:
    """Whether what stands in it is of machines of the user's own."""
    return workspace.access_config.exists()


def _has_made_nothing(workspace: Workspace) -> bool:
    """Whether `up` ended before any host was made or joined."""
    records = (workspace.spec, workspace.hosts, workspace.joining, workspace.terraform)
    return _has_taken_none(workspace) or not (
        workspace.known_id() or pending_releases(workspace) or any(path.exists() for path in records)
    )


def _has_taken_none(workspace: Workspace) -> bool:
    """Whether it is of machines of the user's own, and none of them was joined to the cluster yet."""
    return is_of_own_machines(workspace) and not (
        workspace.joining.exists() or workspace.hosts.exists() or pending_releases(workspace)
    )


def orphans(settings: ProviderSettings, name: str, prompts: Prompts = NO_PROMPTS) -> tuple[Orphan, ...]:
    """The clusters of that name that have no workspace here, found by looking at them."""
    return find_orphans(provider_of(settings, prompts), name, known=Workspace.of(name).known_id())


def down_orphans(
    settings: ProviderSettings,
    found: Sequence[Orphan],
    *,
    reporter: PhaseReporter,
    prompts: Prompts = NO_PROMPTS,
) -> None:
    """Remove them, and prove that nothing is left.

    Raises:
        LeftoversError: an independent look found something of one.
    """
    provider = provider_of(settings, prompts)
    for orphan in found:
        destroy(provider, orphan.cluster_id, None, lambda text: reporter("destroy", text))


def _down_lost(name: str, reporter: PhaseReporter) -> Down:
    """Remove local clusters whose workspace was lost."""
    found = orphans(DEFAULT_PROVIDER, name)
    if not found:
        raise NotUpError(
            f"there is no cluster {name!r}",
            fix="name another with --cluster (`clusterctl list` shows them); one on Google Cloud or "
            "on machines of your own whose workspace was lost is found with --orphans",
        )
    down_orphans(DEFAULT_PROVIDER, found, reporter=reporter)
    return Down((), ())
