"""The command usage, which shows the hours and the cost of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

from clusterctl.cli.all_clusters import ALL, ClusterAnswers, ask_all
from clusterctl.cli.options import option
from clusterctl.cli.output import Screen
from clusterctl.errors import Notice, NotUpError
from clusterctl.runs.query import parse_since
from clusterctl.runs.saved_usage import ClusterUsage
from clusterctl.runs.usage import (
    removed_usages,
    report_usage,
    usage_of_cluster,
    usage_of_runs,
    usage_since,
)
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, open_session
from clusterctl.scheduler.slurm.usage import UsageGrouping, UsageReport, UsageRow, usage_keys
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.workspace import clusters_up
from clusterctl.util import formatting
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts

_NONE: Final = "-"


def usage(
    screen: Screen,
    by: Annotated[
        str,
        option(
            "Group by user, account, partition, cluster, month, or several of them.",
            metavar="KEY,...",
        ),
    ] = UsageGrouping.USER.value,
    since: Annotated[str, option("Count since 30d, 12h, or 2026-01-31.", metavar="TIME")] = "30d",
    runs: Annotated[
        bool,
        option(
            "Count the runs that were collected on this machine instead. This needs no cluster.",
            "--runs",
        ),
    ] = False,
) -> None:
    """Show hours and cost by user, account, partition or month.

    The hours of nodes, CPUs and GPUs are from Slurm's accounting, with the jobs of all users that
    you may see; on a cluster without accounting, from the runs that were collected on this machine.
    `down` writes them here before it removes a cluster. With `--cluster all`: of all your clusters,
    up or down.
    """
    names = [name.strip() for name in by.split(",") if name.strip()] or [UsageGrouping.USER.value]
    keys = usage_keys(names)
    unanswered: list[dict[str, Any]] | None = None
    if runs:
        cluster = None if screen.cluster == ALL else screen.chosen().named_cluster()
        found = usage_of_runs(keys, since, cluster)
    else:
        if screen.cluster == ALL:
            found, answers = _usage_of_all(keys, since)
            answers.note_errors(screen)
            unanswered = answers.unanswered()
        else:
            found = _usage_of_chosen(screen.chosen(), keys, since)
        if found.source == "runs":
            text = (
                "note: the cluster has no accounting: only the runs that were collected on this "
                "machine are counted"
            )
            screen.note(Notice("usage-of-runs", text))
    if found.unread:
        records = counted(found.unread, "record")
        text = f"note: {records} of jobs can't be read"
        screen.note(Notice("usage-incomplete", text))
    screen.note(*found.notes)
    more = {} if unanswered is None else {"unanswered": unanswered}
    screen.result({**_answer(found), **more}, *_table(screen, found))


def _usage_of_chosen(chosen: ChosenCluster, by: Sequence[UsageGrouping], since: str) -> UsageReport:
    """Return the usage of a cluster that is up or was removed."""
    workspace = chosen.workspace()
    if not workspace.inventory.exists() and (removed := removed_usages(workspace.root.name)):
        return report_usage(removed, by, since)
    with open_session(chosen, patience_s=SHOWN_PATIENCE_S) as session:
        return usage_of_cluster(session, by, since)


def _usage_of_all(
    by: Sequence[UsageGrouping], since: str
) -> tuple[UsageReport, ClusterAnswers[ClusterUsage]]:
    """Return the usage of all clusters together, and the answers of those that are up."""
    first = parse_since(since)

    def ask(name: str) -> ClusterUsage:
        chosen = ChosenCluster(None, name)
        with open_session(chosen, patience_s=SHOWN_PATIENCE_S) as session:
            return usage_since(session, first)

    names = clusters_up()
    removed = removed_usages()
    if not names and not removed:
        raise NotUpError("no cluster is up", fix="`clusterctl up` creates a cluster")
    answers = ClusterAnswers(*call_on_hosts(names, ask)) if removed else ask_all(names, ask)
    return report_usage([*answers.found.values(), *removed], by, since), answers


def _answer(found: UsageReport) -> dict[str, Any]:
    def row(each: UsageRow) -> dict[str, Any]:
        values = asdict(each)
        key = values.pop("key")
        return {**dict(zip(found.by, key, strict=True)), **values}

    total = row(found.total)
    return {
        "source": found.source,
        "since": found.since,
        "by": list(found.by),
        "usage": [row(each) for each in found.rows],
        "sum": {key: value for key, value in total.items() if key not in found.by},
    }


def _table(screen: Screen, found: UsageReport) -> list[str]:
    if not found.rows:
        since = formatting.moment(found.since)
        is_accounted = found.source == "accounting"
        text = f"no job has run since {since}" if is_accounted else f"no run is here since {since}"
        return [Notice("no-usage", text)]
    shown = [*found.rows, *([found.total] if len(found.rows) > 1 else [])]
    rows = [
        [
            *(
                ("sum", *each.key[1:])
                if each is found.total
                else (key or _NONE for key in each.key)
            ),
            str(each.jobs),
            *(
                formatting.hours(value)
                for value in (each.node_hours, each.cpu_hours, each.gpu_hours)
            ),
            formatting.cost(each.cost_usd, ""),
        ]
        for each in shown
    ]
    head = [
        *(key.upper() for key in found.by),
        "JOBS",
        "NODE_HOURS",
        "CPU_HOURS",
        "GPU_HOURS",
        "COST",
    ]
    return screen.table(head, rows)
