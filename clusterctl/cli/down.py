"""The commands down, orphans list and orphans remove."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.cli.collect import left_notes
from clusterctl.cli.options import (
    argument,
    clusters,
    flag,
    folder_path,
    job_ids,
    option,
    takes,
)
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import (
    NoWait,
    Phases,
    Yes,
    for_operators,
    phase_dicts,
    prompts_for,
)
from clusterctl.cluster import down as cluster_down
from clusterctl.cluster.down import DownOptions
from clusterctl.cluster.losses import reject_losses
from clusterctl.cluster.nodes import expand_hosts
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.errors import excluded
from clusterctl.providers.base import Prompts, pending_releases
from clusterctl.providers.registry import provider_of
from clusterctl.providers.storage import REMOVE
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.spec.names import LocalValue
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.util import formatting
from clusterctl.util.progress import MessageLines

Name = Annotated[
    str | None, argument("Cluster name. Default: the spec's.", metavar="[NAME]", tab=clusters)
]
Project = Annotated[
    str | None, option("The Google Cloud project, if there is no spec.", "--project")
]
DiscardAll = Annotated[bool, option("Delete all data on it.", "--discard")]

# The fields of DownOptions, and the options about prompts and locks.
_DOWN_FLAGS: Final = {
    "yes": Yes,
    "discard": flag(
        bool,
        "Delete everything on the cluster, without collecting anything.",
        "--discard",
    ),
    "discard_runs": flag(
        list[str],
        "Delete the run of this job without collecting it. Repeatable.",
        "--discard-run",
        metavar="ID",
        tab=job_ids,
    ),
    "out": flag(
        Path,
        "Folder for collected runs. Default: the folder `runs` in the folder from which each "
        "job was submitted; if that can't be written, ./runs.",
        parser=folder_path,
        metavar="PATH",
        local=LocalValue.WRITTEN,
    ),
    "no_wait": NoWait,
    "gone": flag(
        list[str],
        "Do not release this on-prem host, because it no longer exists. Repeatable.",
        "--forget",
        metavar="HOST",
    ),
    "dry_run": flag(bool, "Show what would be removed, and remove nothing.", "--dry-run"),
}


@for_operators
@takes(_DOWN_FLAGS)
def down(
    screen: Screen,
    *,
    yes: bool = False,
    no_wait: bool = False,
    gone: Sequence[str] = (),
    dry_run: bool = False,
    **given: Any,
) -> None:
    """Collect runs, remove the cluster, and verify the cleanup.

    Removes nothing, and exits with code 1, if data exists only on the cluster, even with --yes; so
    does --dry-run.
    """
    # Without --yes, the prompt names the cluster.
    workspace = screen.chosen().workspace(named=yes)
    name = workspace.root.name
    if dry_run:
        _show_removal(screen, name, workspace, DownOptions(**given, gone=expand_hosts(gone)))
        return
    cluster_down.reject_unknown_unless_locked(workspace)
    consequence = (
        "and give its machines back" if workspace.adopts_hosts else "with all data on its nodes"
    )
    # An unfinished `down` has asked already.
    is_begun = workspace.removing.exists()
    screen.confirm(f"remove cluster {name!r} {consequence}?", yes=yes or is_begun)
    phases = Phases(screen)
    screen.partial_answer = {"runs": []}

    def on_run(run: RunRecord) -> None:
        screen.partial_answer["runs"].append(str(run.directory))
        screen.note(f"collected {run.directory}")
        screen.note(*left_notes(run, workspace))

    prompts = prompts_for(screen)
    down_options = DownOptions(**given, on_run=on_run, gone=expand_hosts(gone), prompts=prompts)
    with phases.shown("`clusterctl down` continues from here"):
        runner = PhaseRunner(workspace=workspace, reporter=phases, wait_s=0 if no_wait else WAIT_S)
        result = cluster_down.down(runner, down_options)
    _show(screen, name, result)


def _show_removal(screen: Screen, name: str, workspace: Workspace, options: DownOptions) -> None:
    with screen.working("searching"):
        removal = cluster_down.preview(workspace, options)
    copies = removal.copies.lines
    answer = {
        "dry_run": True,
        "cluster": name,
        "hosts": removal.hosts,
        "collected": removal.collected,
        "discarded": removal.discarded,
        "only_copies": copies,
    }
    lines = [f"`down` would remove {', '.join(removal.hosts) or 'no host'}"]
    if removal.collected:
        lines.append(f"it would first collect job {', '.join(removal.collected)}")
    if removal.discarded:
        lines.append(f"deleted without being collected: job {', '.join(removal.discarded)}")
    if not options.discard:
        screen.partial_answer = answer
        reject_losses(workspace, removal.copies)
    lines += [f"deleted, too: {line}" for line in copies]
    screen.result(answer, *lines)


def _show(screen: Screen, name: str, result: cluster_down.DownResult) -> None:
    screen.note(*(f"discarded: {line}" for line in result.lost.lines))
    size = 0
    if result.on_this_machine:
        this_machine = provider_of(DEFAULT_PROVIDER, Prompts(reporter=MessageLines(screen.note)))
        size = sum(image.size_mib for image in this_machine.cached_images())
    answer = {
        "cluster": name,
        **screen.partial_answer,
        "discarded": [entry.job_id for entry in result.discarded],
        "lost": [file.as_dict() for file in result.lost.files],
        "storage": result.storage,
        "kept_images": [asdict(image) for image in result.images],
        "phases": phase_dicts(result.phases),
        "cache_mib": size,
    }
    verified = "cleanup verified" if result.verified else "the cluster had no machines"
    prune = "remove it with `clusterctl cache prune --images` and this spec"
    lines = [f"cluster {name!r} is down; {verified}", *_storage_lines(result.storage)]
    lines += [f"kept: {image}; {prune}" for image in result.images]
    if size:
        lines.append(
            f"the node image stays cached ({size} MiB); `clusterctl cache prune` removes it"
        )
    screen.result(answer, *lines)


def _storage_lines(name: str | None) -> list[str]:
    if name is None:
        return []
    remove = REMOVE.format(name=name)
    return [f"storage {name!r} stays, with its files; `{remove}` deletes it"]


def _chosen(screen: Screen, name: str | None) -> ChosenCluster:
    """Return the cluster with this name, or by default the cluster that -f or --cluster selects."""
    if name is not None and screen.cluster is not None:
        raise excluded("NAME", "--cluster")
    return ChosenCluster(screen.file, screen.cluster if name is None else name, screen.note)


def orphans_list(
    screen: Screen,
    name: Name = None,
    project: Project = None,
) -> None:
    """List orphans: clusters with this name but no workspace, with their cost.

    Exits with code 1 if a host can't be searched.
    """
    prompts = prompts_for(screen)
    orphans = _orphans(screen, replace(prompts, reporter=Phases(screen)), name, project)
    _show_orphans(screen, orphans, _orphan_lines(orphans))


def orphans_remove(
    screen: Screen,
    name: Name = None,
    project: Project = None,
    yes: Yes = False,
    discard: DiscardAll = False,
) -> None:
    """Remove orphans: clusters with this name but no workspace. Lists them with their cost, and
    asks.

    Without --discard, exits with code 1, even with --yes: the clusters may be in use, and their
    data can't be examined.
    """
    phases = Phases(screen)
    prompts = prompts_for(screen)
    orphans = _orphans(screen, replace(prompts, reporter=phases), name, project)
    lines = list(_orphan_lines(orphans))
    if orphans.clusters:
        screen.note(*lines)
        cluster_down.reject_orphans(orphans, discard=discard)
        screen.confirm(
            f"remove these clusters ({orphans.ids})? They may belong to another user", yes=yes
        )
        with phases.shown():
            runner = PhaseRunner(workspace=Workspace.of(orphans.name), reporter=phases)
            cluster_down.remove_orphans(runner, orphans)
        lines = [f"removed cluster {orphans.name!r} ({orphans.ids}); cleanup verified"]
    _show_orphans(screen, orphans, lines)


def _show_orphans(screen: Screen, orphans: cluster_down.Orphans, lines: Iterable[str]) -> None:
    """Show the result of a search. Raise ProvisionError if hosts could not be searched."""
    if orphans.failures:
        screen.partial_answer = _orphans_dict(orphans)
        screen.note(*lines)
    cluster_down.reject_unsearched(orphans)
    screen.result(_orphans_dict(orphans), *lines)


def _orphans(
    screen: Screen, prompts: Prompts, name: str | None, project: str | None
) -> cluster_down.Orphans:
    with screen.working("searching"):
        orphans = cluster_down.find_orphans(_chosen(screen, name), prompts, project=project)
    for release in pending_releases(Workspace.of(orphans.name)):
        screen.note(f"note: {release}", f"  {release.fix}")
    return orphans


def _orphans_dict(orphans: cluster_down.Orphans) -> dict[str, object]:
    rows = [
        {
            "cluster_id": orphan.id,
            "origin": orphan.origin,
            "running": orphan.running,
            "left": [asdict(resource) for resource in resources],
        }
        for orphan, resources in orphans.clusters
    ]
    return {"cluster": orphans.name, "provider": orphans.settings.type, "orphans": rows}


def _orphan_lines(orphans: cluster_down.Orphans) -> Iterator[str]:
    if not orphans.clusters:
        elsewhere = " on this machine; search a cloud with -f or --project"
        if orphans.failures:
            elsewhere = " on the hosts that could be searched"
        elif not orphans.settings.shares_kernel:
            elsewhere = ""
        yield f"cluster {orphans.name!r} has no orphans{elsewhere}"
    for orphan, resources in orphans.clusters:
        cost = sum(resource.usd_per_hour or 0 for resource in resources)
        parts = [
            f"cluster {orphan.id}",
            orphan.origin,
            f"{formatting.cost(cost)} an hour" if cost else "",
        ]
        yield f"{', '.join(filter(None, parts))}:"
        yield from (f"  {line}" for line in orphan.running)
        yield from (f"  {resource}" for resource in resources)
