"""What may be wrong with a COMPLETED job: metrics that are no numbers, and the error with which its log
ends.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from clusterctl.errors import printable
from clusterctl.scheduler.ends.diagnosis import Diagnosis, Note
from clusterctl.scheduler.ends.excerpt import ended_part, excerpt_of_log
from clusterctl.scheduler.ends.facts import Evidence, is_shell
from clusterctl.scheduler.ends.known import killed_for_memory
from clusterctl.scheduler.ends.log_text import says_no_error, short, without_long_lines
from clusterctl.state.ledger import METRICS_PLACES

_COMPLETED: Final = "completed"
_MOST_NAMED: Final = 5
# Lines after a traceback with which the stderr of a shell script still ends with the traceback. What
# a program prints to its stdout may be the traceback of an earlier run.
_REMARKS = 3
# A last line by which a shell or a command reports that it failed. `error: 0.012` is a result.
_COMMAND_FAILED: Final = re.compile(
    r": command not found$|^\S+: \*\*\* .*Error \d+$"
    r"|^\S+: line \d+: +\d+ (?:Segmentation fault|Aborted|Killed|Bus)"
    r"|^[\w./+-]+: .*: (?:No such file or directory|Permission denied|No space left on device)$"
    r"|^(?:[\w./+-]+: )?(?i:fatal|(?:fatal )?error): (?! *[-+]?(?:\.?\d|nan|inf))"
)


class LastError(NamedTuple):
    """The error with which a log ends, as a line. log: "log", or "stderr" or "stdout" if there are
    both. part: the part of the program that ended by it, such as a thread; the program went on.
    """

    line: str
    log: str
    part: str = ""


def error_at_end(stdout: str, stderr: str, *, is_shell: bool) -> LastError | None:
    """Return the exception that ended a part of the program, such as a thread; else the error with
    which the job's log ends: that of a traceback, or of a command.

    is_shell: whether the job's program is a shell script, which goes on after a failed command.
        Another program has handled an error that is not the last that it wrote.
    """
    written = {
        name: text for name, text in (("stderr", stderr), ("stdout", stdout)) if text.strip()
    }
    for name, text in written.items():
        part, line = ended_part(text)
        if part:
            return LastError(line, name, part)
    if len(written) > 1 and not is_shell:
        return None
    for name, text in written.items():
        if line := _last_error(text, remarks=_REMARKS if is_shell and name == "stderr" else 0):
            return LastError(line, name if len(written) > 1 else "log")
    return None


def _last_error(text: str, *, remarks: int) -> str:
    """Return the error with which a log ends, or "". remarks: number of lines that may come after
    its traceback.
    """
    excerpt = excerpt_of_log(text, "")
    is_last = not excerpt.between and len(excerpt.last) <= remarks
    if excerpt.exception and is_last and not any(map(says_no_error, excerpt.last)):
        return excerpt.exception
    last = next(iter(excerpt.last[-1:]), "")
    return last.strip() if _COMMAND_FAILED.search(last) and not says_no_error(last) else ""


def diagnose_completed(evidence: Evidence, logs: Mapping[str, Any]) -> Diagnosis | None:
    """Return what may be wrong with a job that completed; None: nothing is known to be.

    logs: as ``remote_logs`` returns them.
    """
    notes = tuple(_notes_of(evidence, logs))
    job = evidence.job
    if not notes:
        return None
    return Diagnosis(
        job_id=job.id, name=job.name, state=job.state.value, code=_COMPLETED, notes=notes
    )


def _notes_of(evidence: Evidence, logs: Mapping[str, Any]) -> Iterator[Note]:
    job_id = evidence.job.id
    if told := evidence.attempt.after_notice:
        text = f"job {job_id} is COMPLETED, but {told}: it may have stopped early"
        yield Note("ended-after-notice", text)
    if killed := killed_for_memory(evidence.job, without_long_lines(evidence.log)):
        text = f"job {job_id} is COMPLETED, but a process of it was killed for its memory"
        yield Note("killed-for-memory", f"{text}: {short(killed[0])}")
    if said := _nonfinite(str(logs.get("nonfinite") or "")):
        yield Note("metrics-nonfinite", f"job {job_id}: {said}")
    script = is_shell(evidence.script)
    error = error_at_end(evidence.stdout, str(logs.get("stderr") or ""), is_shell=script)
    if error is None:
        return
    if error.part:
        text = f"job {job_id} is COMPLETED, but an exception ended a part of its program"
        hint = "the program continued without it"
        yield Note("part-ended-by-exception", f"{text} ({error.part}): {error.line}; {hint}")
        return
    hint = "the program has handled it, or ignores it"
    if script:
        hint = "a shell script goes on after a failed command, unless it has `set -eo pipefail`"
    text = f"job {job_id} is COMPLETED, but its {error.log} ends with an error: {error.line}"
    yield Note("log-ends-with-error", f"{text}; {hint}")


def _nonfinite(text: str) -> str:
    """Return which metrics of a line of metrics.jsonl are NaN or infinite, and where, or ""."""
    line = None
    with suppress(ValueError, RecursionError):
        line = json.loads(text)
    if not isinstance(line, dict):
        return ""
    names = [
        key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    places = (
        f"{axis} {line[key]}" for key, axis in METRICS_PLACES if isinstance(line.get(key), int)
    )
    place = next(places, "")
    shown = printable(", ".join(names[:_MOST_NAMED]))
    return f"{shown} became NaN or infinite{f' at {place}' if place else ''}" if names else ""
