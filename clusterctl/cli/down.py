"""down, storage remove, orphans: clusters and what they left are removed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from clusterctl.cli.collect import not_brought_home
from clusterctl.cli.options import OutFolder, argument, clusters, flag, job_ids, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import AcceptHostKey, AskBecomePass, NoWait, Phases, Yes, phase_dicts, prompts_for
from clusterctl.cluster import down as cluster_down
from clusterctl.cluster.look import is_of_own_machines
from clusterctl.cluster.nodes import names_of
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.errors import excluded
from clusterctl.providers.base import pending_releases
from clusterctl.providers.registry import cached_images
from clusterctl.providers.storage import KeptStorage
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.ledger import RunRecord
from clusterctl.state.workspace import WAIT_S, Workspace

Name = Annotated[
    str | None,
    argument("Name of the cluster. Default: the spec's.", metavar="[NAME]", tab=clusters),
]
Project = Annotated[str | None, option("The Google Cloud project, if there is no spec.", "--project")]
DiscardAll = Annotated[bool, option("Lose all that is on it.", "--discard")]


# Fields of DownOptions, and how `down` is asked.
_DOWN_FLAGS: Final = {
    "yes": Yes,
    "discard": flag(
        bool, "Lose what exists only on the cluster: runs, files, jobs. Nothing is collected.", "--discard"
    ),
    "discard_runs": flag(
        list[str],
        "Lose the run of this job, and its files on the cluster. Repeatable.",
        "--discard-run",
        metavar="ID",
        tab=job_ids,
    ),
    "out": OutFolder,
    "no_wait": NoWait,
    "ask_become_pass": AskBecomePass,
    "accept_host_key": AcceptHostKey,
    "gone": flag(
        list[str], "Do not wait for this on-prem host: it is gone for good.", "--forget", metavar="HOST"
    ),
}


@takes(_DOWN_FLAGS)
def down(
    screen: Screen,
    *,
    yes: bool = False,
    no_wait: bool = False,
    ask_become_pass: bool = False,
    accept_host_key: Sequence[str] = (),
    gone: Sequence[str] = (),
    **given: Any,
) -> None:
    """Collect runs, remove the cluster, and verify the cleanup.

    Stops with exit code 1 where something would be lost that exists only on the cluster, also under --yes.
    """
    workspace = screen.chosen().workspace(named=yes)  # else the question names it
    name = workspace.root.name
    is_own = is_of_own_machines(workspace)
    what = "and give its machines back as they were" if is_own else "with all data on its nodes"
    screen.confirm(f"take cluster {name!r} down, {what}?", yes=yes)
    phases = Phases(screen)
    screen.known = {"runs": []}

    def on_run(run: RunRecord) -> None:
        screen.known["runs"].append(str(run.directory))
        screen.note(f"collected {run.directory}")
        if left := not_brought_home(run):
            screen.note(f"note: {left}")

    prompts = prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key)
    down_options = cluster_down.DownOptions(**given, on_run=on_run, gone=names_of(gone), prompts=prompts)
    with phases.shown("`clusterctl down` goes on from here"):
        runner = PhaseRunner(workspace=workspace, reporter=phases, wait_s=0 if no_wait else WAIT_S)
        result = cluster_down.down(runner, down_options)
    _show(screen, name, result)


def _show(screen: Screen, name: str, result: cluster_down.DownResult) -> None:
    screen.note(*(f"discarded: {line}" for line in result.lost.lines))
    images = cached_images(report=lambda what: screen.note(str(what))) if result.on_this_machine else ()
    size = sum(image.size_mib for image in images)
    answer = {
        "cluster": name,
        **screen.known,
        "discarded": [entry.job_id for entry in result.discarded],
        "lost": [one.as_dict() for one in result.lost.files],
        "storage": [one.as_dict() for one in result.kept],
        "kept_images": [asdict(image) for image in result.images],
        "phases": phase_dicts(result.phases),
        "cache_mib": size,
    }
    verified = "cleanup verified" if result.verified else "it had no machines"
    prune = "`clusterctl cache prune --images` with this spec removes it"
    lines = [f"cluster {name!r} is down; {verified}", *_kept_lines(name, result.kept)]
    lines += [f"kept: {image}; {prune}" for image in result.images]
    if size:
        lines.append(f"the node image stays cached ({size} MiB); `clusterctl cache prune` removes it")
    screen.result(answer, *lines)


def _kept_lines(name: str, kept: Iterable[KeptStorage]) -> list[str]:
    then = "the next `clusterctl up` with `storage: {keep: true}` takes it up"
    return [f"kept storage of {name!r}: {one}; {then}" for one in kept]


def storage_remove(
    screen: Screen,
    name: Name = None,
    yes: Yes = False,
    discard: DiscardAll = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
) -> None:
    """Remove kept storage with all that is on it. Shows what there is, and asks.

    Stops with exit code 1 without --discard, also under --yes: it may hold the only copy of files.
    """
    phases = Phases(screen)
    prompts = prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key)
    with screen.working("looking"):
        prompts = replace(prompts, reporter=phases)
        storage = cluster_down.find_storage(_chosen(screen, name), prompts, named=yes)
    known = storage.name
    screen.note(*(f"kept storage of {known!r}: {one}" for one in storage.kept))
    cluster_down.reject_storage(storage, discard=discard)
    if storage.kept:
        screen.confirm("remove it, with all that is on it?", yes=yes)
    with phases.shown():
        cluster_down.remove_storage(PhaseRunner(workspace=Workspace.of(known), reporter=phases), storage)
    screen.note(*(f"discarded: {one.dated}" for one in storage.kept))
    removed = f"the kept storage of cluster {known!r} is removed"
    answer = {"cluster": known, "storage": [one.as_dict() for one in storage.kept]}
    screen.result(answer, removed if storage.kept else f"cluster {known!r} has no kept storage")


def _chosen(screen: Screen, name: str | None) -> ChosenCluster:
    """The cluster of the name that was given as an argument, or of the common options."""
    if name is not None and screen.cluster is not None:
        raise excluded("NAME", "--cluster")
    return ChosenCluster(screen.file, name or screen.cluster, screen.note)


def orphans_list(
    screen: Screen, name: Name = None, project: Project = None, ask_become_pass: AskBecomePass = False
) -> None:
    """List orphans: clusters of a name without a workspace, with their cost."""
    found = _orphans(screen, Phases(screen), name, project, ask_password=ask_become_pass)
    screen.result(_orphans_dict(found), *_orphan_lines(found))


def orphans_remove(
    screen: Screen,
    name: Name = None,
    project: Project = None,
    yes: Yes = False,
    discard: DiscardAll = False,
    ask_become_pass: AskBecomePass = False,
) -> None:
    """Remove orphans: clusters of a name without a workspace. Shows them with their cost, and asks.

    Stops with exit code 1 without --discard, also under --yes: nobody can look at what is on them.
    """
    phases = Phases(screen)
    found = _orphans(screen, phases, name, project, ask_password=ask_become_pass)
    lines = list(_orphan_lines(found))
    if found.clusters:
        screen.note(*lines)
        cluster_down.reject_orphans(found, discard=discard)
        which = ", ".join(found.clusters)
        screen.confirm(f"remove all of this ({which})? It may be somebody else's", yes=yes)
        with phases.shown():
            runner = PhaseRunner(workspace=Workspace.of(found.name), reporter=phases)
            kept = cluster_down.remove_orphans(runner, found)
        down_line = f"cluster {found.name!r} ({which}) is down; cleanup verified"
        lines = [down_line, *_kept_lines(found.name, kept)]
    screen.result(_orphans_dict(found), *lines)


def _orphans(
    screen: Screen, phases: Phases, name: str | None, project: str | None, *, ask_password: bool
) -> cluster_down.Orphans:
    prompts = replace(prompts_for(screen, ask_password=ask_password), reporter=phases)
    with screen.working("looking"):
        found = cluster_down.find_orphans(_chosen(screen, name), prompts, project=project)
    for one in pending_releases(Workspace.of(found.name)):  # of a cluster that has a workspace
        screen.note(f"note: {one}", f"  {one.fix}")
    return found


def _orphans_dict(found: cluster_down.Orphans) -> dict[str, object]:
    orphans = [
        {"cluster_id": key, "left": [asdict(one) for one in left]} for key, left in found.clusters.items()
    ]
    return {"cluster": found.name, "provider": found.settings.type, "orphans": orphans}


def _orphan_lines(found: cluster_down.Orphans) -> Iterator[str]:
    if not found.clusters:
        here = " on this machine; -f or --project says where else to look"
        yield f"cluster {found.name!r} has no orphans{here if found.settings.shares_kernel else ''}"
    for cluster_id, left in found.clusters.items():
        cost = sum(one.usd_per_hour or 0 for one in left)
        yield f"cluster {cluster_id}" + (f", {cost:.2f} USD an hour:" if cost else ":")
        yield from (f"  {one}" for one in left)
