"""logs, cancel, and how a job is waited for and followed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from clusterctl.cli.options import argument, job_ids, option
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.errors import Notice, SchedulerError, TransportError, UsageError, excluded
from clusterctl.jobs import watch
from clusterctl.jobs.log_text import KeptLogs, labelled
from clusterctl.jobs.watch import ChangeNotes, OnOutput
from clusterctl.scheduler.base import JobInfo, worst
from clusterctl.scheduler.session import SOON_S, Session, open_session
from clusterctl.spec.units import parse_slurm_time_s
from clusterctl.util.process import started

if TYPE_CHECKING:
    from clusterctl.scheduler.diagnosis import Diagnosis

Ids = Annotated[
    list[str], argument("Job ids, such as 12, or 12_3 of an array.", metavar="ID...", tab=job_ids)
]


def logs(
    screen: Screen,
    job_id: Annotated[
        str | None,
        argument("Job id. Default: the last job submitted.", metavar="[ID]", tab=job_ids),
    ] = None,
    follow: Annotated[bool, option("Follow the output until the job has ended.", "--follow", "-f")] = False,
    rank: Annotated[int | None, option("Only what this rank wrote.", min=0, metavar="N")] = None,
    label: Annotated[bool, option("Begin each line with its rank, as `1: `.")] = False,
    raw: Annotated[bool, option("Write the bytes unchanged to files and pipes.")] = False,
    # -f means something else here.
    file: Annotated[Path | None, option("Cluster spec. Default: ./cluster.yaml.")] = None,
) -> None:
    """Print a job's stdout and stderr. Ctrl-C detaches; the job goes on.

    Colors are kept; other control characters are escaped.
    """
    if raw and screen.json:
        raise excluded("--raw", "-o json")
    kept = KeptLogs()
    shown = nullcontext(kept.keep) if screen.json else screen.logs(raw=raw)
    ranks = str(rank) if rank is not None else "all" if label else ""
    state: dict[str, Any] = {}
    causes: tuple[Diagnosis, ...] = ()
    try:
        with (
            open_session(screen.chosen()) as session,
            shown as on_output,
            labelled(on_output) if label and not screen.json else nullcontext(on_output) as show,
        ):
            job_id = job_id or _last_submitted(screen, session)
            if follow:
                ended = follow_job(screen, session, job_id, None, show=show, rank=ranks)
                state = {"state": worst(ended).state.value}
            else:
                # Two answers of the cluster take as long as one.
                jobs = started(functools.partial(session.scheduler.jobs, [job_id]))
                watch.logs(session, job_id, on_output=show, rank=ranks)
                with contextlib.suppress(SchedulerError, TransportError):  # the log is what was asked for
                    causes = () if raw else watch.diagnoses(session, jobs())
    except ENDINGS:
        if not follow:
            raise  # else detaching is what was asked for
    finally:
        screen.known = {"job_id": job_id, "logs": [asdict(one) for one in kept.texts()]}
    if causes:
        screen.note(f"{causes[0].summary}; fix: {causes[0].fix}")
        state = {"diagnosis": causes[0].as_dict()}
    screen.result({**screen.known, **state})


def _last_submitted(screen: Screen, session: Session) -> str:
    for entry in reversed(session.ledger.entries()):
        if entry.job_id is not None:
            screen.note(Notice("last-job", f"{entry.shown}, the last one submitted"))
            return entry.job_id
    raise UsageError(
        "no job was submitted yet",
        code="no-job-yet",
        fix="name one: `clusterctl jobs` lists the jobs there are",
    )


def cancel(screen: Screen, ids: Ids) -> None:
    """Cancel jobs. The id of an array cancels all of its tasks."""
    with open_session(screen.chosen(), patience_s=SOON_S) as session:
        jobs = watch.cancel(session, ids)
    cancelled, ended = ([job for job in jobs if job.ended is over] for over in (False, True))
    lines = [f"cancelled job {job.id} ({job.name})" for job in cancelled]
    lines += [f"job {job.id} ({job.name}) had ended already: {job.state}" for job in ended]
    answer = {
        "cancelled": [job.id for job in cancelled],
        "already_ended": [{"job_id": job.id, "state": job.state.value} for job in ended],
    }
    screen.result(answer, *lines)


def wait_for(
    screen: Screen, session: Session, ids: list[str], timeout_s: float | None
) -> tuple[JobInfo, ...]:
    with screen.working(f"waiting for job {', '.join(ids)}"), _detaching(screen, ids):
        return watch.wait(session, ids, timeout_s=timeout_s, on_change=ChangeNotes(screen.note))


def follow_job(
    screen: Screen, session: Session, job_id: str, timeout_s: float | None, *, show: OnOutput, rank: str = ""
) -> tuple[JobInfo, ...]:
    """Show what a job writes until it has ended; raises unless it completed."""
    changes = ChangeNotes(screen.note)
    with _detaching(screen, [job_id]):
        ended = watch.follow(
            session, job_id, on_output=show, rank=rank, timeout_s=timeout_s, on_change=changes
        )
    watch.raise_unless_completed(session, ended, log_is_shown=True)
    return ended


@contextmanager
def _detaching(screen: Screen, ids: Sequence[str]) -> Iterator[None]:
    """Ctrl-C or a signal ends the watching, never the job; that is said."""
    try:
        yield
    except ENDINGS:
        goes_on = f"detached; job {', '.join(ids)} goes on: `clusterctl logs {ids[0]} -f` follows it again"
        screen.note(Notice("detached", goes_on))
        raise


def timeout_of(text: str | None) -> float | None:
    """Seconds of ``--timeout``, which is written as ``--time`` is."""
    try:
        return None if text is None else float(parse_slurm_time_s(text))
    except ValueError as exc:
        raise UsageError("--timeout is wrong", code="bad-value", why=str(exc)) from exc
