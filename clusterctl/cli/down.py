"""down: a cluster is removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from clusterctl.cli.collect import not_brought_home
from clusterctl.cli.options import Options, OutFolder, job_ids
from clusterctl.cli.output import Screen
from clusterctl.cli.progress import Phases
from clusterctl.cli.prompts import AcceptHostKey, AskBecomePass, prompts_for
from clusterctl.cli.up import NoWait, Yes, phase_dicts
from clusterctl.cluster import down as cluster_down
from clusterctl.cluster.look import is_of_own_machines
from clusterctl.cluster.nodes import names_of
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.providers.registry import cached_images
from clusterctl.providers.storage import KeptStorage
from clusterctl.state.ledger import RunRecord
from clusterctl.state.workspace import WAIT_S


def down(
    screen: Screen,
    options: Options,
    yes: Yes = False,
    discard: Annotated[
        bool,
        typer.Option(
            "--discard",
            help="Lose what exists only on the cluster: runs, files, jobs. Nothing is collected.",
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
) -> None:
    """Collect runs, remove the cluster, and verify the cleanup.

    Stops with exit code 1 where something would be lost that exists only on the cluster, also under --yes.
    """
    workspace = options.chosen(screen).workspace(named=yes)  # else the question names it
    name = workspace.root.name
    is_own = is_of_own_machines(workspace)
    what = "and give its machines back as they were" if is_own else "with all data on its nodes"
    screen.confirm(f"take cluster {name!r} down, {what}?", yes=yes)
    phases = Phases(screen, verbose=options.verbose)
    screen.known = {"runs": []}

    def on_run(run: RunRecord) -> None:
        screen.known["runs"].append(str(run.directory))
        screen.note(f"collected {run.directory}")
        if left := not_brought_home(run):
            screen.note(f"note: {left}")

    down_options = cluster_down.DownOptions(
        discard=discard,
        discard_runs=discard_run or (),
        out=out,
        on_run=on_run,
        gone=names_of(forget or ()),
        prompts=prompts_for(screen, ask_password=ask_become_pass, accepted=accept_host_key),
    )
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
    lines = [f"cluster {name!r} is down; {verified}", *kept_lines(name, result.kept)]
    lines += [f"kept: {image}; {prune}" for image in result.images]
    if size:
        lines.append(f"the node image stays cached ({size} MiB); `clusterctl cache prune` removes it")
    screen.result(answer, *lines)


def kept_lines(name: str, kept: Iterable[KeptStorage]) -> list[str]:
    """Say what storage stays, for people."""
    then = "the next `clusterctl up` with `storage: {keep: true}` takes it up"
    return [f"kept storage of {name!r}: {one}; {then}" for one in kept]
