"""clusterctl itself, as a program that carries out an agent's call.

Called as `agent_program.py CALL WORD...`, it carries out a call that costs or destroys, in a process of
its own, so that a killed server neither stops it nor leaves unknown how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.agent.journal import Journal
from clusterctl.errors import ClusterctlError, UsageError

_MOST_REASON: Final = 2000  # letters


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """What a command answered. body: its JSON. rc: its exit code."""

    body: dict[str, Any]
    rc: int

    @property
    def code(self) -> str:
        """The code of its first failure; "ok": it succeeded."""
        failures = self.body.get("failures") or [{}]
        return "ok" if self.body.get("ok") else str(failures[0].get("code") or "error")

    @property
    def cause(self) -> str:
        """The first line of the cause of its first failure; "": it succeeded."""
        failures = self.body.get("failures") or [{}]
        return str(failures[0].get("cause") or "").partition("\n")[0][:_MOST_REASON]


@dataclass
class Program:
    """A run of clusterctl in a folder.

    call: the id of a call in the journal that costs or destroys. It is carried out to its end, even
    if the client or the server is gone, by ``main``, which then writes how it ended. "":
    ``stop`` ends the program. Connections that it leaves open are used by the next.
    """

    words: Sequence[str]
    folder: Path
    environ: Mapping[str, str]
    call: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, heard: Callable[[str], None] = lambda _: None) -> CommandAnswer:
        """Run it. heard: called with each line of its notes, in another thread."""
        # -P: a module of the project never takes the place of clusterctl's.
        python = [sys.executable, "-P", "-m"]
        if self.call:
            argv = [*python, "clusterctl.cli.agent_program", self.call, *self.words]
        else:
            argv = [*python, "clusterctl", "-o", "json", *self.words]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env=dict(self.environ),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        notes: list[str] = []

        def read_notes(stream: Any) -> None:
            for raw in stream:
                notes.append(raw.decode(errors="replace").rstrip())
                heard(notes[-1])

        with self._process as process:
            reader = threading.Thread(target=read_notes, args=[process.stderr], daemon=True)
            reader.start()
            if self._stopped.is_set():
                self.stop()
            stdout = process.stdout.read() if process.stdout else b""
            process.wait()
            reader.join()
        return _answer(stdout, process.returncode, "\n".join(notes))

    def stop(self) -> None:
        """End the program, unless it carries out a call that costs or destroys."""
        self._stopped.set()
        if not self.call and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


# Runs a program. The second argument is called with each line of its notes.
Runner = Callable[[Program, Callable[[str], None]], CommandAnswer]


def run_program(program: Program, heard: Callable[[str], None]) -> CommandAnswer:
    return program.run(heard)


def _answer(stdout: bytes, rc: int, notes: str) -> CommandAnswer:
    body: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(stdout)
    if isinstance(body, dict):
        return CommandAnswer(body, rc)
    return error_answer(
        ClusterctlError(
            "the command has not answered",
            about="no-answer",
            why=notes[-_MOST_REASON:] or f"exit code {rc}",
            fix="look at what it did with `jobs` or `status`, before you call it again",
        ),
        rc,
    )


def error_answer(error: ClusterctlError, rc: int | None = None) -> CommandAnswer:
    """Return the answer for an error, as `-o json` shows it."""
    failures = [asdict(failure) for failure in error.failures]
    body = {"ok": False, "failures": failures, **error.answer}
    return CommandAnswer(body, error.exit_code if rc is None else rc)


def write_end(journal: Journal, call: str, answer: CommandAnswer, *, seconds: float) -> None:
    """Write how a call ended, unless that is written."""
    begun = journal.calls().get(call)
    # Only a call that submits has reserved node hours. A user may have emptied the journal since.
    jobs = _jobs_of(answer.body) if begun is None or begun.node_hours != 0 else []
    # Exit code 2: the command was refused before anything was done. An empty list: it is known that
    # no job was submitted.
    is_known = answer.rc == UsageError.exit_code or answer.body.get("jobs") == []
    if begun is None or not begun.code:
        journal.end(
            call,
            answer.code,
            cause=answer.cause,
            jobs=jobs,
            seconds=seconds,
            free=is_known and not jobs,
        )


def _jobs_of(body: Mapping[str, Any]) -> list[str]:
    rows = body.get("jobs")
    rows = rows if isinstance(rows, list) else [body]
    ids = [row.get("job_id") for row in rows if isinstance(row, dict)]
    return [str(job_id) for job_id in ids if job_id]


def main(call: str, *words: str) -> int:
    """Run clusterctl with these words, write how the call ended, and print the answer."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # Whoever ends the server must not end a submission in its middle.
        signal.signal(number, signal.SIG_IGN)
    started_at = time.monotonic()
    answer = Program(words, Path.cwd(), os.environ).run(_note)
    with contextlib.suppress(ClusterctlError):
        # The server tries again, and tells the agent if the disk is full.
        write_end(Journal(), call, answer, seconds=time.monotonic() - started_at)
    # The server may be gone.
    with contextlib.suppress(OSError):
        print(json.dumps(answer.body), flush=True)
    return answer.rc


def _note(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # Not by the interpreter's end, which would report that stdout is closed.
    os._exit(code)
