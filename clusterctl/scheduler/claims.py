"""The jobs of `submit --first`: the first job that starts runs its program, and the other jobs are
cancelled.

On a cluster, these jobs share a file, their claim. It is created once and never changed, and has
the id of the job that may run its program (see payload/node/claim.py). On a single cluster, the
first job that starts claims it for itself. On several clusters, a job that starts waits for
clusterctl to write the claim, and ends if it waits in vain. clusterctl chooses once: the choice is
in the ledger before the claim is written.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from clusterctl.scheduler.base import AccountingAwayError, JobInfo, Jobs, JobState
from clusterctl.scheduler.slurm.records import DELAY_S
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace, clusters_up, state_home
from clusterctl.util.disk import translating_write_errors

# How long a job waits for the choice among several clusters.
WAIT_S: Final = 600
# Prints the claim, after creating it for job $2 if $2 is not empty.
_CLAIM: Final = """\
if [ -n "$2" ] && [ ! -e "$1" ]; then
    new=$(mktemp "$1.XXXXXX") && printf %s "$2" >"$new" && ln "$new" "$1" 2>/dev/null
    rm -f "$new"
fi
[ ! -e "$1" ] || { printf "claim "; cat "$1"; }"""


@dataclass(frozen=True, slots=True)
class FirstGroup:
    """The common properties of the jobs of a `submit --first`: id, and whether they are on several
    clusters.

    wait_s: if these are several clusters: how long a job waits to be chosen, in seconds.
    """

    id: str
    is_across: bool
    wait_s: float = WAIT_S

    @property
    def file(self) -> bytes:
        """The content of first.json, which job.py reads."""
        wait_s = self.wait_s if self.is_across else 0
        return (json.dumps({"claim": f"first.{self.id}", "wait_s": wait_s}) + "\n").encode()


def claim_of(entry: JobEntry) -> str:
    """Return the path of the claim, beside the folders of the jobs."""
    return f"{(entry.remote_dir or '').rpartition('/')[0]}/.first.{entry.first}"


def settle_all(scheduler: Jobs, ledger: Ledger) -> None:
    """Settle each `submit --first` of which a job on this cluster may still run or wait."""
    entries = [entry for entry in ledger.entries() if entry.first and not entry.refused]
    for first in dict.fromkeys(str(entry.first) for entry in entries if not entry.kept):
        with suppress(AccountingAwayError):
            settle(scheduler, ledger, first)


def settle(scheduler: Jobs, ledger: Ledger, first: str) -> tuple[JobEntry, ...]:
    """Choose a job of a `submit --first` if a job has started. Cancel the other jobs on this
    cluster.

    A job that was cancelled is marked in the ledger, and its folder is removed. When all jobs on
    this cluster have ended, their claim is removed. Return the jobs that are left on this cluster,
    which wait, have ended and may have run, or, if ``kept``, run or have run.

    Raises:
        MachineError: the choice can't be recorded.
        SchedulerError, TransportError: the cluster does not answer.
    """
    submitted = [
        entry
        for entry in ledger.entries()
        if entry.first == first and not entry.refused and not ledger.is_superseded(entry)
    ]
    entries = [e for e in submitted if e.job_id]
    if not entries:
        return ()
    jobs = {job.whole_id: job for job in scheduler.jobs([str(entry.job_id) for entry in entries])}
    with _locked():
        kept, lost_to = _choose(scheduler, ledger, entries, jobs)
    left = []
    for entry in entries:
        job = jobs.get(str(entry.job_id))
        if kept is not None and entry.token == kept.token:
            left.append(kept)
        elif job is not None and (not job.ended or (not lost_to and _may_have_run(entry, job))):
            left.append(entry)
            if lost_to:
                scheduler.cancel([job.whole_id])
        else:
            state = job.state if job is not None else JobState.CANCELLED
            # The log of a job that failed before it ran, as on a broken node, stays.
            if state is JobState.CANCELLED:
                scheduler.transport.run(["rm", "-rf", "--", entry.remote_dir or ""], check=False)
            ledger.update(entry, refused=True, state=state.value, lost_to=lost_to or "no job")
    active = {job_id for job_id, job in jobs.items() if not job.ended}
    # A job without a known id may still wait.
    if entries == submitted and all(entry.kept and entry.job_id not in active for entry in left):
        scheduler.transport.run(["rm", "-f", "--", claim_of(entries[0])], check=False)
    return tuple(left)


def _choose(
    scheduler: Jobs, ledger: Ledger, entries: Sequence[JobEntry], jobs: Mapping[str, JobInfo]
) -> tuple[JobEntry | None, str]:
    """Return the job of this cluster that runs, and the reason to cancel the other jobs here ("":
    wait).

    On several clusters, claim the right to run for the running job that started first, unless a job
    is chosen already.
    """
    own = {entry.token: entry for entry in entries}
    cluster, chosen = _chosen(str(entries[0].first))
    if chosen is not None and chosen.kept and chosen.token in own:
        return chosen, f"job {chosen.job_id}"
    if chosen is not None and chosen.token not in own:
        return None, f"job {chosen.job_id} of cluster {cluster}" if chosen.kept else ""
    claim = claim_of(entries[0])
    owner = _claim(scheduler, claim, "")
    starting = chosen or next_to_run(entries, jobs)
    if entries[0].is_across and starting is not None:
        ledger.record(starting, chosen=True)
        job = jobs.get(str(starting.job_id))
        if owner is None and job is not None and job.state is JobState.RUNNING:
            owner = _claim(scheduler, claim, str(starting.job_id))
        if owner != starting.job_id:
            # The job has ended, or has stopped waiting.
            ledger.record(starting, chosen=False)
    kept = next((entry for entry in entries if entry.job_id == owner), None)
    if kept is not None:
        return ledger.record(kept, chosen=True, kept=True), f"job {kept.job_id}"
    return None, "no job" if owner is not None else ""


def _may_have_run(entry: JobEntry, job: JobInfo) -> bool:
    """Return whether an ended job may have run, though its claim is missing: on NFS, it may appear
    late.

    On several clusters, the claim is written on the controller, which sees it at once.
    """
    has_started = job.start_time is not None and job.end_time is not None
    return not entry.is_across and has_started and abs(time.time() - (job.end_time or 0)) < DELAY_S


def next_to_run(entries: Sequence[JobEntry], jobs: Mapping[str, JobInfo]) -> JobEntry | None:
    """Return the running job that started first."""
    running = [
        e for e in entries if (job := jobs.get(str(e.job_id))) and job.state is JobState.RUNNING
    ]
    return min(running, key=lambda e: jobs[str(e.job_id)].start_time or 0, default=None)


def _chosen(first: str) -> tuple[str, JobEntry | None]:
    """Return the cluster and the job of a `submit --first` that was chosen, among all clusters."""
    for name in clusters_up():
        for entry in Ledger(Workspace.of(name).jobs).entries():
            if entry.first == first and entry.chosen and not entry.refused:
                return name, entry
    return "", None


def _claim(scheduler: Jobs, claim: str, job_id: str) -> str | None:
    """Return the id in a claim. None: the claim does not exist. If ``job_id`` is not empty, create
    it first.
    """
    answer = scheduler.transport.run(["sh", "-c", _CLAIM, "claim", claim, job_id]).stdout
    return answer.removeprefix("claim ").strip() if answer else None


@contextmanager
def _locked() -> Iterator[None]:
    """Let no other clusterctl of this account choose during the ``with`` block."""
    path = state_home() / ".first.lock"
    with translating_write_errors(path), path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
