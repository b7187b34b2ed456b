"""Search for the rank that failed first, by the messages of the launcher: srun, mpirun or
torchrun.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.history import (
    FROM_SHELL,
    LOST_PEER,
    LOST_SERVER,
    first_end,
    rank_ends,
)

_BY_LAUNCHER: Final = frozenset({"SIGTERM", "SIGKILL"})
_NAMES: Final = {number.value: number.name for number in signal.Signals}
_SIGNALS: Final = {signal.strsignal(number): number.name for number in signal.Signals}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """The first rank that failed, and its exit code or signal. Unknown fields are None or "".

    status: the exit status from which the signal was concluded: 128 + N, which a shell returns if
        signal N has ended a program, and any program may return. 0: the signal was reported.
    """

    rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: str = ""
    status: int = 0

    @property
    def in_a_shell(self) -> int | None:
        """The exit status that a shell has for this end."""
        number = signal.Signals[self.signal].value if self.signal else 0
        return FROM_SHELL + number if number else self.exit_code

    def __str__(self) -> str:
        """Return ``rank 1 on demo-train-2``; "" if rank and host are unknown."""
        rank = f"rank {self.rank}" if self.rank is not None else ""
        return " ".join(filter(None, (rank, f"on {self.host}" if self.host else "")))


_SRUN: Final = re.compile(
    r"^srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)(?P<more>\S*): (?:Exited with exit code (?P<code>\d+)"
    r"|(?P<how>[A-Za-z ]+?)(?: \(core dumped\))?)$",
    re.MULTILINE,
)
_SRUN_ENDS: Final = re.compile(
    r"^srun: (?:launch/slurm: _step_signal|Job step aborted|Terminating)", re.MULTILINE
)
_STEP_ENDED: Final = re.compile(
    r"^srun: (?:launch/slurm: _step_signal: )?Terminating StepId=(?P<step>\S+)", re.MULTILINE
)
_NODE_FAILURE: Final = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_MPIRUN: Final = re.compile(
    r"(?:mpirun|prterun) noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on"
    r"\s+signal (?P<signal>\d+)|Process name: \[\S+,(?P<rank2>\d+)\]\s+Exit code: +(?P<code>\d+)"
)
_ABORTED: Final = re.compile(
    r"MPI_ABORT was invoked on rank (\d+) in communicator(?:.*\n){1,4}?.*?[Ee]rror ?code:? (-?\d+)"
)
_TORCHRUN: Final = re.compile(
    r"^Root Cause \(first observed failure\):\n\[\d+\]:\n +time +: (?P<time>\S+)\n +host +: (?P<host>\S+)\n"
    r" +rank +: (?P<rank>\d+) .*\n +exitcode +: (?P<code>-?\d+)",
    re.MULTILINE,
)
# As bash, other shells, srun, Open MPI, Python's faulthandler, torchrun and Python write it.
_REPORTED: Final = (
    r"line \d+: +\d+ {said}\b|^{said}(?: \(core dumped\))?$|: tasks? [\d,-]+: {said}\b"
    r"|Caught signal \d+ \({said}|Signal: {said} \(|Fatal Python error: {said}\b|<Signals\.{name}:"
    r"|\b[Ss]ignal[ :(]+\d* ?\(?(?:{said}|{name})\b|\({name}\)"
)
_CAUGHT: Final = re.compile(
    r"^\[(?P<host>[^\s:\]]+):\d[^\]]*\] (?:Caught signal |Signal: [A-Za-z ]+\()(?P<signal>\d+)",
    re.MULTILINE,
)


def first_failed(
    log: str,
    job: JobInfo,
    tasks_per_node: int | None,
    *,
    ranks: Mapping[int, str],
    ends: Mapping[int, str],
    killed_at: float = math.inf,
) -> FailedRank:
    """Return the rank that failed first: the earliest recorded end that nothing of ours and no other
    rank caused; else by the launcher's messages in ``log``; else only the exit code.

    ranks: rank -> log. ends: failed rank -> "TIME CODE HOST": Unix seconds, exit code of the rank's
        program or -N if signal N ended it, host; "" if the rank was killed while it wrote this
        record.
    killed_at: when job.py began to kill ranks.
    """
    said = _of_torchrun(log) or _of_srun(log, job.exit_code) or _of_mpirun(log)
    # The ends of ranks on other nodes may not have been read.
    is_own = said is not None and said.signal not in _BY_LAUNCHER and said.exit_code != LOST_PEER
    is_of_unread = said is not None and is_own and said.rank is not None and said.rank not in ends
    recorded = None if is_of_unread else _first_recorded(ranks, ends, log, killed_at)
    code = -job.signal if job.signal else job.exit_code
    failed = (
        # MPI_Abort may have killed the rank before its end was recorded.
        _of_mpi_abort(log)
        or recorded
        or (None if is_own else _signalled_rank(ranks))
        or said
        or (FailedRank() if code is None else _ended(code))
    )
    if failed.rank is not None and not failed.host:
        failed = replace(failed, host=host_of(failed.rank, job, tasks_per_node))
    host = next(
        (node for node in job.nodes if node.partition(".")[0] == failed.host.partition(".")[0]), ""
    )
    return replace(failed, host=host or (job.nodes[0] if len(job.nodes) == 1 else failed.host))


def host_of(rank: int, job: JobInfo, tasks_per_node: int | None) -> str:
    """Return the node of a rank, or "" if it is unknown."""
    index = rank // tasks_per_node if tasks_per_node else len(job.nodes)
    return job.nodes[index] if index < len(job.nodes) else ""


def nodes_lost_by(log: str) -> dict[str, str]:
    """Return the nodes that srun lost, as keys. The values, the reasons, are empty."""
    return dict.fromkeys(_NODE_FAILURE.findall(log), "")


def failed_by_itself(
    failed: FailedRank, log: str, ends: Mapping[int, str], *, is_srun_killed: bool
) -> FailedRank | None:
    """Return how the rank ended; None if it was ended, or if it only lost another rank or
    slurmstepd.

    is_srun_killed: whether job.py has killed srun and all ranks.
    """
    end = None
    if failed.rank is not None and (record := ends.get(failed.rank)):
        recorded = rank_ends({failed.rank: record})
        end = next((_ended(each.code, rank=each.rank) for each in recorded), None)
    elif failed.rank is not None and (killed := _SRUN_ENDS.search(log)):
        end = next(
            (end for end in _ends_by_srun(log[: killed.start()]) if end.rank == failed.rank), None
        )
    elif failed.exit_code or failed.signal:
        end = failed
    by_another = _BY_LAUNCHER if is_srun_killed else ("SIGTERM",)
    is_own = (
        end is not None
        and end.exit_code not in (LOST_PEER, LOST_SERVER)
        and end.signal not in by_another
    )
    return end if is_own else None


def _first_recorded(
    ranks: Mapping[int, str], ends: Mapping[int, str], log: str, killed_at: float
) -> FailedRank | None:
    """Return the rank in ``ends`` that failed first by itself, else one that was killed while it wrote
    its record.
    """
    first = first_end(rank_ends(ends, killed_at), lambda rank: ranks.get(rank, ""))
    rank = min((rank for rank, record in ends.items() if not record), default=None)
    if first is not None and not (first.is_by_another and rank is not None):
        return _ended(first.code, rank=first.rank, host=first.host)
    if rank is None:
        return None
    said = (end for end in _ends_by_srun(log) if end.rank == rank)
    return _signalled_rank({rank: ranks.get(rank, "")}) or next(said, FailedRank(rank=rank))


def _signalled_rank(ranks: Mapping[int, str]) -> FailedRank | None:
    """Return a rank that caught a signal, according to a message of Open MPI or UCX in the rank's
    log.
    """
    caught = ((rank, match) for rank, log in ranks.items() if (match := _CAUGHT.search(log)))
    return next((_ended(-int(m["signal"]), rank=rank, host=m["host"]) for rank, m in caught), None)


def _ended(code: int, **fields: Any) -> FailedRank:
    """Return a failure with this exit code."""
    if number := signal_of(code):
        return FailedRank(signal=_NAMES[number], status=max(0, code), **fields)
    return FailedRank(exit_code=code, **fields)


def with_reported_signal(failed: FailedRank, log: str, reported: Collection[str]) -> FailedRank:
    """Return the failure with its exit code in place of a signal that nothing but this code shows.

    log: the job's own log, with the launcher's messages. reported: signals that job.py has
        recorded.
    """
    if not failed.status or failed.signal in reported:
        return failed
    if failed.rank is not None:
        # srun reports the exit code of this rank, and signals of the other ranks.
        log = _SRUN.sub("", log)
    said = re.escape(signal.strsignal(signal.Signals[failed.signal]) or "")
    if re.search(_REPORTED.format(said=said, name=failed.signal), log, re.MULTILINE):
        return failed
    return replace(failed, signal="", exit_code=failed.status, status=0)


def signal_name(code: int) -> str:
    """Return the name of the signal that an exit code means: see ``signal_of``. "": no signal."""
    return _NAMES.get(signal_of(code), "")


def signal_of(code: int) -> int:
    """Return the number of the signal that an exit code means: N for 128 + N (shell) and -N
    (Python). 0: it means no signal.
    """
    number = -code if code < 0 else code - FROM_SHELL
    return number if number in _NAMES else 0


def _of_torchrun(log: str) -> FailedRank | None:
    """Return the rank in the earliest "Root Cause" message of torchrun, which runs on each node."""
    if not (matches := sorted(_TORCHRUN.finditer(log), key=lambda match: match["time"])):
        return None
    return _ended(int(matches[0]["code"]), rank=int(matches[0]["rank"]), host=matches[0]["host"])


def _of_mpi_abort(log: str) -> FailedRank | None:
    """Return the rank that called MPI_Abort, with the exit code or signal that the launcher
    reports.
    """
    if (aborted := _ABORTED.search(log)) is None:
        return None
    rank = int(aborted[1])
    reported = next((end for end in _ends_by_srun(log) if end.rank == rank), None) or _of_mpirun(
        log
    )
    if reported is None or reported.rank != rank:
        reported = FailedRank(rank=rank)
    # The launcher kills the rank at the rank's request, so the exit code is the argument of
    # MPI_Abort.
    if not reported.exit_code:
        return replace(reported, exit_code=int(aborted[2]), signal="")
    return reported


def _ends_by_srun(log: str) -> list[FailedRank]:
    ends = []
    for match in _SRUN.finditer(log):
        # Of ranks that were killed together, it is unknown which was the first.
        is_known = bool(match["code"]) or not match["more"]
        fields: dict[str, Any] = {
            "rank": int(match["rank"]) if is_known else None,
            "host": match["host"],
        }
        signal_name = (
            "SIGKILL" if match["how"] == "Out Of Memory" else _SIGNALS.get(match["how"] or "", "")
        )
        ends.append(
            _ended(int(match["code"]), **fields)
            if match["code"]
            else FailedRank(signal=signal_name, **fields)
        )
    return ends


def is_survived(failed: FailedRank, log: str, exit_code: int | None) -> bool:
    """Return whether a script has gone on after the failure of a rank that srun reports, because it
    ended with another exit code than all such ranks.
    """
    codes = {end.in_a_shell for end in _ends_by_srun(log)}
    return failed.rank is not None and bool(codes and exit_code) and exit_code not in codes


def _of_srun(log: str, exit_code: int | None) -> FailedRank | None:
    """Return the first failed rank in srun's messages, if possible a rank that srun itself did not
    kill. Of a script with several steps, it is a rank of the last step that may have given the job's
    exit code: the step's is the largest of its ranks, such as that of a rank that srun killed.
    """
    steps = _failed_steps(log)
    own = [ranks[0] for ranks in steps if exit_code in {rank.in_a_shell for rank in ranks}]
    if len(steps) > 1 and own:
        return own[-1]
    end = _SRUN_ENDS.search(log)
    if end is not None and (ends_before := _ends_by_srun(log[: end.start()])):
        return ends_before[0]
    ends = _ends_by_srun(log)
    by_itself = (failed for failed in ends if failed.signal not in _BY_LAUNCHER)
    return next(by_itself, ends[0] if ends else None)


def _failed_steps(log: str) -> list[list[FailedRank]]:
    """Return the failed ranks of each step that srun has ended. The first is the rank because of
    which srun ended the step.
    """
    *parts, rest = _STEP_ENDED.split(log)
    steps: dict[str, list[FailedRank]] = {}
    ranks: list[FailedRank] = []
    for text, step in zip(parts[::2], parts[1::2], strict=True):
        ends = _ends_by_srun(text)
        if ends and step not in steps:
            # srun tells of the other ranks of a step after it has ended the step.
            ranks += ends[:-1]
            ranks = steps[step] = ends[-1:]
        else:
            ranks += ends
    ranks += _ends_by_srun(rest)
    return [*steps.values()]


def _of_mpirun(log: str) -> FailedRank | None:
    if (match := _MPIRUN.search(log)) is None:
        return None
    if match["signal"]:
        return _ended(-int(match["signal"]), rank=int(match["rank"]), host=match["host"])
    return _ended(int(match["code"]), rank=int(match["rank2"]))
