"""storage, orphans: what clusters left, shown and removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated

import typer

from clusterctl.cli.down import kept_lines
from clusterctl.cli.options import Options, clusters
from clusterctl.cli.output import Screen
from clusterctl.cli.progress import Phases
from clusterctl.cli.prompts import AcceptHostKey, AskBecomePass, prompts_for
from clusterctl.cli.up import Yes
from clusterctl.cluster import remains
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.errors import excluded
from clusterctl.providers.base import Prompts, pending_releases
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.workspace import Workspace

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]", help="Name of the cluster. Default: the spec's.", autocompletion=clusters
    ),
]
Project = Annotated[
    str | None, typer.Option("--project", help="The Google Cloud project, if there is no spec.")
]
Discard = Annotated[bool, typer.Option("--discard", help="Lose all that is on it.")]


def storage_remove(
    screen: Screen,
    options: Options,
    name: Name = None,
    yes: Yes = False,
    discard: Discard = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
) -> None:
    """Remove kept storage with all that is on it. Shows what there is, and asks.

    Stops with exit code 1 without --discard, also under --yes: it may hold the only copy of files.
    """
    phases = Phases(screen, verbose=options.verbose)
    prompts = prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key, reporter=phases)
    with screen.working("looking"):
        storage = remains.find_storage(_chosen(screen, options, name), prompts, named=yes)
    known = storage.name
    screen.note(*(f"kept storage of {known!r}: {one}" for one in storage.kept))
    remains.reject_storage(storage, discard=discard)
    if storage.kept:
        screen.confirm("remove it, with all that is on it?", yes=yes)
    with phases.shown():
        remains.remove_storage(PhaseRunner(workspace=Workspace.of(known), reporter=phases), storage)
    screen.note(*(f"discarded: {one.dated}" for one in storage.kept))
    removed = f"the kept storage of cluster {known!r} is removed"
    answer = {"cluster": known, "storage": [one.as_dict() for one in storage.kept]}
    screen.result(answer, removed if storage.kept else f"cluster {known!r} has no kept storage")


def _chosen(screen: Screen, options: Options, name: str | None) -> ChosenCluster:
    """The cluster of the name that was given as an argument, or of the common options."""
    if name is not None and options.cluster is not None:
        raise excluded("NAME", "--cluster")
    return replace(options, cluster=name or options.cluster).chosen(screen)


def orphans_list(
    screen: Screen,
    options: Options,
    name: Name = None,
    project: Project = None,
    ask_become_pass: AskBecomePass = False,
) -> None:
    """List orphans: clusters of a name without a workspace, with their cost."""
    phases = Phases(screen, verbose=options.verbose)
    prompts = prompts_for(screen, ask_password=ask_become_pass, reporter=phases)
    found = _orphans(screen, _chosen(screen, options, name), project, prompts)
    screen.result(_answer(found), *_lines(found))


def orphans_remove(
    screen: Screen,
    options: Options,
    name: Name = None,
    project: Project = None,
    yes: Yes = False,
    discard: Discard = False,
    ask_become_pass: AskBecomePass = False,
) -> None:
    """Remove orphans: clusters of a name without a workspace. Shows them with their cost, and asks.

    Stops with exit code 1 without --discard, also under --yes: nobody can look at what is on them.
    """
    phases = Phases(screen, verbose=options.verbose)
    prompts = prompts_for(screen, ask_password=ask_become_pass, reporter=phases)
    found = _orphans(screen, _chosen(screen, options, name), project, prompts)
    if not found.clusters:
        screen.result(_answer(found), *_lines(found))
        return
    screen.note(*_lines(found))
    remains.reject_orphans(found, discard=discard)
    which = ", ".join(found.clusters)
    screen.confirm(f"remove all of this ({which})? It may be somebody else's", yes=yes)
    with phases.shown():
        runner = PhaseRunner(workspace=Workspace.of(found.name), reporter=phases)
        kept = remains.remove_orphans(runner, found)
    down_line = f"cluster {found.name!r} ({which}) is down; cleanup verified"
    screen.result(_answer(found), down_line, *kept_lines(found.name, kept))


def _orphans(screen: Screen, chosen: ChosenCluster, project: str | None, prompts: Prompts) -> remains.Orphans:
    with screen.working("looking"):
        found = remains.find_orphans(chosen, prompts, project=project)
    for one in pending_releases(Workspace.of(found.name)):  # of a cluster that has a workspace
        screen.note(f"note: {one}", f"  {one.fix}")
    return found


def _answer(found: remains.Orphans) -> dict[str, object]:
    orphans = [
        {"cluster_id": key, "left": [asdict(one) for one in left]} for key, left in found.clusters.items()
    ]
    return {"cluster": found.name, "provider": found.settings.type, "orphans": orphans}


def _lines(found: remains.Orphans) -> Iterator[str]:
    if not found.clusters:
        here = " on this machine; -f or --project says where else to look"
        yield f"cluster {found.name!r} has no orphans{here if found.settings.shares_kernel else ''}"
    for cluster_id, left in found.clusters.items():
        cost = sum(one.usd_per_hour or 0 for one in left)
        yield f"cluster {cluster_id}" + (f", {cost:.2f} USD an hour:" if cost else ":")
        yield from (f"  {one}" for one in left)
