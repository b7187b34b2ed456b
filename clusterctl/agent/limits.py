"""Whether an agent's call stays within the user's limits, by what the journal tells."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from clusterctl.agent.journal import FREE, CallBound, History, Journal, RecordedCall
from clusterctl.errors import MachineError
from clusterctl.spec.agent import AgentLimits
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace
from clusterctl.util.confine import LimitError

DAY_S: Final = 86400
FAILED: Final = "FAILED"
COMPLETED: Final = "COMPLETED"
_ENDED_BY_OTHERS: Final = frozenset({"CANCELLED", "PREEMPTED", "REVOKED", "PURGED"})
# Times of the journal are rounded.
_CLOCK_S: Final = 1.0
# Job ID -> its entries in a cluster's ledger, the oldest first.
_Entries = Mapping[str, Sequence[JobEntry]]


@dataclass(frozen=True, slots=True)
class CallCluster:
    """The cluster that a call is about.

    id: its name, and what tells it from another cluster of this name. here: whether it is on this
    machine. commands: those on its login node in the last hour. account: of jobs that name none, if
    the spec has one.
    """

    name: str = ""
    id: str = ""
    here: bool = True
    commands: int = 0
    account: str = ""


NOWHERE: Final = CallCluster()


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A call that an agent asks for.

    changes: whether the call changes the cluster or submits jobs. submits: whether it submits jobs.
    bound: the most that it can use.
    accounts: the Slurm accounts that its jobs name; "" for a job that names none.
    """

    verb: str
    place: CallCluster = NOWHERE
    changes: bool = False
    submits: bool = False
    bound: CallBound = FREE
    accounts: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """What agents use of the limits now."""

    node_hours: float
    usd: float
    jobs: int
    failures: int


def identity(workspace: Workspace) -> str:
    """Return the name of a cluster, and what tells it from another cluster of this name."""
    return f"{workspace.root.name} {workspace.known_id() or 'new'}"


@dataclass(frozen=True, slots=True)
class LedgerUse:
    """What the jobs of a call use, by the ledger of their cluster.

    active: jobs that are pending or running; of an array that has not ended, all tasks. node_hours,
    usd: what they used, or, if ``is_bound``, can use at most. None: unknown.
    ends: (when the end was learned, FAILED, COMPLETED or "") of each job that has ended.
    open: IDs of those that have not ended, as far as known.
    """

    active: int
    node_hours: float | None
    usd: float | None
    is_bound: bool = True
    ends: Sequence[tuple[float, str]] = ()
    open: Sequence[str] = ()

    @classmethod
    def of(cls, call: RecordedCall, entries: _Entries | None) -> LedgerUse:
        """entries: of the call's cluster. None: it was removed."""
        bound = call.bound
        if not call.jobs:
            return cls(bound.jobs or 0, bound.node_hours, bound.usd)
        if entries is None:
            # The jobs have ended with their cluster. What they used is unknown, or is the bound
            # since (``keep_uses``).
            return cls(0, bound.node_hours, bound.usd)
        since = call.time - _CLOCK_S
        # Slurm may have begun its numbers again.
        found = (
            next((each for each in entries.get(job, ()) if each.submitted_at >= since), None)
            for job in call.jobs
        )
        known = [entry for entry in found if entry is not None]
        ended = [entry for entry in known if entry.state_at is not None or entry.refused]
        ends = [(entry.state_at or call.time, _end_of(entry)) for entry in ended]
        still = {*call.jobs} - {entry.job_id for entry in ended}
        hours = [0.0 if entry.refused else entry.node_hours for entry in ended]
        if still or None in hours:
            active = (bound.jobs or 0) if still else 0
            return cls(active, bound.node_hours, bound.usd, ends=ends, open=sorted(still))
        # A requeued job may use more than its time limit.
        node_hours = sum(filter(None, hours))
        # The price of a node hour is that of the dry run.
        price = bound.usd / bound.node_hours if bound.usd and bound.node_hours else bound.usd
        usd = None if price is None else price * node_hours
        return cls(0, node_hours, usd, is_bound=False, ends=ends)


def uses(calls: Iterable[RecordedCall]) -> dict[str, LedgerUse]:
    """Return the id of each call -> what its jobs use. Each cluster's ledger is read once."""
    entries_of = cache(_entries_of)
    return {
        call.id: LedgerUse.of(call, entries_of(call.cluster) if call.jobs else None)
        for call in calls
    }


def _entries_of(cluster: str) -> _Entries | None:
    workspace = Workspace.of(cluster.partition(" ")[0])
    if identity(workspace) != cluster:
        return None
    entries: dict[str, list[JobEntry]] = {}
    for entry in Ledger(workspace.jobs).entries():
        entries.setdefault(entry.job_id or "", []).append(entry)
    return entries


def keep_uses(workspace: Workspace) -> None:
    """Write what agents' jobs on a cluster have used, and how many have failed, to the journal,
    because the cluster's ledger is removed now. Ignore a full disk: then their bounds count.
    """
    journal = Journal()
    if not journal.path.exists():
        return
    with suppress(MachineError), journal.lock() as history:
        cluster = identity(workspace)
        found = uses(call for call in history.calls.values() if call.cluster == cluster)
        used = {one: (use.node_hours, use.usd) for one, use in found.items() if not use.is_bound}
        journal.keep(usage(history).failures, used)


def _end_of(entry: JobEntry) -> str:
    """Return how a job ended. An array with a completed task has completed. "": others ended it."""
    if entry.state == COMPLETED or f"{COMPLETED}:" in (entry.task_states or ""):
        return COMPLETED
    return "" if entry.refused or entry.state in _ENDED_BY_OTHERS else FAILED


def usage(history: History, now: float | None = None) -> AgentUsage:
    """Return what agents use of the limits now.

    A call counts for a day from its begin: with its jobs' real use as far as it is known, otherwise
    at its bound. Its jobs count until they are known to have ended; those of a call whose end was
    not written, for a day.
    """
    now = time.time() if now is None else now
    calls = [call for call in history.calls.values() if call.jobs or now - call.time < DAY_S]
    found = uses(calls)
    recent = [found[call.id] for call in calls if now - call.time < DAY_S]
    return AgentUsage(
        node_hours=sum(use.node_hours or 0.0 for use in recent),
        usd=sum(use.usd or 0.0 for use in recent),
        jobs=sum(use.active for use in found.values()),
        failures=_failures(history, [end for use in found.values() for end in use.ends]),
    )


def _failures(history: History, ends: Sequence[tuple[float, str]]) -> int:
    """Return the number of failed jobs since the last completed job. Cancelled jobs don't count."""
    count = 0
    for _, event in sorted([*ends, *history.failures], key=lambda each: each[0]):
        if isinstance(event, int) or event == COMPLETED:
            count = event if isinstance(event, int) else 0
        else:
            count += event == FAILED
    return count


def check(limits: AgentLimits, file: Path, history: History, asked: RequestedCall) -> None:
    """Raise LimitError if a limit forbids the call. file: the user's configuration, for messages."""
    _check_place(limits, file, asked)
    if not asked.submits and not asked.changes:
        return
    used = usage(history)
    failures = limits.failures_in_a_row
    if asked.submits and failures is not None and used.failures >= failures:
        raise LimitError(
            f"{used.failures} jobs of agents have failed in a row",
            code="agent-failures",
            why=f"the limit `agent.failures_in_a_row` of the user is {failures}",
            fix="ask the user, who lets agents go on with `clusterctl agent resume`",
            limit={"name": "failures_in_a_row", "value": failures, "used": used.failures},
        )
    if limits.jobs_at_once is not None and asked.bound.jobs != 0:
        _check_sum(file, "jobs_at_once", limits.jobs_at_once, used.jobs, asked.bound.jobs)
    if limits.nodes_per_cluster is not None:
        _check_sum(file, "nodes_per_cluster", limits.nodes_per_cluster, 0, asked.bound.nodes)
    for name, limit, before, more in (
        ("node_hours_per_day", limits.node_hours_per_day, used.node_hours, asked.bound.node_hours),
        ("usd_per_day", limits.usd_per_day, used.usd, asked.bound.usd),
    ):
        # Whoever has used up a limit may still look, and stop jobs.
        if limit is not None and more != 0:
            _check_sum(file, name, limit, before, more)


def _check_place(limits: AgentLimits, file: Path, asked: RequestedCall) -> None:
    place = asked.place
    if asked.verb in limits.verbs_off:
        raise LimitError(
            f"agents may not use `{asked.verb}`",
            code="agent-verb-off",
            why="the user has listed it in `agent.verbs_off`",
            fix=_who(file, "verbs_off"),
            limit={"name": "verbs_off", "value": [*limits.verbs_off]},
        )
    most = limits.commands_per_hour
    if most is not None and place.commands >= most:
        raise LimitError(
            f"{place.commands} commands ran on the login node of {place.name} in the last hour",
            code="agent-commands",
            why=f"the limit `agent.commands_per_hour` of the user is {most}",
            fix=f"wait some minutes, and poll less: `wait` is one call; {_who(file, 'commands_per_hour')}",
            limit={"name": "commands_per_hour", "value": most, "used": place.commands},
        )
    if not asked.changes:
        return
    if not (place.here if limits.clusters is None else place.name in limits.clusters):
        names = "those on this machine" if limits.clusters is None else ", ".join(limits.clusters)
        raise LimitError(
            f"agents may not change the cluster {place.name}, nor submit to it",
            code="agent-cluster",
            why=f"the user allows these clusters: {names or 'none'}",
            fix=_who(file, "clusters"),
            limit={"name": "clusters", "value": limits.clusters, "asked": place.name},
        )
    allowed = limits.accounts or ("",)
    wrong = [account for account in asked.accounts if account not in allowed]
    if wrong:
        named = f"the account {wrong[0]}" if wrong[0] else "no account"
        raise LimitError(
            f"the job names {named}",
            code="agent-account",
            why=f"the user allows jobs of agents these accounts: {', '.join(limits.accounts)}"
            if limits.accounts
            else "the user allows jobs of agents only the default account",
            fix=_who(file, "accounts"),
            limit={"name": "accounts", "value": [*limits.accounts], "asked": wrong[0]},
        )


def _check_sum(file: Path, name: str, limit: float, used: float, more: float | None) -> None:
    values = {"name": name, "value": limit, "used": round(used, 3), "asked": more}
    if more is None:
        raise LimitError(
            "it is unknown how much the call could use",
            code="agent-bound-unknown",
            why=f"the limit `agent.{name}` of the user is in force ({limit:g})",
            fix="give the job a `time`, and no `requeue`; a price is in the spec "
            f"(price_per_hour); or {_who(file, name)}",
            limit=values,
        )
    if used + more > limit:
        raise LimitError(
            f"the call could use {more:g}, which exceeds the limit `agent.{name}`",
            code="agent-limit",
            why=f"the limit of the user is {limit:g}, of which {used:g} is used",
            fix=f"ask for less, or wait until earlier jobs have ended; {_who(file, name)}",
            limit=values,
        )


def _who(file: Path, key: str) -> str:
    return f"only the user may change `agent.{key}` in {file}"
