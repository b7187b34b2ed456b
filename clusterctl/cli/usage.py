"""The command usage, which shows the hours and the cost of jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from clusterctl.cli.all_clusters import ALL
from clusterctl.cli.options import option
from clusterctl.cli.output import Screen
from clusterctl.errors import Notice, UsageError
from clusterctl.runs.usage import usage_of_cluster, usage_of_runs
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, open_session
from clusterctl.scheduler.slurm.usage import UsageGrouping, UsageReport, UsageRow, usage_keys
from clusterctl.util import formatting
from clusterctl.util.numbers import counted

_NONE: Final = "-"


def usage(
    screen: Screen,
    by: Annotated[
        str,
        option("Group by user, account, partition, month, or several of them.", metavar="KEY,..."),
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
    """
    names = [name.strip() for name in by.split(",") if name.strip()] or [UsageGrouping.USER.value]
    keys = usage_keys(names)
    if screen.cluster == ALL:
        raise UsageError(
            "usage shows one cluster, and --cluster all was given",
            code="options-exclusive",
            fix="name a cluster, or use --runs without --cluster for the collected runs of all",
        )
    if runs:
        found = usage_of_runs(keys, since, screen.chosen().named_cluster())
    else:
        with open_session(screen.chosen(), patience_s=SHOWN_PATIENCE_S) as session:
            found = usage_of_cluster(session, keys, since)
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
    screen.result(_answer(found), *_table(screen, found))


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
