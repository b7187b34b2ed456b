"""What the hosts say of a job, as the values that all of clusterctl knows."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from clusterctl.scheduler.models import JobInfo, JobState

PREFIX: Final = "m"
JOB_ID: Final = re.compile(r"m([1-9][0-9]*)")

# systemd's word for how a unit ended (systemd.exec(5), $SERVICE_RESULT), and ours.
_RESULTS: Final[Mapping[str, tuple[JobState, str]]] = {
    "success": (JobState.COMPLETED, ""),
    "exit-code": (JobState.FAILED, "NonZeroExitCode"),
    "signal": (JobState.FAILED, ""),
    "core-dump": (JobState.FAILED, ""),
    "timeout": (JobState.TIMEOUT, "TimeLimit"),
    "oom-kill": (JobState.OUT_OF_MEMORY, "OutOfMemory"),
    "shutdown": (JobState.NODE_FAIL, "its first node was shut down"),
    "lost": (JobState.NODE_FAIL, "its first node was restarted, or lost it"),
    "start": (JobState.BOOT_FAIL, "its first node could not start it"),
}
_SIGNALS: Final = {one.name.removeprefix("SIG"): one.value for one in signal.Signals}


@dataclass(frozen=True, slots=True)
class Start:
    """A job that is to begin: its ``folder`` on the cluster, its script there, its nodes in order.

    ``limit_s`` is its time limit in seconds, 0 for none.
    """

    token: str
    name: str
    folder: str
    script: str
    partition: str
    nodes: tuple[str, ...]
    limit_s: int = 0


def job_info(said: Mapping[str, Any], user: str) -> JobInfo:
    """The job that a host tells of. With a spoilt record it has no nodes, and is UNKNOWN until it ends."""
    try:
        state, reason, exit_code, ended_by = _outcome(said["end"], cancelled=bool(said["cancelled"]))
        end = said["end"]
        return JobInfo(
            job_id=int(str(said["id"]).removeprefix(PREFIX)),
            name=str(said["name"]),
            user=user,
            partition=str(said["partition"]),
            state=state,
            reason=reason,
            exit_code=exit_code,
            signal=ended_by,
            nodes=tuple(str(node) for node in said["nodes"]),
            submit_time=int(said["time"]),
            start_time=int(said["time"]),
            end_time=int(end["time"]) if end is not None else None,
            work_dir=str(said["folder"]),
            comment=f"clusterctl:{said['token']}",
            prefix=PREFIX,
        )
    except (KeyError, ValueError, TypeError) as exc:
        number = JOB_ID.fullmatch(str(said.get("id")))
        state = JobState.UNKNOWN
        with suppress(KeyError, ValueError, TypeError):
            if said["end"] is not None:
                state = _outcome(said["end"], cancelled=bool(said["cancelled"]))[0]
        return JobInfo(
            job_id=int(number[1]) if number else 0,
            name="",
            user=user,
            state=state,
            reason=f"what is noted of the job makes no sense: {exc!r}"[:300],
            prefix=PREFIX,
        )


def _outcome(
    end: Mapping[str, Any] | None, *, cancelled: bool
) -> tuple[JobState, str, int | None, int | None]:
    """State, reason, exit code and signal."""
    if end is None:
        return (JobState.COMPLETING if cancelled else JobState.RUNNING), "", None, None
    state, reason = _RESULTS.get(str(end["result"]), (JobState.FAILED, str(end["result"])))
    if cancelled and state is not JobState.COMPLETED:
        state, reason = JobState.CANCELLED, ""
    status = str(end["status"])
    if status.isdigit():
        return state, reason, int(status), 0
    return state, reason, 0, _SIGNALS.get(status, 0)
