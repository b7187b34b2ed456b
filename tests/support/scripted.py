"""A host that expects given commands in order, and returns the given answers.

Slurm's answers are fields with the separator that the command asked for: ``slurm_output``,
``records``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CommandError
from clusterctl.scheduler.slurm.parse import SINFO, SQUEUE
from clusterctl.transport.base import Conversation, shown_command
from clusterctl.transport.ssh import Connections
from clusterctl.util.process import Result


def without_sudo(argv: Sequence[str]) -> Sequence[str]:
    """Return a command without the words that ``RootTransport`` puts before it."""
    if tuple(argv[:2]) != ("sudo", "-n"):
        return argv
    is_env = argv[2] == "env"
    return tuple(dropwhile(lambda word: "=" in word, argv[3:])) if is_env else argv[2:]


@dataclass(frozen=True, slots=True)
class Step:
    """One expected command. Each word of ``argv`` is a glob pattern; a last word ``...`` stands for
    any rest. If it does not begin with sudo, ``RootTransport`` may run it.

    ``error`` is raised in place of an answer. ``stdout`` may be made of the command as it came.
    """

    argv: tuple[str, ...]
    stdout: str | bytes | Callable[[Sequence[str]], str | bytes] = ""
    stderr: str = ""
    rc: int = 0
    error: BaseException | None = None

    def matches(self, argv: Sequence[str]) -> bool:
        patterns = self.argv
        if patterns[:1] != ("sudo",):
            argv = without_sudo(argv)
        if patterns[-1:] == ("...",):
            patterns = patterns[:-1]
            argv = argv[: len(patterns)]
        return len(argv) == len(patterns) and all(map(fnmatchcase, argv, patterns))


@dataclass(frozen=True, slots=True)
class Call:
    """A command as it came."""

    argv: tuple[str, ...]
    stdin: bytes | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 0.0


class ScriptedTransport:
    """Answers with ``steps``, in order; ``calls`` keeps what was asked. A surprise is an
    AssertionError.

    ``sent`` keeps what was sent in conversations.
    """

    def __init__(self, steps: Iterable[Step] = (), *, host: str = "scripted") -> None:
        self._steps = list(steps)
        self.host = host
        self.calls: list[Call] = []
        self.sent: list[bytes] = []

    @property
    def left(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        step = self._next(Call(tuple(argv), stdin, dict(env or {}), timeout_s))
        stdout = _bytes_of(step, argv).decode(errors="replace")
        if check and step.rc != 0:
            raise CommandError(
                f"`{shown_command(argv)}` failed", rc=step.rc, stderr=step.stderr, host=self.host
            )
        return Result(step.rc, stdout, step.stderr)

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """Answer with the next step, its stdout in one piece; see ``Transport.stream``."""
        step = self._next(Call(tuple(argv)))
        yield _bytes_of(step, argv)
        if step.rc != 0:
            raise CommandError(
                f"`{shown_command(argv)}` failed", rc=step.rc, stderr=step.stderr, host=self.host
            )

    def converse(
        self,
        argv: Sequence[str],
        *,
        silence_s: float | None = None,  # noqa: ARG002
    ) -> AbstractContextManager[Conversation]:
        """Answer with the next step, its stdout in one piece; see ``Transport.converse``."""
        return nullcontext(_Talk(self.stream(argv), self.sent))

    def begin(self, argv: Sequence[str]) -> None:
        """Nothing is begun ahead; see ``Transport.begin``."""

    def leave(self) -> None:
        """No command runs on."""

    def close(self) -> None:
        """Nothing to close."""

    def _next(self, call: Call) -> Step:
        self.calls.append(call)
        if not self._steps or not self._steps[0].matches(call.argv):
            expected = self._steps[0].argv if self._steps else "nothing more"
            raise AssertionError(f"unexpected command {call.argv}; expected {expected}")
        step = self._steps.pop(0)
        if step.error is not None:
            raise step.error
        return step


@dataclass(frozen=True, slots=True)
class _Talk:
    """A conversation with a fixed answer, which keeps what it is sent."""

    pieces: Generator[bytes, None, None]
    sent: list[bytes]

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def receive(self) -> bytes:
        return next(self.pieces, b"")

    def finish(self) -> None:
        pass


def _bytes_of(step: Step, argv: Sequence[str]) -> bytes:
    stdout = step.stdout(argv) if callable(step.stdout) else step.stdout
    return stdout.encode() if isinstance(stdout, str) else stdout


CAPTURED = "\x1f"  # the separator in the captures


def separator_in(argv: Sequence[str]) -> str:
    """The separator that squeue, sacct or sinfo was asked for."""
    for word in argv:
        name, _, value = word.partition("=")
        if name == "--delimiter":
            return value
        if name == "--Format":
            return value.split(",")[0].partition(":")[2]
    raise AssertionError(f"{argv[0]} was asked for no separator")


def captured(path: Path, fields: Sequence[str], separator: str = CAPTURED) -> bytes:
    """Return a captured answer with these fields of each record, in this order.

    The file begins with a line of the names of its fields. A field that it lacks is empty.
    """
    mark = separator.encode()
    values = path.read_bytes().split(mark)
    count = next(at for at, value in enumerate(values) if value.startswith(b"\n"))
    # The end of the line before is part of a record's first field.
    values[count:-1:count] = [value.removeprefix(b"\n") for value in values[count:-1:count]]
    names = [name.decode() for name in values[:count]]
    rows = [
        dict(zip(names, values[start : start + count], strict=True))
        for start in range(count, len(values) - 1, count)
    ]
    return b"".join(
        b"".join(row.get(field, b"") + mark for field in fields) + b"\n" for row in rows
    )


def slurm_output(text: bytes) -> Callable[[Sequence[str]], bytes]:
    """A captured answer of Slurm, with the separator that a command asks for."""
    return lambda argv: text.replace(CAPTURED.encode(), separator_in(argv).encode())


def records(rows: Iterable[Iterable[str]]) -> Callable[[Sequence[str]], bytes]:
    """These rows, as Slurm prints them."""
    return slurm_output(
        "".join("".join(field + CAPTURED for field in row) + "\n" for row in rows).encode()
    )


# Fields of a job in squeue's words; others are empty.
_USUAL = {
    "ArrayTaskID": "N/A",
    "UserName": "ada",
    "Partition": "train",
    "Account": "lab",
    "QOS": "normal",
    "Reason": "None",
    "exit_code": "0",
    "TimeLimit": "1:00:00",
    "tres-alloc": "cpu=1",
    "WorkDir": "/",
    "RestartCnt": "0",
}


def queued(*jobs: Mapping[str, str]) -> Step:
    """The answer of squeue with these jobs: name of a field -> value. Needs JobID and State."""
    rows = [{**_USUAL, "ArrayJobID": job["JobID"], **job} for job in jobs]
    return Step(
        ("squeue", "..."), records([row.get(name, "") for name in SQUEUE.fields] for row in rows)
    )


# Fields of a node in sinfo's words; others are empty.
_USUAL_OF_NODE = {
    "Partition": "train",
    "Reason": "none",
    "CPUs": "1",
    "Memory": "4000",
    "Gres": "(null)",
    "User": "root",
    "AllocMem": "0",
    "CPUsState": "0/1/0/1",
    "CPUsLoad": "0.01",
    "GresUsed": "(null)",
}


def listed_nodes(*nodes: Mapping[str, str]) -> Step:
    """The answer of sinfo with these nodes: name of a field -> value. Needs NodeList and StateLong."""
    rows = [{**_USUAL_OF_NODE, "StateComplete": node["StateLong"], **node} for node in nodes]
    return Step(
        ("sinfo", "..."), records([row.get(name, "") for name in SINFO.fields] for row in rows)
    )


def use_hosts(monkeypatch: pytest.MonkeyPatch, transport_to: Callable[[str], Any]) -> None:
    """Reach all hosts by these transports, so that no ssh starts.

    transport_to: called with the name of a host. Returns its transport.
    """
    monkeypatch.setattr(Connections, "to", lambda _, host, *__: transport_to(host))
