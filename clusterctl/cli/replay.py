"""replay: a collected run is submitted again, and its losses are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer

from clusterctl import __version__
from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cli.runs import Run, shown_value
from clusterctl.cli.submit import JOB_FLAGS, DryRun, Follow, Timeout, Wanted, submit_all
from clusterctl.errors import UsageError
from clusterctl.jobs.replay import Again, Replay, reject_missing, replayed
from clusterctl.runs.compare import compare_losses
from clusterctl.runs.find import Row, latest_tasks, named_run
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.script import partition_name
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.util.assets import payload_hash

_NUMBER: Final = re.compile(r"[0-9]{1,7}")
# Where and how long it runs: what it computes stays. Clusters differ in the names of their partitions.
FLAGS: Final = {
    "replay": {name: JOB_FLAGS[name] for name in "partition account qos constraint time mem tag note".split()}
}


def replay(
    screen: Screen,
    options: Options,
    run: Run,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change an option of the program. Repeatable."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Of an array or sweep, only the tasks that did not complete.")
    ] = False,
    dry_run: DryRun = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job has ended, and compare its losses.")
    ] = False,
    follow: Follow = False,
    timeout: Timeout = None,
    **flags: object,
) -> None:
    """Submit a collected run again, as it was.

    Code, packages, options and arguments are the same. The job goes to the cluster in reach, which may be
    another one; what differs is said before anything is sent.
    """
    row = named_run(run)
    changes = _changes(set_ or [])
    indices = _failed(row, changes) if failed else []
    if failed and not indices:
        screen.result({"jobs": []}, f"all tasks of {row.shown} have completed: nothing is submitted")
        return
    original = row.run.replay_of if failed and row.run.of_failed else row.run.token
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    again = Again(str(original), row.number, indices, changes, given)
    with replayed(row.run.directory, again) as found:
        wanted = Wanted((found.job,), replay=_Replaying(screen, found, row, changes))
        rows = submit_all(screen, options, wanted, dry_run=dry_run, wait=wait, follow=follow, timeout=timeout)
    if rows and not (wait or follow):
        job = rows[0]["job_id"]
        then = f"runs --sweep {row.run.job_id}" if failed else f"runs diff {row.shown} {job}"
        screen.note(f"when it has ended: `clusterctl collect {job}`, then `clusterctl {then}`")


def _changes(said: Sequence[str]) -> dict[str, str]:
    """``lr=0.1`` as an option and its value."""
    changes: dict[str, str] = {}
    for one in said:
        key, equals, value = one.partition("=")
        key = key.removeprefix("--")
        if not equals or not key or key in changes:
            what = f"{key!r} is given twice" if key in changes else f"{one!r} is not of the form KEY=VALUE"
            raise UsageError(
                f"--set: {what}",
                code="bad-setting",
                fix="write each option of the program once, as --set lr=1e-3",
            )
        changes[key] = value
    return changes


def _failed(row: Row, changes: Mapping[str, str]) -> list[int]:
    """The numbers of the tasks that have not completed, nor in a later run of the failed ones.

    Raises:
        UsageError: it is no array, one of its tasks goes on, or values would not stay the same.
    """
    tasks = latest_tasks(row)
    if not tasks:
        raise UsageError(
            f"--failed is about the tasks of an array, and {row.shown} is none",
            code="not-an-array",
            fix="leave out --failed",
        )
    if changes:
        raise UsageError(
            "--failed runs tasks again as they were",
            code="options-exclusive",
            fix=f"leave out --set, or change one task: `clusterctl replay {row.run.job_id}_3 --set ...`",
        )
    if odd := next((task for task in tasks if not _NUMBER.fullmatch(task.number)), None):
        raise UsageError(
            f"{odd.shown} has no number of a task", code="task-without-number", where=str(odd.run.directory)
        )
    if going_on := next((task.run for task in tasks if not task.run.final), None):
        raise UsageError(
            f"job {going_on.job_id} had not ended when it was collected",
            code="job-not-ended",
            fix=f"when it has ended: `clusterctl collect {going_on.job_id}`",
        )
    return [int(task.number) for task in tasks if task.record.state != JobState.COMPLETED]


@dataclass(frozen=True, slots=True)
class _Replaying:
    """What is to be said of a replay of ``row``."""

    screen: Screen
    replay: Replay
    row: Row
    changes: Mapping[str, str]

    def before(self, spec: ClusterSpec, job: JobSpec, session: Session | None = None) -> dict[str, Any]:
        if session is not None:
            reject_missing(session, job)
        differences = list(self._differences(spec, job))
        name, tasks = self.row.shown, f", tasks {job.array}" if "of_failed" in self.replay.known else ""
        self.screen.note(
            *(f"note: {note}" for note in self.replay.notes),
            f"replay of {name}{tasks}; " + ("what differs:" if differences else "nothing is known to differ"),
            *(f"  {key}: {shown_value(a)} -> {shown_value(b)}" for key, a, b in differences),
        )
        listed = [{"key": key, "a": a, "b": b} for key, a, b in differences]
        return {"replay_of": str(self.row.folder), "differences": listed}

    def _differences(self, spec: ClusterSpec, job: JobSpec) -> list[tuple[str, Any, Any]]:
        """What is known to differ before it runs: the key, of the original, of the replay."""
        run, now = self.row.run, payload_hash()
        known = [
            ("clusterctl", self.replay.version, __version__),
            ("its programs", self.replay.payload if job.bundled else now, now),
            ("cluster", run.cluster, spec.name),
            ("partition", run.partition, partition_name(spec, job) or run.partition),
            *(
                (key, self.row.config.get(key.replace("-", "_")), value)
                for key, value in self.changes.items()
            ),
        ]
        return [one for one in known if one[1] != "" and str(one[1]) != str(one[2])]  # "": not known

    def after(self, session: Session, job_id: str) -> tuple[dict[str, Any], list[str]]:
        from clusterctl.runs.collect import collect

        (run,) = collect(session, [job_id])
        lines = [f"job {job_id} ({run.name}) {run.state}: {run.directory}"]
        if "of_failed" in self.replay.known:
            return {"dir": str(run.directory)}, lines
        losses = compare_losses(self.row, Row(run))
        lines.append(f"losses: {losses or 'none that both runs have'}")
        if losses is None or not losses.identical:
            lines.append(
                f"`clusterctl runs diff {self.row.shown} {run.directory.name}` compares them in full"
            )
        return {"losses": losses and asdict(losses)}, lines
