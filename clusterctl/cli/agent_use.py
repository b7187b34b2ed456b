"""What the jobs of an agent may use, and have used, by the answers of clusterctl."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.agent.journal import FREE, Bound, Call, JobUse, Journal
from clusterctl.agent.limits import COMPLETED, FAILED
from clusterctl.cli.agent_program import Program, Runner, environment, run_program
from clusterctl.cli.verbs import VERBS, Effect
from clusterctl.scheduler.base import JobState, Outcome
from clusterctl.spec.sbatch import values_in
from clusterctl.state.workspace import Workspace

CANCELLED: Final = "cancelled"
_ENDED_BY_OTHERS: Final = frozenset(
    (JobState.CANCELLED, JobState.PREEMPTED, JobState.REVOKED, JobState.PURGED)
)
_HOUR_S: Final = 3600
# The states of jobs are asked for at most this often, because a decision needs them.
_PACE_S: Final = 20.0
# Likewise for the clusters that the decision is not about.
_SELDOM_S: Final = 300.0


def identity(workspace: Workspace) -> str:
    """Return the name of a cluster, and what tells it from another cluster of this name."""
    return f"{workspace.root.name} {workspace.known_id() or 'new'}"


@dataclass
class Uses:
    """What became of the agents' jobs: asked of their clusters, and written to the journal.

    project: the folder in which programs run. run: runs a program of clusterctl.
    """

    project: Path
    journal: Journal
    run: Runner = run_program
    _asked_at: dict[str, float] = field(default_factory=dict)

    def ask(self, cluster: str = "") -> list[str]:
        """Ask what became of the jobs that have not ended, unless that was asked just now. Return
        the names of the clusters that did not answer.

        cluster: the identity of the cluster that a decision is about; it is asked most often.
        """
        open_jobs: dict[str, dict[str, Call]] = {}
        # Also against other calls of this server, which read the same journal.
        with self.journal.lock() as history:
            for call in history.calls.values():
                for job in call.open_jobs():
                    open_jobs.setdefault(call.cluster, {})[job] = call
        silent = []
        for other, jobs in open_jobs.items():
            pace_s = _PACE_S if other == cluster else _SELDOM_S
            last = self._asked_at.get(other, -pace_s)
            if time.monotonic() - last >= pace_s:
                self._asked_at[other] = time.monotonic()
                if not self._ask(other, jobs):
                    silent.append(other.partition(" ")[0])
        return silent

    def forget(self, cluster: str) -> None:
        """Let the next call ask a cluster again, because jobs there have ended."""
        self._asked_at.pop(cluster, None)

    def _ask(self, cluster: str, jobs: Mapping[str, Call]) -> bool:
        """Ask what became of jobs on a cluster, and write it down. Return whether it answered.

        jobs: ID -> its call.
        """
        name = cluster.partition(" ")[0]
        answers = True
        if identity(Workspace.of(name)) != cluster:
            # The jobs have ended with their cluster. What they used is unknown.
            uses = dict.fromkeys(jobs, JobUse(CANCELLED, 0))
        else:
            words = ["jobs", "--all", f"--cluster={name}", "--", *jobs]
            answer = self.run(Program(words, self.project, environment(())), lambda _: None)
            uses = uses_of(answer.body, jobs)
            answers = bool(answer.body.get("ok"))
        with self.journal.lock():
            for job, use in uses.items():
                self.journal.use(jobs[job].id, job, use)
        return answers


def bound_of(verb: str, at_most: Mapping[str, Any]) -> Bound:
    """Return the most that a call can use, by its dry run."""
    effect = VERBS[verb].effect
    if effect is Effect.SUBMITS:
        tasks = at_most.get("tasks")
        jobs = at_most.get("jobs")
        count = None if tasks is None or jobs is None else max(tasks, jobs)
        return Bound(count, at_most.get("node_hours"), at_most.get("usd"))
    # The node hours of a cluster are those of its jobs.
    return Bound(0, 0.0, at_most.get("usd")) if effect is Effect.RAISES else FREE


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
