"""Decides whether a failed job runs again. Uses only the standard library of Python 3.8 or newer.

job.py records each attempt of a job in the file job.events. From these events and the files in the
job's folder, this module tells how an attempt ended, and why the job should not run again.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from payload.node import history, task
from payload.node.history import (
    FROM_SHELL,
    SAVED,
    Attempt,
    this_attempt,
)

HANG_FILE = "hang.json"
# alarms.py writes it if an alarm is to end the program.
ALARM_FILE = "alarm.json"
ALARM = "alarm"
# A program ends with 2 if its arguments are wrong. A shell returns 126 or 127 if it cannot start a
# program.
USAGE = (2, 126, 127)
# A job ends after so many failures without progress in between.
MOST_FAILURES = 3
# A checkpoint without a number is progress only if it was written so long after the start of its
# attempt: a program may write such a file whenever it starts.
LATE_S = 600.0
LOG_END = 1 << 16
MOST_ENTRIES = 2000
DEEPEST = 3
# Longest search for checkpoints, which may be on a slow file system beside a large data set.
SEARCH_S = 5.0

_NOT_STARTED = re.compile(
    rf"^srun: error: \S+: tasks? \S+ Exited with exit code ({'|'.join(map(str, USAGE))})$",
    re.MULTILINE,
)
# srun reports no failure of this rank, so its exit code was 0.
LEFT_MPI = "exit without MPI_Finalize"
# The kind of an end if it is unknown why srun has aborted the step.
ABORT = "abort by srun"
_STEP_ABORTED = re.compile(r"^srun: Job step aborted: Waiting up to", re.MULTILINE)
# slurmstepd writes this line to the log of the batch script, before it sends SIGTERM.
_ENDED_BY_SLURM = re.compile(
    r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+(?: DUE (?:TO|to) (.+?))? \*\*\*$", re.MULTILINE
)
_STATES = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
    "JOB REQUEUE": "REQUEUED",
}
_LOST_DAEMON = re.compile("RTE has lost communication with a remote daemon")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+)")
# The end of a log of Python: the last frame of a traceback, and its exception.
_ERROR_AT_END = re.compile(
    r'^  File "([^"\n]*)", line (\d+)[^\n]*\n(?:    [^\n]*\n)*([A-Za-z_][\w.]*)(?::[^\n]*)?\s*\Z',
    re.MULTILINE,
)
_ABORT = re.compile(r"^-{20,}\nMPI_ABORT was invoked", re.MULTILINE)
_CHECKPOINT_FOLDER = re.compile(
    r"(?:checkpoint|ckpt|step|iter|iteration|epoch|global_?step)[-_=]?(\d+)"
)
CHECKPOINT_FILE = re.compile(r"(.+)\.(?:pt|pth|ckpt|safetensors|npz)")
_NUMBER = re.compile(r"(?:^|[-_=.]|step|iter|iteration|epoch|checkpoint|ckpt)(\d+)$")
_NO_CHECKPOINTS = frozenset(("rank-logs", "telemetry", "tensorboard", "__pycache__"))
_UNFINISHED = (".incomplete", ".tmp", ".part")

# The facts that job.py finds out about the end of an attempt: the fields of an event, see
# history.Attempt.
Facts = Mapping[str, object]
FACTS = ("kind", "error", "place", "suspects", "code", "progress")


def failure(
    kind: str,
    error: str = "",
    place: str = "",
    suspects: Sequence[str] = (),
    code: int = 0,
) -> dict[str, object]:
    """Return the facts about the end of an attempt, except success.

    code: the exit code that ``kind`` takes for a signal, as a shell's. Any program may return it.
        0: none.
    """
    return {
        "kind": kind,
        "error": error,
        "place": place,
        "suspects": [*suspects],
        "code": code,
    }


def is_explained(attempt: Attempt) -> bool:
    """Return whether job.py has seen the end of an attempt, or SIGTERM, with which Slurm ends a
    job.
    """
    return bool(attempt.end or attempt.term)


def is_due(attempt: Attempt) -> bool:
    """Return whether an attempt was to save its work: by a signal, or because half of its time was
    over.
    """
    half = attempt.until + (attempt.started or 0)
    return bool(attempt.signal) or 2 * (attempt.last or 0) >= half


def failures(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Return the attempts that failed, in order."""
    return [attempt for attempt in attempts if attempt.kind]


def with_failure(attempt: Attempt, facts: Facts) -> Attempt:
    """Return an attempt as its record will tell it after its failure."""
    failed = {"event": "requeue", "time": time.time(), **facts}
    return attempt._replace(events=[*attempt.events, failed])


def seconds_used(attempts: Iterable[Attempt]) -> float:
    """Return how long all attempts have run together. A lost attempt lasts until its limit, or the
    next.
    """
    total = 0.0
    for attempt in attempts:
        end = attempt.ended
        if end is None and attempt.following:
            end = min(attempt.again, attempt.until)
        total += 0.0 if end is None else end - (attempt.started or 0.0)
    return total


def failure_of(nodes: Sequence[str], fault: str) -> Facts | None:
    """Return the failure of these nodes, or None without nodes. fault: such as "loss of"."""
    return failure(f"{fault} {','.join(nodes)}", suspects=nodes) if nodes else None


def is_usage(kind: str) -> bool:
    """Return whether the program ended with a status that each restart would have, too."""
    return kind in [kind_of(status) for status in USAGE]


def stop_reason(attempts: Sequence[Attempt], chain_s: float = 0.0) -> str:
    """Return why a job should not run again after the failure of its last attempt. "": it should.

    chain_s: how long all attempts may run together. 0: without limit.
    """
    last = failures(attempts)[-1]
    if is_usage(last.kind):
        return "usage"
    # The user wants such a job to end, and a restart would waste the same time again.
    if last.kind == ALARM:
        return ALARM
    if len(without_progress(attempts)) >= MOST_FAILURES:
        return "no-progress"
    return "chain-over" if chain_s and seconds_used(attempts) >= chain_s else ""


def without_progress(attempts: Iterable[Attempt]) -> Sequence[Attempt]:
    """Return the last failures of which none came farther than the first."""
    recent: list[Attempt] = []
    best = (0, 0, 0)
    for attempt in failures(attempts):
        number, step, written = map(max, zip(best, attempt.progress))
        # A program that shows no progress may save its work in a place unknown to us. That counts
        # if it was due: otherwise such a program would be restarted each second without end.
        is_saved = attempt.kind == "saved" and not any(attempt.progress) and is_due(attempt)
        is_farther = (number, step, written) != best
        best = (number, step, written)
        recent = [] if is_saved else [attempt] if is_farther else [*recent, attempt]
    return recent


def explain(reason: str, attempts: Sequence[Attempt], chain_s: float) -> str:
    """Return a reason of ``stop_reason`` in words, on one or more lines."""
    last = failures(attempts)[-1]
    if reason == "usage":
        return f"a restart would end like this attempt: {last.said}"
    if reason == ALARM:
        return f"an alarm has ended it: {last.error}"
    if reason == "no-progress":
        vain = without_progress(attempts)
        lines = [f"{len(vain)} failures without a newer checkpoint or step"]
        return "\n".join([*lines, *(f"  {attempt.facts}" for attempt in vain[-MOST_FAILURES:])])
    used_s = seconds_used(attempts)
    return (
        f"its attempts have run {used_s:.0f} s, and --set chain= is {chain_s:.0f} s; the last end: "
        f"{last.said}"
    )


def bad_nodes(attempts: Iterable[Attempt]) -> list[str]:
    """Return the nodes on which two failures in a row happened, which a job should not use again."""
    nodes = [set(attempt.suspects) for attempt in failures(attempts)]
    return sorted(set().union(*(one & two for one, two in zip(nodes, nodes[1:]))))


def kind_of(status: int) -> str:
    """Return the name of an end with this exit status of a shell."""
    if status == SAVED:
        return "saved"
    try:
        return signal.Signals(status - FROM_SHELL).name
    except ValueError:
        return f"exit code {status}"


def failure_now(
    status: int,
    log: str,
    killed_at: float = math.inf,
    *,
    is_signal: bool = True,
    has_lost_slurmstepd: bool = False,
) -> dict[str, object]:
    """Return the facts about the failure of the attempt that has just ended.

    status: of the program. log: the job's own. killed_at: when job.py began to kill ranks.
    is_signal: whether a status like that of a signal may mean one. has_lost_slurmstepd: whether a
    node has lost the slurmstepd of its ranks.
    """
    if os.path.exists(HANG_FILE):
        return failure("hang", suspects=_nodes_of_hang())
    if os.path.exists(ALARM_FILE):
        return failure(ALARM, error=_summary_of_alarm())
    if status == SAVED:
        return failure(kind_of(status))
    log = this_attempt(log)
    aborted = _ABORTED.search(log)
    code, rank, host = first_failed(killed_at)
    ended = task.as_in_shell(code)
    if ended == SAVED and not aborted:
        return failure(kind_of(SAVED))
    # MPI_Abort may have killed the rank before its end was recorded.
    if aborted:
        host = host if rank == aborted[1] else ""
        code = 0
        ended = status
        rank = aborted[1]
    text = this_attempt(end_of_file(f"rank-logs/{rank}.log")) if rank else log
    by_signal = kind_of(ended).startswith("SIG") and not aborted
    error = "" if by_signal else error_at_end(text)
    # job.py has killed srun, and with it all ranks that had a slurmstepd.
    is_killed = by_signal and ended == FROM_SHELL + signal.SIGKILL
    if has_lost_slurmstepd and (is_killed or not rank):
        return failure("loss of slurmstepd")
    if (left := left_mpi(log)) and (is_killed or not rank):
        return failure(LEFT_MPI, place=left)
    if killed_at < math.inf and not rank:
        return failure(ABORT)
    place = " on ".join(filter(None, (rank and f"rank {rank}", host)))
    suspects = (host,) if host else ()
    is_signal = code < 0 if code else is_signal and not _has_exited(status, log)
    kind = kind_of(ended or status)
    exited = 0 if is_signal or not kind.startswith("SIG") else ended or status
    return failure(kind, error, place, suspects, code=exited)


def _has_exited(status: int, log: str) -> bool:
    """Return whether srun or mpirun reports this exit code."""
    return bool(re.search(rf"(?:Exited with exit code|Exit code: +) ?{status}$", log, re.MULTILINE))


def left_mpi(log: str) -> str:
    """Return rank and node of a rank that has ended without MPI_Finalize and without failure, or
    "".
    """
    left = history.left_mpi(log, end_records())
    return f"rank {left[0]} on {left[1]}" if left else ""


def causes_of_ranks() -> Mapping[str, str]:
    """Return code -> text of the causes for which ranks could not start."""
    files = [entry.path for entry in _entries(task.RANKS) if entry.name.endswith(".cause")]
    pairs = [end_of_file(path).partition(" ") for path in sorted(files, reverse=True)]
    return {code: text for code, _, text in pairs}


def _is_end(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".end")


def state_by_slurm(log: str) -> str:
    """Return the state that Slurm gives the job that it has ended in this attempt, or "" for other
    jobs.
    """
    reasons = _ENDED_BY_SLURM.findall(this_attempt(log))
    return _STATES.get(reasons[-1], "CANCELLED") if reasons else ""


def has_lost_daemon(log: str) -> bool:
    """Return whether mpirun reports in this attempt that its program on a node is gone."""
    return bool(_LOST_DAEMON.search(this_attempt(log)))


def launcher_of(program: Sequence[str]) -> str:
    """Return the launcher that a program is, srun or mpirun, perhaps after env. "": for example a
    script.
    """
    launcher = next((word for word in program if word in ("srun", "mpirun")), "")
    before = program[: program.index(launcher)] if launcher else []
    return launcher if before[:1] in ([], ["env"]) and "-C" not in before else ""


def status_of_ranks(status: int, log: str, *, is_told: bool) -> int:
    """Return the exit status of a job after its launcher has failed: the same with each launcher.

    srun ends with the highest status of all ranks, also of ranks that it ended because another rank
    failed.

    status: of the launcher. log: the job's own. is_told: whether mpirun got SIGTERM. It then ends
        with 1.
    """
    # MPI_Abort sets the status of both launchers, and may kill the rank before its end is recorded.
    if _ABORTED.search(this_attempt(log)):
        return status
    first = task.as_in_shell(first_failed()[0])
    return first or (FROM_SHELL + signal.SIGTERM if is_told and status == 1 else status)


def status_of_start(log: str) -> int:
    """Return the exit status with which ranks did not start in this attempt, according to srun, or
    0.

    srun itself ends with the highest status of all ranks, also of those that it ends because of the
    failure.
    """
    failed = _NOT_STARTED.search(this_attempt(log))
    return int(failed[1]) if failed else 0


def is_aborted(log: str) -> bool:
    """Return whether srun has ended its step in this attempt, and waits for ranks."""
    return bool(_STEP_ABORTED.search(this_attempt(log)))


def forget_ends() -> None:
    """Remove the records of how ranks of the previous attempt ended, and why they did not start."""
    for entry in list(_entries(task.RANKS)):
        if entry.name.endswith((".end", ".cause")):
            with suppress(OSError):
                os.unlink(entry.path)


def folders_of(program: Sequence[str]) -> list[str]:
    """Return the folders other than its own in which the bundled training writes, from its
    arguments.
    """
    words = " ".join(program).replace("=", " ").split()
    return [words[n + 1] for n, word in enumerate(words[:-1]) if word in ("--out", "--checkpoints")]


def first_failed(killed_at: float = math.inf) -> tuple[int, str, str]:
    """Return exit code (-N: signal N), rank and node of the first rank that failed by itself.

    Rank and node are "" if there is no such rank. The code is then 75 if ranks have saved their
    work, or 0.
    killed_at: when job.py began to kill ranks. Later ends do not count.
    """
    ends = history.rank_ends(end_records(), killed_at)
    first = history.first_end(
        ends, lambda rank: this_attempt(end_of_file(f"{task.RANKS}/{rank}.log"))
    )
    if first is not None and not first.is_by_another:
        return first.code, str(first.rank), first.host
    # torchrun ends with 1 although its ranks have saved their work.
    return (SAVED if SAVED in [end.code for end in ends] else 0), "", ""


def end_records() -> dict[int, str]:
    """Return rank -> record of its end, of ranks that have failed."""
    entries = [entry for entry in islice(_entries(task.RANKS), MOST_ENTRIES) if _is_end(entry)]
    ranks = {entry.name.partition(".")[0]: entry.path for entry in entries}
    return {int(rank): end_of_file(path) for rank, path in ranks.items() if rank.isdecimal()}


def error_at_end(log: str) -> str:
    """Return type and place of the exception with whose traceback a log of Python ends, or "".
    After it, mpi4py calls MPI_Abort.
    """
    match = _ERROR_AT_END.search(_ABORT.split(log)[0])
    return f"{match[3]} at {match[1]}:{match[2]}" if match else ""


def progress(folders: Sequence[str], since: float) -> tuple[int, int, int]:
    """Return how far a job has come: its last checkpoint's number, its last step, its last
    checkpoint's time.

    The time is that of the newest checkpoint. It is 0 if the first or second number is known,
    because a program that starts over also writes such a file again.

    folders: the folders in which the program writes. since: ignore older files, which came with the
        job.
    """
    number = 0
    written = 0
    step = last_step(os.environ.get("CLUSTERCTL_HEARTBEAT", ""), folders)
    deadline = time.monotonic() + SEARCH_S
    for folder in folders:
        for _, sequence, changed in checkpoints(folder, deadline):
            if changed >= since:
                number = max(number, sequence or 0)
                written = max(written, int(changed))
    return number, step, 0 if number or step else written


def last_step(heartbeat: str, folders: Iterable[str]) -> int:
    """Return the number of steps in the file ``heartbeat`` or in metrics.jsonl of a folder, or
    0.
    """
    words = end_of_file(heartbeat).split()
    step = int(words[0]) if words and words[0].isdigit() else 0
    return max([step, *(_last_step(f"{folder}/metrics.jsonl") for folder in folders)])


def checkpoints(
    folder: str, deadline: float, depth: int = 0
) -> Iterator[tuple[str, int | None, float]]:
    """Yield path, number (None: it has no number) and time of files and folders like a
    checkpoint.
    """
    for entry in islice(_entries(folder), MOST_ENTRIES):
        if time.monotonic() > deadline:
            return
        # The folder may change at the same time.
        with suppress(OSError):
            if (
                entry.is_symlink()
                or entry.name in _NO_CHECKPOINTS
                or entry.name.endswith(_UNFINISHED)
            ):
                continue
            is_folder = entry.is_dir()
            match = (_CHECKPOINT_FOLDER if is_folder else CHECKPOINT_FILE).fullmatch(entry.name)
            if match:
                number = _NUMBER.search(match[1])
                yield entry.path, int(number[1]) if number else None, entry.stat().st_mtime
            elif is_folder and depth < DEEPEST:
                yield from checkpoints(entry.path, deadline, depth + 1)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _last_step(path: str) -> int:
    """Return the number ``step`` in the last line with such a number, or 0."""
    for line in reversed(end_of_file(path).splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0


def _summary_of_alarm() -> str:
    try:
        return str(json.loads(end_of_file(ALARM_FILE))["summary"])
    except (ValueError, KeyError, TypeError):
        return ""


def _nodes_of_hang() -> tuple[str, ...]:
    with suppress(ValueError, KeyError, TypeError):
        return tuple(map(str, json.loads(end_of_file(HANG_FILE))["nodes"]))
    return ()


def end_of_file(path: str) -> str:
    """Return the end of a file, or "" if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_END))
        return file.read().decode(errors="replace")
    return ""
