"""Replays submit a collected run again: the tasks to submit, differences from the first run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from clusterctl import __version__
from clusterctl.errors import UsageError
from clusterctl.jobs.replay import Replay, ReplayCode, ReplayRequest
from clusterctl.runs.compare import RunDifference
from clusterctl.runs.find import Row, latest_tasks
from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.sites.site import Site
from clusterctl.util.assets import payload_hash

_MAX_FILES: Final = 20
_NUMBER: Final = re.compile(r"[0-9]{1,7}")


def select_replay(
    row: Row,
    changes: Mapping[str, str],
    *,
    failed: bool,
    flags: Mapping[str, object],
    code: ReplayCode = ReplayCode.SENT,
) -> ReplayRequest | None:
    """Return the submission that repeats ``row``. None: ``failed`` is set, and all completed.

    changes: options of the program with their new values. flags: options of `submit`.
    code: the files of the program.
    failed: submit only the array tasks that completed neither in this run nor in later replays.
        Raise UsageError if the run is not an array or has unfinished tasks.
    """
    indices = _unfinished_tasks(row, changes) if failed else []
    if failed and not indices:
        return None
    original = row.run.replay_of if failed and row.run.of_failed else row.run.token
    return ReplayRequest(str(original), row.number, indices, changes, flags, code)


def _unfinished_tasks(row: Row, changes: Mapping[str, str]) -> list[int]:
    tasks = latest_tasks(row)
    if not tasks:
        raise UsageError(
            f"--failed works only with arrays, and {row.shown} is not an array",
            about="array",
            fix="leave out --failed",
        )
    if changes:
        raise UsageError(
            "--failed runs tasks again unchanged, and can't be combined with --set",
            code="options-exclusive",
            fix="leave out --set, or change a single task: `clusterctl replay "
            f"{row.run.job_id}_3 --set ...`",
        )
    if odd := next((task for task in tasks if not _NUMBER.fullmatch(task.number)), None):
        raise UsageError(
            f"{odd.shown} can't be run again: its record has no valid task number",
            code="not-replayable",
            about="task-number",
            where=str(odd.run.directory),
            fix="leave out --failed, which replays the whole array",
        )
    if running := next((task.run for task in tasks if not task.run.final), None):
        raise UsageError(
            f"job {running.job_id} was still running when it was collected",
            code="not-ended",
            about="job",
            fix=f"collect the job again when it has ended: `clusterctl collect {running.job_id}`",
        )
    return [int(task.number) for task in tasks if task.record.state != JobState.COMPLETED]


def differences(
    row: Row, replay: Replay, changes: Mapping[str, str], site: Site, request: Request
) -> list[RunDifference]:
    """Return known differences between run ``row`` and its replay on cluster ``site``."""
    run = row.run
    job = request.job
    partition = request.partition_name_in(site.inventory)
    programs = payload_hash()
    compared = [
        ("code", "clusterctl", replay.version, __version__),
        ("code", "its programs", replay.payload if job.bundled else programs, programs),
        ("job", "cluster", run.cluster, site.inventory.cluster),
        ("job", "partition", run.partition, partition or run.partition),
        *(
            ("configuration", key, row.config.get(key.replace("-", "_")), value)
            for key, value in changes.items()
        ),
    ]
    # Values that the record of an older version lacks are "".
    listed = [RunDifference(*v) for v in compared if v[2] != "" and str(v[2]) != str(v[3])]
    listed += [RunDifference("code", *file) for file in replay.changed_files[:_MAX_FILES]]
    more = len(replay.changed_files) - _MAX_FILES
    return [*listed, *([RunDifference("code", "more files", None, more)] if more > 0 else [])]
