"""A job's stdout and stderr as they grow."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from clusterctl.errors import TransportError
from clusterctl.terminal import plain_line
from clusterctl.transport.base import Transport

_PROGRAM = (Path(__file__).parent / "remote_follow.py").read_text(encoding="utf-8")
_LOG = re.compile(r"(stdout|stderr)(?:-([0-9]+))?\.log")
_TAIL_LINES = 20
_TAIL_COLUMNS = 2000
_TAIL_BYTES = 1 << 16  # a log may be one line without end
_READ_LINES = 400
# What Open MPI and Slurm say of the other ranks once one has failed. The tail of a log leaves it out: it says
# nothing of the cause, and there may be more of it than lines are shown.
_CONSEQUENCES = re.compile(
    r"^-{74}\n(?:An MPI communication peer process|MPI_ABORT was invoked|Primary job +terminated normally)"
    r"(?:.*\n)*?-{74}(?:\n|\Z)"
    r"|^slurmstepd-\S+ error: +(?:mpi/pmix.*|\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*)(?:\n|\Z)"
    r"|^srun: (?:Job step aborted: |launch/slurm: _step_signal: |Force Terminated ).*(?:\n|\Z)"
    r"|^srun: error: \S+ tasks? \S+ Terminated(?:\n|\Z)",
    re.MULTILINE,
)
_TAIL = """\
test -d "$5" || { echo "(the job's folder is gone)"; exit 0; }
for log in "$3" "$4"; do test -s "$log" && { tail -c "$2" -- "$log" | tail -n "$1"; exit; }; done
exit 0
"""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of one of a job's logs, as the job wrote them; ``task`` is set for an array."""

    stream: Literal["stdout", "stderr"]
    task: int | None
    data: bytes


@dataclass(slots=True)
class LogReader:
    """Reads the logs in a job's folder from where it last stopped."""

    transport: Transport
    folder: str
    task: int | None = None
    gone: bool = False  # the folder was not there when it was last looked at
    _offsets: dict[str, int] = field(default_factory=dict)

    def new(self) -> Iterator[LogChunk]:
        """What was added since, once.

        Raises:
            TransportError: the host can't be reached.
        """
        for chunk in self._read(once=True):
            if chunk is not None:
                yield chunk

    def grow(self) -> Generator[LogChunk | None, None, None]:
        """What is added, without end; None about once a second, so that the caller can look at the job.

        Raises:
            TransportError: the connection broke; calling it again goes on from there.
        """
        return self._read(once=False)

    def _read(self, *, once: bool) -> Generator[LogChunk | None, None, None]:
        offsets = json.dumps(self._offsets)
        argv = ["python3", "-c", _PROGRAM, self.folder, "1" if once else "0", offsets]
        argv.append("" if self.task is None else str(self.task))
        rest = b""
        with closing(self.transport.stream(argv)) as stream:
            for piece in stream:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield self._chunk(line)

    def _chunk(self, line: bytes) -> LogChunk | None:
        try:
            answer = json.loads(line)
            self.gone = "gone" in answer
            if not answer or self.gone:
                return None
            match = _LOG.fullmatch(answer["log"])
            data = base64.b64decode(answer["data"])
            self._offsets[answer["log"]] = int(answer["at"]) + len(data)
        except (ValueError, KeyError, TypeError, binascii.Error) as exc:
            raise TransportError(
                "the log reader on the cluster answered what clusterctl does not understand",
                where=self.transport.host,
                why=line[:200].decode(errors="replace").encode("unicode_escape").decode(),
                host=self.transport.host,
            ) from exc
        if match is None:
            return None
        task = int(match[2]) if match[2] else None
        return LogChunk("stdout" if match[1] == "stdout" else "stderr", task, data)


def tail(transport: Transport, folder: str, task: int | None) -> str:
    """The last lines of a job's stderr, else of its stdout, fit for a terminal; "" if there are none.

    What only follows from a rank's failure is left out, unless there is nothing else.
    """
    suffix = "" if task is None else f"-{task}"
    logs = [f"{folder}/{name}{suffix}.log" for name in ("stderr", "stdout")]
    said = transport.run(
        ["sh", "-c", _TAIL, "sh", str(_READ_LINES), str(_TAIL_BYTES), *logs, folder], check=False
    ).stdout
    said = _CONSEQUENCES.sub("", said) or said
    # Only a newline ends a line: what else Python takes for an end, a binary log is full of.
    lines = said.removesuffix("\n").split("\n")[-_TAIL_LINES:]
    return "\n".join(plain_line(line)[-_TAIL_COLUMNS:] for line in lines)
