"""The command replay, which submits the job of a collected run again and compares the losses."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from clusterctl.cli.messages import Notify
from clusterctl.cli.options import Words, job_flags, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.runs import Run
from clusterctl.cli.submit import (
    DryRun,
    Follow,
    WatchOptions,
    answer_of,
    plan_of,
    prepare,
    show_plan,
    show_submitted,
    submit_and_note,
    telling_of_no_job,
    watch_jobs,
)
from clusterctl.cli.waiting import Timeout
from clusterctl.cluster.replayed_run import differences, select_replay
from clusterctl.errors import UsageError
from clusterctl.jobs.bundled import reject_invalid_arguments
from clusterctl.jobs.prepare import Submission
from clusterctl.jobs.replay import Replay, ReplayCode, replay_job
from clusterctl.runs.collect import collect
from clusterctl.runs.compare import compare_losses
from clusterctl.runs.facts import line_of
from clusterctl.runs.find import Row, named_run
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session, open_session, site_of
from clusterctl.scheduler.sites.site import Site
from clusterctl.spec.job_options import OPTIONS
from clusterctl.state.inventory import planned_inventory
from clusterctl.state.run_names import full_name
from clusterctl.util import formatting


# A replay may change these options, because they do not affect the results.
@takes(job_flags(option for option in OPTIONS.values() if option.in_replay and option.in_submit))
def replay(
    screen: Screen,
    run: Run,
    set_: Annotated[
        Words, option("Set a program option. Repeatable.", "--set", metavar="KEY=VALUE")
    ] = None,
    failed: Annotated[
        bool, option("For an array or sweep: only the tasks that did not complete.")
    ] = False,
    code: Annotated[
        ReplayCode,
        option("The program's files: as sent with the run, or as they are in its folder now."),
    ] = ReplayCode.SENT,
    dry_run: DryRun = False,
    wait: Annotated[bool, option("Wait until the job has ended, and compare its losses.")] = False,
    follow: Follow = False,
    timeout: Timeout = None,
    notify: Notify = None,
    **given: object,
) -> None:
    """Submit a collected run again, unchanged.

    Code, packages, options and arguments are the same. The job runs on the selected cluster, which
    may be a different one; differences are shown before anything is sent.
    """
    # The chosen cluster is where the job will run.
    row = named_run(full_name(run, screen.chosen()))
    changes = _changes(set_ or [])
    again = select_replay(row, changes, failed=failed, flags=given, code=code)
    if again is None:
        screen.result(
            {"jobs": []}, f"nothing was submitted: all tasks of {row.shown} have completed"
        )
        return
    replay = replay_job(row.run.directory, again)
    submission = Submission.of((replay.job,), replay=replay)
    reject_invalid_arguments(submission.jobs)
    watching = WatchOptions.of(
        submission.jobs, wait=wait, follow=follow, timeout=timeout, notify=notify or ()
    )
    if dry_run:
        plan = plan_of(screen, submission)
        site = site_of(planned_inventory(plan.spec))
        more = _note_differences(screen, row, replay, changes, site, plan.jobs[0].request)
        show_plan(screen, plan, more)
        return
    with telling_of_no_job(screen), open_session(screen.chosen()) as session:
        prepared = prepare(screen, session, submission)
        request = prepared[0].request
        more = _note_differences(screen, row, replay, changes, session.site, request)
        rows = submit_and_note(screen, session, prepared, more)
        if watching is not None:
            ends = watch_jobs(screen, session, rows, (replay.job,), watching)
            losses, lines = _collected(session, row, replay, rows[0]["job_id"])
            show = partial(screen.result, answer_of([rows[0] | losses])) if ends else screen.note
            show(*lines)
            return
    show_submitted(screen, rows, [])
    job_id = rows[0]["job_id"]
    then = (
        f"--sweep {row.run.job_id}" if "of_failed" in replay.known else f"diff {row.shown} {job_id}"
    )
    screen.note(
        f"when the job has ended, run `clusterctl collect {job_id}`, then `clusterctl runs {then}`"
    )


def _changes(settings: Sequence[str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.removeprefix("--")
        if not equals or not key or key in changes:
            problem = (
                f"{key!r} is given twice" if key in changes else f"{setting!r} is not KEY=VALUE"
            )
            raise UsageError(
                f"--set: {problem}",
                about="setting",
                fix="pass each option of the program once, such as --set lr=1e-3",
            )
        changes[key] = value
    return changes


def _note_differences(
    screen: Screen,
    row: Row,
    replay: Replay,
    changes: Mapping[str, str],
    site: Site,
    request: Request,
) -> dict[str, Any]:
    listed = differences(row, replay, changes, site, request)
    tasks = f", tasks {request.job.array}" if "of_failed" in replay.known else ""
    screen.note(
        *(f"note: {note}" for note in replay.notes),
        f"replay of {row.shown}{tasks}; " + ("differences:" if listed else "no known differences"),
        *(
            f"  {entry.key}: {formatting.given(entry.a)} -> {formatting.given(entry.b)}"
            for entry in listed
        ),
    )
    answer = [{"key": entry.key, "a": entry.a, "b": entry.b} for entry in listed]
    return {"replay_of": str(row.folder), "differences": answer}


def _collected(
    session: Session, row: Row, replay: Replay, job_id: str
) -> tuple[dict[str, Any], list[str]]:
    """Collect job ``job_id``, and compare its losses with run ``row``. Return (JSON, lines)."""
    (run,) = collect(session, [job_id])
    lines = [line_of(Row(run), run.directory)]
    if "of_failed" in replay.known:
        return {"dir": str(run.directory)}, lines
    losses = compare_losses(row, Row(run))
    lines.append(f"losses: {losses or 'the runs have no losses in common'}")
    if losses is None or not losses.identical:
        words = ("clusterctl", "runs", "diff", row.shown, run.directory.name)
        lines.append(f"full comparison: `{shlex.join(words)}`")
    return {"losses": losses and asdict(losses)}, lines
