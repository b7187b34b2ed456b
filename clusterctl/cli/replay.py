"""replay: a collected run is submitted again, and its losses are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from clusterctl.cli.options import Words, option, takes
from clusterctl.cli.output import Screen
from clusterctl.cli.runs import Run, shown_value
from clusterctl.cli.submit import (
    DryRun,
    Follow,
    Timeout,
    Watching,
    answer_of,
    prepare,
    rendered,
    show_scripts,
    show_submitted,
    some_flags,
    submit_and_note,
    watch_jobs,
)
from clusterctl.cluster.replayed_run import again_of, differences
from clusterctl.errors import UsageError
from clusterctl.jobs.bundled import reject_wrong
from clusterctl.jobs.replay import Replay, replayed
from clusterctl.jobs.submission import Submission
from clusterctl.runs.collect import collect
from clusterctl.runs.compare import compare_losses
from clusterctl.runs.find import Row, named_run
from clusterctl.scheduler.session import Session, open_session
from clusterctl.spec.job import JobSpec
from clusterctl.state.chosen_spec import spec_of_existing
from clusterctl.state.facts import ClusterFacts, facts_of_spec


# Where and how long it runs: the program computes the same. Clusters differ in the names of their partitions.
@takes(some_flags("partition account qos constraint time mem tag note"))
def replay(
    screen: Screen,
    run: Run,
    set_: Annotated[
        Words, option("Change an option of the program. Repeatable.", "--set", metavar="KEY=VALUE")
    ] = None,
    failed: Annotated[bool, option("Of an array or sweep, only the tasks that did not complete.")] = False,
    dry_run: DryRun = False,
    wait: Annotated[bool, option("Wait until the job has ended, and compare its losses.")] = False,
    follow: Follow = False,
    timeout: Timeout = None,
    **given: object,
) -> None:
    """Submit a collected run again, as it was.

    Code, packages, options and arguments are the same. The job goes to the cluster in reach, which may be
    another one; what differs is said before anything is sent.
    """
    row, changes = named_run(run), _changes(set_ or [])
    again = again_of(row, changes, failed=failed, flags=given)
    if again is None:
        screen.result({"jobs": []}, f"all tasks of {row.shown} have completed: nothing is submitted")
        return
    found = replayed(row.run.directory, again)
    submission = Submission((found.job,), replay=found)
    reject_wrong(submission.jobs, None)
    watching = Watching.of(submission.jobs, wait=wait, follow=follow, timeout=timeout)
    if dry_run:
        spec = spec_of_existing(screen.chosen())
        scripts = rendered(screen, submission, spec)
        more = _note_differences(screen, row, found, changes, facts_of_spec(spec), scripts[0].job)
        show_scripts(screen, scripts, more)
        return
    with open_session(screen.chosen()) as session:
        prepared = prepare(screen, session, submission)
        job = prepared[0].job
        more = _note_differences(screen, row, found, changes, session.facts, job)
        rows = submit_and_note(screen, session, prepared, more)
        if watching is not None:
            is_followed = watch_jobs(screen, session, rows, (found.job,), watching)
            losses, lines = _collected(session, row, found, rows[0]["job_id"])
            show = screen.note if is_followed else partial(screen.result, answer_of([rows[0] | losses]))
            show(*lines)
            return
    show_submitted(screen, rows)
    job_id = rows[0]["job_id"]
    then = f"--sweep {row.run.job_id}" if "of_failed" in found.known else f"diff {row.shown} {job_id}"
    screen.note(f"when it has ended: `clusterctl collect {job_id}`, then `clusterctl runs {then}`")


def _changes(settings: Sequence[str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.removeprefix("--")
        if not equals or not key or key in changes:
            what = (
                f"{key!r} is given twice" if key in changes else f"{setting!r} is not of the form KEY=VALUE"
            )
            raise UsageError(
                f"--set: {what}",
                code="bad-setting",
                fix="write each option of the program once, as --set lr=1e-3",
            )
        changes[key] = value
    return changes


def _note_differences(
    screen: Screen, row: Row, found: Replay, changes: Mapping[str, str], facts: ClusterFacts, job: JobSpec
) -> dict[str, Any]:
    """Note what differs from the original, before anything is sent. Return what the answer has of it."""
    listed = differences(row, found, changes, facts, job)
    tasks = f", tasks {job.array}" if "of_failed" in found.known else ""
    screen.note(
        *(f"note: {note}" for note in found.notes),
        f"replay of {row.shown}{tasks}; " + ("what differs:" if listed else "nothing is known to differ"),
        *(f"  {one.key}: {shown_value(one.a)} -> {shown_value(one.b)}" for one in listed),
    )
    answer = [{"key": one.key, "a": one.a, "b": one.b} for one in listed]
    return {"replay_of": str(row.folder), "differences": answer}


def _collected(session: Session, row: Row, found: Replay, job_id: str) -> tuple[dict[str, Any], list[str]]:
    """Collect a replay that has completed, and compare its losses: for the answer, and for people."""
    (run,) = collect(session, [job_id])
    lines = [f"job {job_id} ({run.name}) {run.state}: {run.directory}"]
    if "of_failed" in found.known:
        return {"dir": str(run.directory)}, lines
    losses = compare_losses(row, Row(run))
    lines.append(f"losses: {losses or 'none that both runs have'}")
    if losses is None or not losses.identical:
        lines.append(f"`clusterctl runs diff {row.shown} {run.directory.name}` compares them in full")
    return {"losses": losses and asdict(losses)}, lines
