"""What the jobs of an agent may use, and have used, by the answers of clusterctl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from clusterctl.agent.journal import FREE, Bound, Call, JobUse
from clusterctl.agent.limits import COMPLETED, FAILED
from clusterctl.cli.agent_tools import TOOLS, Kind
from clusterctl.scheduler.base import JobState, Outcome
from clusterctl.spec.sbatch import values_in

CANCELLED: Final = "cancelled"
_ENDED_BY_OTHERS: Final = frozenset(
    (JobState.CANCELLED, JobState.PREEMPTED, JobState.REVOKED, JobState.PURGED)
)
_HOUR_S: Final = 3600


def bound_of(verb: str, at_most: Mapping[str, Any]) -> Bound:
    """Return the most that a call can use, by its dry run."""
    kind = TOOLS[verb].kind
    if kind is Kind.SUBMITS:
        tasks, jobs = at_most.get("tasks"), at_most.get("jobs")
        count = None if tasks is None or jobs is None else max(tasks, jobs)
        return Bound(count, at_most.get("node_hours"), at_most.get("usd"))
    # The node hours of a cluster are those of its jobs.
    return Bound(0, 0.0, at_most.get("usd")) if kind is Kind.RAISES else FREE


def accounts_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the account of each job of a dry run; "" for a job that names none."""
    scripts = [str(job.get("script") or "") for job in body.get("jobs") or [body]]
    found = (values_in(text.splitlines(), "--account") for text in scripts)
    return tuple(values.get("--account", "") for values in found)


def uses_of(body: Mapping[str, Any], jobs: Mapping[str, Call]) -> dict[str, JobUse]:
    """Return what jobs used, by the answer of `jobs`. Jobs that are not in it stay open."""
    rows = [row for row in body.get("jobs") or () if isinstance(row, dict)]
    own = {job: [row for row in rows if _whole_id(row.get("job_id")) == job] for job in jobs}
    return {job: _use_of(found, jobs[job].bound) for job, found in own.items() if found}


def _use_of(rows: Sequence[Mapping[str, Any]], bound: Bound) -> JobUse:
    """Return what a job used, by the rows of `jobs` about it and its tasks."""
    states = [_state_of(row) for row in rows]
    active = states.count("")
    hours = [(row.get("elapsed_s") or 0) * len(row.get("nodes") or ()) / _HOUR_S for row in rows]
    if active:
        return JobUse("", active)
    outcome = next((name for name in (COMPLETED, FAILED) if name in states), CANCELLED)
    node_hours = sum(hours)
    # The price of a node hour is that of the dry run.
    price = bound.usd / bound.node_hours if bound.usd and bound.node_hours else bound.usd
    usd = None if price is None else price * node_hours
    return JobUse(outcome, 0, round(node_hours, 6), None if usd is None else round(usd, 6))


def _state_of(row: Mapping[str, Any]) -> str:
    """Return how a job ended; "": it has not."""
    try:
        state = JobState(str(row.get("state")))
    except ValueError:
        return ""
    if state.outcome is Outcome.COMPLETED:
        return COMPLETED
    if state in _ENDED_BY_OTHERS:
        return CANCELLED
    return "" if state.outcome is Outcome.GOES_ON else FAILED


def _whole_id(job_id: Any) -> str:
    return str(job_id).partition("_")[0]
