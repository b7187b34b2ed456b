"""The rank of a job that failed first, by the words of its launcher: srun, mpirun or torchrun."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from clusterctl.scheduler.base import JobInfo

_BY_LAUNCHER: Final = frozenset({"SIGTERM", "SIGKILL"})  # as it ends ranks
_LOST_PEER: Final = 14  # Open MPI's exit code of ranks that it ends so
_FROM_SHELL = 128  # a shell gives the number of the signal that ended a program beside this
_NAMES: Final = {one.value: one.name for one in signal.Signals}
_SIGNALS: Final = {signal.strsignal(one): one.name for one in signal.Signals}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The first rank that failed, as far as it is known; ``exit_code`` of a program that ended by itself."""

    rank: int | None = None
    host: str = ""
    exit_code: int | None = None
    signal: str = ""

    def __str__(self) -> str:
        """``rank 1 on demo-train-2``; "" where neither is known."""
        rank = f"rank {self.rank}" if self.rank is not None else ""
        return " ".join(filter(None, (rank, f"on {self.host}" if self.host else "")))


_SRUN: Final = re.compile(
    r"^srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)\S*: (?:Exited with exit code (?P<code>\d+)"
    r"|(?P<how>[A-Za-z ]+?)(?: \(core dumped\))?)$",
    re.MULTILINE,
)
_SRUN_ENDS: Final = re.compile(
    r"^srun: (?:launch/slurm: _step_signal|Job step aborted|Terminating)", re.MULTILINE
)
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
_PEER_GONE: Final = re.compile(
    r"MPI communication peer process has unexpectedly disconnected|An error occurred in Socket closed"
)
_CAUGHT: Final = re.compile(
    r"^\[(?P<host>[^\s:\]]+):\d[^\]]*\] (?:Caught signal |Signal: [A-Za-z ]+\()(?P<signal>\d+)", re.MULTILINE
)


def first_failed(
    log: str,
    job: JobInfo,
    tasks_per_node: int | None,
    *,
    ranks: Mapping[int, str],
    ends: Mapping[int, str],
) -> Failed:
    """The rank that failed first, by what the launcher says in the log; else the end of the job itself.

    If Open MPI or srun ended ranks because another rank was gone, and the launcher does not name that rank:
    the first other rank by the records of their ``ends`` (seconds since 1970, exit code of the shell, host;
    empty if the rank was killed while it wrote its record), or the rank that caught a signal by ``ranks``,
    the ranks' own logs.
    """
    failed = _of_torchrun(log) or _of_mpi_abort(log) or _of_srun(log) or _of_mpirun(log)
    # Where no launcher says more, it is the job's own end.
    failed = failed or _ended(-job.signal if job.signal else job.exit_code or 0)
    own = None if failed.rank is None else ranks.get(failed.rank, "")
    # Open MPI does not always say that a rank lost its peer, but then the rank ends with this exit code.
    has_lost_peer = failed.exit_code == _LOST_PEER or (own is not None and _PEER_GONE.search(own))
    by_another = own is None or failed.signal in _BY_LAUNCHER or has_lost_peer
    if by_another and (_PEER_GONE.search(log) or _SRUN_ENDS.search(log)):
        failed = _first_recorded(ranks, ends, log) or _that_caught_a_signal(ranks) or failed
    if failed.rank is not None and not failed.host and tasks_per_node:
        index = failed.rank // tasks_per_node
        failed = replace(failed, host=job.nodes[index] if index < len(job.nodes) else "")
    host = next((node for node in job.nodes if node.partition(".")[0] == failed.host.partition(".")[0]), "")
    return replace(failed, host=host or (job.nodes[0] if len(job.nodes) == 1 else failed.host))


def _first_recorded(ranks: Mapping[int, str], ends: Mapping[int, str], log: str) -> Failed | None:
    """The first rank that failed and has not lost another rank, by the records of the ranks."""
    found = []
    for rank, record in ends.items():
        if not record:
            launched = (said for said in _srun_says(log) if said.rank == rank)
            failed = _that_caught_a_signal({rank: ranks.get(rank, "")}) or next(launched, Failed(rank=rank))
            found.append((1, 0.0, rank, failed))
            continue
        with suppress(ValueError):  # a job may have written anything
            when, code, host = record.split()
            if not _PEER_GONE.search(ranks.get(rank, "")):
                has_lost_peer = int(code) == _LOST_PEER
                found.append((2 * has_lost_peer, float(when), rank, _ended(int(code), rank=rank, host=host)))
    return min(found, key=lambda entry: entry[:3])[3] if found else None


def _that_caught_a_signal(ranks: Mapping[int, str]) -> Failed | None:
    """A rank whose own log has what Open MPI or UCX writes of a signal that ends it."""
    caught = ((rank, match) for rank, log in ranks.items() if (match := _CAUGHT.search(log)))
    return next((_ended(-int(m["signal"]), rank=rank, host=m["host"]) for rank, m in caught), None)


def _ended(code: int, **fields: Any) -> Failed:
    """How a program ended by its exit code, in which a shell, or Python's negative sign, has the signal."""
    number = -code if code < 0 else code - _FROM_SHELL
    if name := _NAMES.get(number):
        return Failed(signal=name, **fields)
    return Failed(exit_code=code, **fields)


def _of_torchrun(log: str) -> Failed | None:
    """Each node's torchrun names its own first: the earliest counts."""
    if not (found := sorted(_TORCHRUN.finditer(log), key=lambda match: match["time"])):
        return None
    return _ended(int(found[0]["code"]), rank=int(found[0]["rank"]), host=found[0]["host"])


def _of_mpi_abort(log: str) -> Failed | None:
    """The rank that called MPI_Abort, with what the launcher says of its end."""
    if (aborted := _ABORTED.search(log)) is None:
        return None
    rank = int(aborted[1])
    launched = next((one for one in _srun_says(log) if one.rank == rank), None) or _of_mpirun(log)
    if launched is None or launched.rank != rank:
        launched = Failed(rank=rank)
    if not launched.exit_code:  # the launcher killed it, as MPI_Abort asks for
        return replace(launched, exit_code=int(aborted[2]), signal="")
    return launched


def _srun_says(log: str) -> list[Failed]:
    found = []
    for match in _SRUN.finditer(log):
        fields: dict[str, Any] = {"rank": int(match["rank"]), "host": match["host"]}
        how = "SIGKILL" if match["how"] == "Out Of Memory" else _SIGNALS.get(match["how"] or "", "")
        found.append(_ended(int(match["code"]), **fields) if match["code"] else Failed(signal=how, **fields))
    return found


def _of_srun(log: str) -> Failed | None:
    """The first that srun names before it ends the others, else one that was not ended by it."""
    end = _SRUN_ENDS.search(log)
    if end is not None and (before := _srun_says(log[: end.start()])):
        return before[0]
    said = _srun_says(log)
    by_itself = (one for one in said if one.signal not in _BY_LAUNCHER)
    return next(by_itself, said[0] if said else None)


def _of_mpirun(log: str) -> Failed | None:
    if (match := _MPIRUN.search(log)) is None:
        return None
    if match["signal"]:
        return _ended(-int(match["signal"]), rank=int(match["rank"]), host=match["host"])
    return _ended(int(match["code"]), rank=int(match["rank2"]))
