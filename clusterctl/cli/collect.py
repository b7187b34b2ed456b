"""collect: runs are brought home, and what of them was not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from clusterctl.cli.options import OutFolder, Words, argument, flag, job_ids, takes
from clusterctl.cli.output import Screen
from clusterctl.runs.collect import collecting
from clusterctl.runs.fetch import CHECKPOINTS, selection_of
from clusterctl.scheduler.session import SHORT_PATIENCE_S, open_session
from clusterctl.state.ledger import RunRecord
from clusterctl.state.submissions import RUNS, UNCHANGED
from clusterctl.state.workspace import Workspace

_MOST_REASONS = 8


# Parameters of ``selection_of``.
_SELECTION: Final = {
    "checkpoints": flag(
        str,
        "Which checkpoints of each run to copy; the others are listed. Default: latest.",
        metavar="latest|all|none",
        tab=lambda: list(CHECKPOINTS),
    ),
    "max_checkpoint": flag(
        str, "Do not copy the latest checkpoint if it is larger; list it. Default: 4GiB.", metavar="SIZE"
    ),
    "max_file": flag(str, "Do not copy larger files; list them. Default: 64GiB.", metavar="SIZE"),
    "everything": flag(
        bool,
        "Copy all that exists only on the cluster: all files of runs, whatever their size, also "
        "what earlier collects left; files in homes and on nodes' own disks.",
        "--all",
    ),
}


@takes(_SELECTION)
def collect(
    screen: Screen,
    ids: Annotated[
        Words, argument("Default: all that are not collected yet.", metavar="[ID...]", tab=job_ids)
    ] = None,
    out: OutFolder = None,
    **given: Any,
) -> None:
    """Copy runs from the cluster, with the SHA-256 of each file.

    A run is a job's logs, metrics, telemetry, accounting, and the other files in its folder.
    """
    everything, out = bool(given.get("everything")), out or RUNS
    selection = selection_of(**{**dict.fromkeys(_SELECTION), **given})
    with (
        open_session(screen.chosen(), patience_s=SHORT_PATIENCE_S) as session,
        screen.transfers() as progress,
    ):
        workspace = session.ledger.workspace
        runs = [*collecting(session, ids or None, out=out, selection=selection, progress=progress)]
        folders: tuple[Path, ...] = ()
        if everything and not ids:
            # It takes a fifth of the time of a `collect` that has little to do.
            from clusterctl.runs.only_copies import bring_all

            folders = bring_all(workspace, out, progress=progress)
    lines = []
    for run in runs:
        # `collect --all` has brought with the files of homes what a run lacks.
        if (ids or not everything) and (stays := not_brought_home(run)):
            screen.note(f"note: {stays}; {_what_becomes(workspace)}")
        cost = "" if run.cost_usd is None else f", {run.cost_usd:.2f} USD"
        lines.append(f"job {run.job_id} ({run.name}) {run.state}: {_nearby(run.directory)}{cost}")
    lines += [f"files that are of no run: {_nearby(folder)}" for folder in folders]
    answer = {"runs": [_answer(run) for run in runs], "folders": [str(folder) for folder in folders]}
    screen.result(answer, *(lines or ["nothing to collect"]))


def _answer(run: RunRecord) -> dict[str, Any]:
    skipped, folder = len(run.skipped), str(run.directory)
    return {
        "job_id": run.job_id,
        "state": run.state,
        "dir": folder,
        "skipped": skipped,
        "cost_usd": run.cost_usd,
    }


def _what_becomes(workspace: Workspace) -> str:
    """What `down` does to files in jobs' folders."""
    from clusterctl.state.inventory import inventory_of, keeps_storage

    if inventory_of(workspace).traits.user_owned:
        return "it stays on your machines"
    return "it stays on the kept storage" if keeps_storage(workspace) else "it ends with the cluster"


def not_brought_home(run: RunRecord) -> str:
    """Return the files of a job that stayed on the cluster, in one line; "" if none did."""
    by_reason: dict[str, list[str]] = {}
    for skipped in run.skipped:
        if skipped.reason != UNCHANGED:
            by_reason.setdefault(skipped.reason, []).append(skipped.path)
    if not by_reason:
        return ""
    reasons = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in by_reason.items()
    ]
    more = f", and more: see {_nearby(run.directory)}/run.json" if len(reasons) > _MOST_REASONS else ""
    shown = ", ".join(reasons[:_MOST_REASONS])
    return f"of job {run.job_id} ({run.name}) was not collected: {shown}{more}"


def _nearby(path: Path) -> Path:
    """A path as seen from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
