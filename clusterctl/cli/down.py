"""down: a cluster is removed, or what is left of one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from clusterctl.cli.collect import brought_otherwise, not_brought_home
from clusterctl.cli.options import Options, OutFolder, clusters, job_ids
from clusterctl.cli.output import Phases, Screen
from clusterctl.cli.prompts import AcceptHostKey, AskBecomePass, prompts_for
from clusterctl.cli.up import NoWait, Yes, phase_dicts
from clusterctl.cluster import down as cluster_down
from clusterctl.cluster.context import PhaseRunner, provider_of
from clusterctl.cluster.look import (
    is_of_own_machines,
    look_at_storage,
    note_discarded,
    reject_lost_storage,
)
from clusterctl.cluster.nodes import names_of
from clusterctl.errors import ClusterctlError, NotUpError, UsageError
from clusterctl.providers.base import Leftover, Prompts, pending_releases
from clusterctl.providers.registry import cached_images
from clusterctl.providers.storage import KeptStorage, Record, all_recorded, record, recorded
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.gcp import whole_project
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.ledger import RunRecord
from clusterctl.state.workspace import WAIT_S, Workspace


def down(
    screen: Screen,
    options: Options,
    yes: Yes = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard",
            help="Lose what exists only on the cluster, or on kept storage: runs, files, jobs. "
            "Nothing is collected.",
        ),
    ] = False,
    discard_run: Annotated[
        list[str] | None,
        typer.Option(
            "--discard-run",
            metavar="ID",
            help="Lose the run of this job, and its files on the cluster. Repeatable.",
            autocompletion=job_ids,
        ),
    ] = None,
    out: OutFolder = None,
    no_wait: NoWait = False,
    ask_become_pass: AskBecomePass = False,
    accept_host_key: AcceptHostKey = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            "--forget", metavar="HOST", help="Do not wait for this on-prem host: it is gone for good."
        ),
    ] = None,
    storage: Annotated[
        bool,
        typer.Option(
            "--storage",
            help="Remove kept storage too (storage.keep), also after an earlier `down`. Asks.",
        ),
    ] = False,
    orphans: Annotated[
        bool,
        typer.Option(
            "--orphans",
            help="Remove orphans: clusters of that name without a workspace. Shows them and asks.",
        ),
    ] = False,
    project: Annotated[
        str | None,
        typer.Option("--project", help="With --orphans: the Google Cloud project, if there is no spec."),
    ] = None,
) -> None:
    """Collect runs, remove the cluster, and verify the cleanup.

    Stops with exit code 1 where something would be lost that exists only on the cluster, also under --yes.
    """
    if orphans:
        down_orphans(
            screen, options, project=project, yes=yes, discard=discard, ask_become_pass=ask_become_pass
        )
        return
    if project is not None:
        raise UsageError("--project is for --orphans", code="option-needs-option", fix="say --orphans, too")
    workspace = options.chosen(screen).workspace(named=yes or storage)  # else the question names it
    name = workspace.root.name
    if storage and not workspace.root.is_dir():
        prompts = prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key)
        down_storage(screen, options, prompts, yes=yes, discard=discard)
        return
    is_own = is_of_own_machines(workspace)
    what = "and give its machines back as they were" if is_own else "with all data on its nodes"
    what += ", and remove its shared folder with all that is on it" if storage else ""
    screen.confirm(f"take cluster {name!r} down, {what}?", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    screen.known = {"runs": []}
    brought = brought_otherwise(workspace)

    def on_run(run: RunRecord) -> None:
        screen.known["runs"].append(str(run.directory))
        screen.note(f"collected {run.directory}")
        if left := not_brought_home(run, brought):
            screen.note(f"note: {left}")

    wanted = cluster_down.DownOptions(
        discard=discard,
        discard_runs=discard_run or (),
        out=out,
        on_run=on_run,
        gone=names_of(forget or ()),
        prompts=prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key),
        remove_storage=storage,
    )
    with phases.shown("`clusterctl down` goes on from here"):
        done = cluster_down.down(
            PhaseRunner(workspace=workspace, reporter=phases, wait_s=0 if no_wait else WAIT_S), wanted
        )
    for entry in done.discarded:
        screen.note(f"discarded the run of {entry.shown}")
    for line in done.lost.lines:
        screen.note(f"discarded: {line}")
    images = cached_images(report=lambda what: screen.note(str(what))) if done.on_this_machine else ()
    size = sum(image.size_mib for image in images)
    answer = {
        "cluster": name,
        **screen.known,
        "discarded": [entry.job_id for entry in done.discarded],
        "lost": [one.as_dict() for one in done.lost.files],
        "storage": [one.as_dict() for one in done.kept],
        "kept_images": [asdict(image) for image in done.images],
        "phases": phase_dicts(done.phases),
    }
    verified = "cleanup verified"
    if not done.looked:
        verified = "its last machines are forgotten" if forget else "nothing had been put on any machine"
    lines = [f"cluster {name!r} is down; {verified}"]
    lines += _kept_lines(name, done.kept)
    lines += [f"its storage is removed: {one}" for one in done.removed]
    prune = "`clusterctl cache prune --images` with this spec removes it"
    lines += [f"kept: {image}; {prune}" for image in done.images]
    if size:
        lines.append(f"the node image stays cached ({size} MiB); `clusterctl cache prune` removes it")
    screen.result({**answer, "cache_mib": size}, *lines)


def down_storage(screen: Screen, options: Options, prompts: Prompts, *, yes: bool, discard: bool) -> None:
    """Show the storage that earlier clusters of this name left, ask, and remove it.

    Raises:
        OnlyCopyError: it holds what exists nowhere else, or may, and that is not to be discarded.
        UsageError: a cluster has it, or another machine.
    """
    workspace = options.chosen(screen).workspace()
    name = workspace.root.name
    known = recorded(name)
    noted = known or Record(provider=DEFAULT_PROVIDER, kept=())
    if not noted.kept and (options.cluster is None or options.file is not None):
        spec = spec_of(options.chosen(screen))
        noted = Record.model_validate(
            {"provider": spec.provider, "users": [one.name for one in spec.users], "kept": ()}
        )
    provider = provider_of(noted.provider, prompts)
    with screen.working("looking"):
        since = {one.id: one.since for one in noted.kept}
        found = tuple(
            one.model_copy(update={"since": one.since or since.get(one.id)})
            for one in provider.kept_storage(name, noted.users)
        )
        for one in found:
            provider.refuse_used(one)
        lost = look_at_storage(provider, workspace, found)
    answer = {
        "cluster": name,
        "storage": [one.as_dict() for one in found],
        "lost": [one.as_dict() for one in lost.files],
    }
    if not found:
        if known is None and options.cluster is not None:
            raise _no_storage(name)
        record(name, None)
        workspace.copies.unlink(missing_ok=True)
        screen.result(answer, f"there is no kept storage of cluster {name!r}")
        return
    screen.note(*(f"kept storage of {name!r}: {one}" for one in found))
    if not discard:
        reject_lost_storage(lost, name, user_owned=noted.provider.user_owned)
    screen.confirm("remove it, with all that is on it?", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    runner = PhaseRunner(workspace=workspace, reporter=phases)
    with phases.shown(), workspace.lock("down", wait_s=WAIT_S, waiting=runner.reporter.note):
        note_discarded(workspace, lost.lines, since=(now := time.time()))
        try:
            cluster_down.remove_storage(runner, provider, found, noted)
        except ClusterctlError:
            with suppress(ClusterctlError):
                there = {one.id: one.homes for one in provider.kept_storage(name, noted.users)}
                if all(there.get(one.id) == one.homes for one in found):  # nothing was removed
                    note_discarded(workspace, None, since=now)
            raise
    screen.note(*(f"discarded: {line}" for line in lost.lines))
    screen.result(answer, f"the kept storage of cluster {name!r} is removed")


def _no_storage(name: str) -> UsageError:
    """The error for a name of no cluster and of no kept storage."""
    there = [f"cluster {one}" for one in clusters("")]
    there += [f"kept storage of {one}" for one in dict.fromkeys(kept.cluster for kept in all_recorded())]
    return NotUpError(
        f"there is no cluster {name!r}, and no kept storage of one",
        code="unknown-cluster",
        why=f"there is {', '.join(there) or 'none of any name'}",
        fix="name what there is; storage whose record was lost is found with the cluster's spec: -f",
    )


def down_orphans(
    screen: Screen,
    options: Options,
    *,
    project: str | None,
    yes: bool,
    discard: bool,
    ask_become_pass: bool = False,
) -> None:
    """Find them, show what there is with its cost, ask, and remove it all."""
    settings, name = _where(screen, options, project)
    provider = provider_of(settings, prompts_for(screen, ask_password=ask_become_pass))
    with screen.working("looking"):
        found = cluster_down.find_orphans(provider, Workspace.of(name))
    orphans = [{"cluster_id": key, "left": [asdict(one) for one in left]} for key, left in found.items()]
    answer = {"cluster": name, "provider": settings.type, "orphans": orphans}
    for one in pending_releases(Workspace.of(name)):  # of a cluster that has a workspace
        screen.note(f"note: {one}", f"  {one.fix}")
    if not found:
        here = " on this machine; -f or --project says where else to look" if settings.shares_kernel else ""
        screen.result(answer, f"cluster {name!r} has no orphans{here}")
        return
    screen.note(*_lines(found))
    if not settings.user_owned:  # whose files stay
        cluster_down.reject_orphans(found, discard=discard)
    which = ", ".join(found)
    screen.confirm(f"remove all of this ({which})? It may be somebody else's", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    with phases.shown():
        phases.step("destroy")
        for cluster_id in found:
            cluster_down.remove_cluster(provider, cluster_id, None, phases.progress)
        runner, left = PhaseRunner(workspace=Workspace.of(name)), Record(provider=settings, kept=())
        kept = cluster_down.keep_storage(runner, provider, left).value if settings.shares_kernel else ()
    down_line = f"cluster {name!r} ({which}) is down; cleanup verified"
    screen.result(answer, down_line, *_kept_lines(name, kept))


def _kept_lines(name: str, kept: Iterable[KeptStorage]) -> list[str]:
    then = "the next `clusterctl up` with `storage: {keep: true}` takes it up"
    return [f"kept storage of {name!r}: {one}; {then}" for one in kept]


def _where(screen: Screen, options: Options, project: str | None) -> tuple[ProviderSettings, str]:
    """Whom to ask, and for which name. Who says only the name means a local one where no spec is known."""
    if project is None:
        if options.cluster is not None and not options.chosen(screen).workspace().spec.exists():
            return DEFAULT_PROVIDER, options.cluster
        spec = spec_of(options.chosen(screen))
        return spec.provider, spec.name
    if options.cluster is None or options.file is not None:
        raise UsageError(
            "--project needs the name of a cluster and no spec file",
            code="option-needs-option",
            fix="say --cluster NAME with it",
        )
    return whole_project(project), options.cluster


def _lines(found: Mapping[str, tuple[Leftover, ...]]) -> list[str]:
    lines = []
    for cluster_id, left in found.items():
        cost = sum(one.usd_per_hour or 0 for one in left)
        lines.append(f"cluster {cluster_id}" + (f", {cost:.2f} USD an hour:" if cost else ":"))
        lines += [f"  {one}" for one in left]
    return lines
