"""The command collect, which copies runs from the cluster here and lists skipped files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from clusterctl.cli.options import OutFolder, Words, argument, flag, job_ids, option, takes
from clusterctl.cli.output import Screen
from clusterctl.errors import Notice, excluded, printable
from clusterctl.runs.collect import (
    collect_runs,
    collected_before,
    selection_of,
    uncollected_elsewhere,
)
from clusterctl.runs.facts import line_of
from clusterctl.runs.fetch import CHECKPOINTS
from clusterctl.runs.find import Row
from clusterctl.runs.trackers import (
    BEFORE,
    FAILED,
    INCOMPLETE,
    LEFT,
    SENT,
    TRACKERS,
    SyncResult,
    chosen_trackers,
    sync_error,
    sync_run,
)
from clusterctl.scheduler.session import SHORT_PATIENCE_S, open_session
from clusterctl.spec.names import first_few
from clusterctl.state.ledger import RUNS
from clusterctl.state.run_names import cluster_of_jobs
from clusterctl.state.run_record import RunRecord, SkippedFile, WhatDownDoes
from clusterctl.state.workspace import Workspace

_MOST_REASONS = 8
# What a line says of a recording, by ``SyncResult.state``.
_STATES: Final = MappingProxyType(
    {
        SENT: "sent by",
        FAILED: "not sent by",
        INCOMPLETE: "not sent by",
        LEFT: "left out by",
    }
)

# Parameters of ``selection_of``.
_SELECTION: Final = {
    "checkpoints": flag(
        str,
        "Which checkpoints of each run to copy; skipped checkpoints are listed. Default: latest.",
        metavar="latest|all|none",
        tab=tuple(CHECKPOINTS),
    ),
    "max_checkpoint": flag(
        str,
        "Skip and list the latest checkpoint if it is larger than this. Default: 4GiB.",
        metavar="SIZE",
    ),
    "max_file": flag(str, "Skip and list files larger than this. Default: 64GiB.", metavar="SIZE"),
    "everything": flag(
        bool,
        "Copy everything that exists only on the cluster: all files of runs of any size, "
        "including what earlier collects skipped, and files in home folders and on node disks.",
        "--all",
    ),
}


@takes(_SELECTION)
def collect(
    screen: Screen,
    ids: Annotated[
        Words,
        argument(
            "Job IDs or names of runs. Default: all uncollected jobs of this folder's project.",
            metavar="[ID...]",
            tab=job_ids,
        ),
    ] = None,
    out: OutFolder = None,
    everywhere: Annotated[
        bool,
        option(
            "Also jobs that were submitted from other folders. Without --out, each run gets "
            "into the folder `runs` of its job's folder. Included in --all.",
            "--everywhere",
        ),
    ] = False,
    sync: Annotated[
        Words,
        option(
            "Also send what programs have recorded offline for this tool, by its program on this "
            "machine and with your keys, once: wandb, mlflow or trackio. Repeatable. Without IDs, of "
            "all runs of this folder's project that are here.",
            metavar="TOOL",
            tab=tuple(TRACKERS),
        ),
    ] = None,
    **given: Any,
) -> None:
    """Copy runs from the cluster, with the SHA-256 of each file.

    A run consists of a job's logs, metrics, telemetry, accounting, and the other files in its
    folder.
    """
    everything = bool(given.get("everything"))
    if everywhere and ids:
        raise excluded("--everywhere", "job IDs")
    everywhere = (everywhere or everything) and not ids
    selection = selection_of(**given)
    trackers = chosen_trackers(sync or [])
    chosen = cluster_of_jobs(ids or [], screen.chosen())
    with (
        open_session(chosen, patience_s=SHORT_PATIENCE_S) as session,
        screen.transfers() as progress,
    ):
        workspace = session.ledger.workspace
        collecting = collect_runs(
            session,
            ids or None,
            out=out,
            everywhere=everywhere,
            selection=selection,
            progress=progress,
        )
        runs = [*collecting]
        elsewhere = {} if ids or everywhere else uncollected_elsewhere(session)
        earlier = [] if ids or not trackers else collected_before(session.ledger, runs)
        folders: tuple[Path, ...] = ()
        if everything and not ids:
            # A slow import, which takes a fifth of the time of a short `collect`.
            from clusterctl.runs.only_copies import bring_all

            folders = bring_all(workspace, out or RUNS, progress=progress)
    lines = []
    for run in runs:
        if out is not None and run.directory.parent != out.absolute():
            screen.note(
                Notice(
                    "run-stays",
                    f"note: job {run.job_id} was collected before, and its run stays in "
                    f"{_nearby(run.directory)}; copy that folder to have it in {out}, too",
                )
            )
        # With --all, ``bring_all`` has also copied the skipped files of runs.
        if ids or not everything:
            screen.note(*left_notes(run, workspace))
        lines.append(line_of(Row(run), _nearby(run.directory)))
    lines += [f"files outside runs: {_nearby(folder)}" for folder in folders]
    synced = [each for run in [*runs, *earlier] for each in sync_run(run, trackers, screen.note)]
    lines += [_sync_line(each) for each in synced if each.state != BEFORE]
    answer = {
        "runs": [_answer(run) for run in runs],
        "folders": [str(folder) for folder in folders],
        "elsewhere": sum(elsewhere.values()),
        "synced": [each.as_dict() for each in synced],
    }
    error = sync_error(synced)
    if error is None or not screen.json:
        screen.result(answer, *(lines or ["nothing to collect"]))
    if elsewhere:
        screen.note(elsewhere_note(elsewhere))
    if error is not None:
        error.answer = answer
        raise error


def _sync_line(synced: SyncResult) -> str:
    reason = f": {synced.reason}" if synced.reason else ""
    return f"job {synced.job_id}: {synced.path}: {_STATES[synced.state]} {synced.tool}{reason}"


def elsewhere_note(elsewhere: Mapping[str, int]) -> Notice:
    """Return a line about other folders' uncollected jobs. elsewhere: folder -> number of jobs."""
    count = sum(elsewhere.values())
    folders = first_few([f"{printable(folder)} ({number})" for folder, number in elsewhere.items()])
    jobs = "1 job of another folder is" if count == 1 else f"{count} jobs of other folders are"
    return Notice(
        "runs-of-other-folders",
        f"note: {jobs} not collected: {folders}; `clusterctl collect --everywhere` puts each run "
        "there",
    )


def _answer(run: RunRecord) -> dict[str, Any]:
    count = len(run.not_here)
    path = str(run.directory)
    return {
        "job_id": run.job_id,
        "state": run.state,
        "dir": path,
        "skipped": count,
        "cost_usd": run.cost_usd,
    }


def left_notes(run: RunRecord, workspace: Workspace) -> list[Notice]:
    """Return a note for the files of a job that `down` refuses to delete, for those that it
    deletes without asking, and for those that do not exist. Empty if everything was collected.
    """
    left: dict[WhatDownDoes, list[SkippedFile]] = {}
    for skipped in run.not_here:
        left.setdefault(skipped.down, []).append(skipped)
    if not left:
        return []
    run_name = f"note: job {run.job_id} ({run.name})"
    notes = []
    if missing := left.pop("", []):
        notes.append(Notice("files-missing", f"{run_name}: missing: {_shown(run, missing)}"))
    # A slow import.
    from clusterctl.state.inventory import inventory_of, keeps_storage

    inventory = inventory_of(workspace)
    adopts_hosts = inventory.traits.adopts_hosts
    if left and (adopts_hosts or keeps_storage(workspace)):
        stays = [skipped for group in left.values() for skipped in group]
        place = "your machines" if adopts_hosts else "the storage"
        text = f"{run_name}: not collected: {_shown(run, stays)}; they stay on {place}"
        return [Notice("files-stay", text), *notes]
    verb = "detach" if inventory.is_foreign else "down"
    if refused := left.get("refuses"):
        text = (
            f"{run_name}: not collected: {_shown(run, refused)}; `{verb}` refuses to delete them "
            "while their data exist only there"
        )
        notes.append(Notice("files-left", text))
    if deleted := left.get("deletes"):
        text = (
            f"{run_name}: not collected: {_shown(run, deleted)}; `{verb}` deletes them without "
            "asking"
        )
        notes.append(Notice("files-unprotected", text))
    return notes


def _shown(run: RunRecord, left: Sequence[SkippedFile]) -> str:
    by_reason: dict[str, list[str]] = {}
    for skipped in left:
        leads_to = f" -> {skipped.target}" if skipped.target else ""
        by_reason.setdefault(skipped.reason, []).append(f"{skipped.path}{leads_to}")
    reasons = [f"{first_few(paths)} ({reason})" for reason, paths in by_reason.items()]
    more = (
        f", and more: see {_nearby(run.directory)}/run.json" if len(reasons) > _MOST_REASONS else ""
    )
    return ", ".join(reasons[:_MOST_REASONS]) + more


def _nearby(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
