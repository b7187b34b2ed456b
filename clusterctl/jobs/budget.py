"""The budget of a cluster: the limits of all jobs of a month together."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from clusterctl.errors import Notice, SchedulerError, UsageError
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.usage import UsageGrouping, month_start, next_month, usage_of_jobs
from clusterctl.util import formatting
from clusterctl.util.numbers import counted
from clusterctl.util.progress import LineReporter

# From this share of a budget on, `submit` warns.
_NEARLY: Final = 0.8
_UNITS: Final = {"node_hours": "node hours", "gpu_hours": "GPU hours", "cost_usd": "USD"}


def check_budget(session: Session, note: LineReporter) -> None:
    """Raise UsageError if the cluster's jobs have used the budget of this month.

    note: gets a warning if they have nearly used it, or if that is not known.
    """
    budget = asdict(session.inventory.budget)
    limits = {name: limit for name, limit in budget.items() if limit is not None}
    if not limits:
        return
    now = time.time()
    first = month_start(now)
    try:
        jobs = session.scheduler.history(int(first))
    except SchedulerError as exc:
        note(Notice("budget-unchecked", f"note: the budget was not checked: {exc.cause}"))
        return
    if jobs is None:
        reason = "the cluster has no accounting"
        note(Notice("budget-unchecked", f"note: the budget was not checked: {reason}"))
        return
    # Few clusters have a budget.
    from clusterctl.providers.registry import provider_of  # noqa: PLC0415

    spec = session.spec
    provider = provider_of(spec.provider)
    usage = usage_of_jobs(
        jobs, [UsageGrouping.MONTH], first, lambda name: provider.node_price(spec, name)
    )
    if usage.unread:
        text = f"{counted(usage.unread, 'record')} of jobs can't be read, so that more is used than is known"
        note(Notice("budget-unchecked", f"note: the budget was not wholly checked: {text}"))
    for name, limit in limits.items():
        used = getattr(usage.total, name)
        if used is None:
            reason = f"the {_UNITS[name]} of some jobs are unknown"
            note(Notice("budget-unchecked", f"note: the budget was not checked: {reason}"))
            continue
        text = f"{formatting.number(used)} of {formatting.given(limit)} {_UNITS[name]}"
        if used >= limit:
            again = datetime.fromtimestamp(next_month(now), UTC)
            raise UsageError(
                "the cluster's budget of this month is spent",
                code="budget-spent",
                why=f"its jobs have used {text}",
                fix=f"submit from {again:%Y-%m-%d} (UTC) on, or raise `budget` in the spec and run "
                f"`clusterctl {session.inventory.traits.first_verb}`; "
                "`clusterctl usage --by user,month` shows who used it",
            )
        if used >= _NEARLY * limit:
            share = formatting.percent(100 * used / limit)
            warning = f"note: {share} of this month's budget is used: {text}"
            note(Notice("budget-nearly-spent", warning))
