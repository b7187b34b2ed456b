"""Runs of Terraform: at most a single run per folder, stopped with a single interrupt when
clusterctl stops.

Terraform leads its own session, so that Ctrl-C on the terminal reaches it only through clusterctl.
A second interrupt would make Terraform stop without writing the state. If clusterctl is killed, the
subreaper (``util/process.py``) interrupts Terraform, which would otherwise create machines that no
record names.

A lock on a remote state is released only if a killed run of clusterctl's left it. (The kernel drops
the locks of local states.) A lock in a bucket names its user and time, but no process. Therefore
the start of a run is recorded beside the state until the run ends. A record that outlives its run
belongs to a killed run, since runs in a folder never overlap. A run that gets the lock deletes the
records of killed runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import IO, Any, Final

from clusterctl.errors import LockedError
from clusterctl.state.workspace import write_atomic
from clusterctl.util.process import under_subreaper
from clusterctl.util.progress import Clock, Reporter

Event = Mapping[str, Any]

_VERBS: Final = {
    "create": ("creating", "created"),
    "update": ("changing", "changed"),
    "delete": ("deleting", "deleted"),
    "read": ("reading", "read"),
}
_PROGRESS_TEXTS: Final = {
    "apply_start": "{doing}…",
    "apply_progress": "{doing}… {seconds} s",
    "apply_complete": "{done} after {seconds} s",
    "apply_errored": "failed after {seconds} s",
}
_NOISE: Final = frozenset({"execution halted"})
_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
_FRAME: Final = re.compile(r"^[╷│╵|] ?", re.MULTILINE)
_SOURCE: Final = re.compile(r"^\s*(with \S+,|on \S+ line \d+.*)$|^\s*\d+: .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource's address, such as ``module.nodes.google_compute_instance.node["n1"]``, and its
    parts.
    """

    address: str
    type: str
    key: str | int | None = None

    @classmethod
    def of(cls, raw: Event) -> Resource:
        return cls(raw["addr"], raw["resource_type"], raw.get("resource_key"))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or warning of Terraform. ``address``: address of the resource that it is about, or
    empty.
    """

    severity: str
    summary: str
    detail: str = ""
    address: str = ""

    @classmethod
    def of(cls, raw: Event) -> Diagnostic:
        """Read a diagnostic from Terraform's JSON output, without the excerpt of source code."""
        return cls(
            raw["severity"], raw["summary"], raw.get("detail") or "", raw.get("address") or ""
        )

    @property
    def text(self) -> str:
        return f"{self.summary}: {self.detail}" if self.detail else self.summary


def parse_event(line: str) -> Event | None:
    """Return the JSON object in a line of output. None: the line is something else, as after a
    crash.
    """
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def errors_in(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return the errors without duplicates, and without errors that only follow from other
    errors.
    """
    errors = dict.fromkeys(d for d in diagnostics if d.severity == "error")
    return tuple(d for d in errors if d.summary not in _NOISE) or tuple(errors)


def printed_error(text: str, *, code: int) -> Diagnostic:
    """Return the error in Terraform's text output, or, without "Error:" (after a crash), the
    output's end.
    """
    plain = _FRAME.sub("", _COLOR.sub("", text))
    before, separator, error = plain.partition("Error: ")
    if not separator:
        return Diagnostic("error", f"Terraform ended with exit code {code}", before.strip()[-2000:])
    summary, _, detail = error.partition("\n")
    return Diagnostic("error", summary.strip(), " ".join(_SOURCE.sub("", detail).split()))


def progress_text(event: Event) -> tuple[Resource, str] | None:
    """Return (resource, text about its progress). None: the event is not shown to users."""
    hook = event.get("hook")
    template = _PROGRESS_TEXTS.get(str(event.get("type")))
    if template is None or not isinstance(hook, Mapping) or "action" not in hook:
        return None
    action = str(hook["action"])
    doing, done = _VERBS.get(action, (action, action))
    seconds = int(hook.get("elapsed_seconds") or 0)
    return Resource.of(hook["resource"]), template.format(doing=doing, done=done, seconds=seconds)


_SUMMARY: Final = "Error acquiring the state lock"
_FIELD: Final = re.compile(r"^\s*(ID|Who|Created):\s+(.*?)\s*$", re.MULTILINE)
_RECORD: Final = ".clusterctl.runs"
# A run takes its lock within this time.
_LOCKED_WITHIN_S: Final = 120.0


def stale_lock(
    errors: Iterable[Diagnostic], folder: Path, *, before: float
) -> tuple[str, datetime] | None:
    """Return the id and time of the lock that blocked a run, if a killed run of clusterctl's left
    it.

    errors: errors of the blocked run. before: when that run began (Unix seconds). Newer locks are
    ignored: some backends report the lock that the blocked run itself tried to take.
    """
    user = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    killed = _killed_runs(folder)
    for diagnostic in errors:
        fields = dict(_FIELD.findall(diagnostic.detail))
        is_lock = diagnostic.summary == _SUMMARY and {"ID", "Created"} <= fields.keys()
        if is_lock and fields.get("Who") == user:
            # Go writes nanoseconds, in UTC.
            day, clock = fields["Created"].split()[:2]
            created = datetime.fromisoformat(f"{day}T{clock[:15]}+00:00")
            is_ours = any(
                began <= created.timestamp() <= began + _LOCKED_WITHIN_S for began in killed
            )
            if is_ours and created.timestamp() < before:
                return fields["ID"], created
    return None


def forget_runs(folder: Path) -> None:
    (folder / _RECORD).unlink(missing_ok=True)


@contextmanager
def record_run(folder: Path) -> Iterator[None]:
    """Keep a run's start time in ``folder`` while the body runs. The caller must hold the folder's
    lock.
    """
    path = folder / _RECORD
    killed = _killed_runs(folder)
    write_atomic(path, json.dumps([*killed, time.time()]))
    try:
        yield
    finally:
        if killed:
            write_atomic(path, json.dumps(killed))
        else:
            forget_runs(folder)


def _killed_runs(folder: Path) -> list[float]:
    try:
        return [float(began) for began in json.loads((folder / _RECORD).read_bytes())]
    except (FileNotFoundError, ValueError, TypeError):
        return []


# After an interrupt, Terraform finishes its requests and writes the state.
GRACE_S: Final = 60
_LOCK: Final = ".clusterctl.lock"
_LOCK_WAIT_S: Final = GRACE_S + 30.0
_PAUSE_S: Final = 0.2
_POLL_S: Final = 0.1
_STDERR_BYTES: Final = 20_000
# Variables that would change the plan or the place of the state.
_NOT_INHERITED: Final = (
    "TF_CLI_ARGS",
    "TF_VAR_",
    "TF_WORKSPACE",
    "TF_DATA_DIR",
    "TF_INPUT",
    "TF_REATTACH_",
)


@contextmanager
def _output_file() -> Iterator[tuple[int, IO[bytes]]]:
    """Yield a file descriptor for a program's output, and a file object that reads this output.

    Unlike a pipe, the file does not break if clusterctl is killed, so that the program can finish.
    It is in memory if the kernel supports that, because plans may contain secrets.
    """
    in_memory = hasattr(os, "memfd_create")
    with (
        os.fdopen(os.memfd_create("terraform"), "wb") if in_memory else NamedTemporaryFile() as file
    ):
        path = f"/proc/self/fd/{file.fileno()}" if in_memory else file.name
        with Path(path).open("rb") as reader:
            yield file.fileno(), reader


@dataclass(slots=True)
class Run:
    """A run of Terraform. ``code`` and the last part of ``stderr`` are set once ``lines`` is
    exhausted.
    """

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    code: int = -1
    stderr: str = ""

    def lines(self) -> Iterator[str]:
        partial_line = b""
        has_ended = False
        while not has_ended:
            has_ended = self.process.poll() is not None
            for part in iter(self.out.readline, b""):
                partial_line += part
                if partial_line.endswith(b"\n"):
                    yield partial_line.decode(errors="replace")
                    partial_line = b""
            if not has_ended:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_POLL_S)
        if partial_line:
            yield partial_line.decode(errors="replace")
        self.code = self.process.wait()
        self.stderr = self.err.read()[-_STDERR_BYTES:].decode(errors="replace")


@dataclass(slots=True)
class Runner:
    folder: Path
    reporter: Reporter

    @contextmanager
    def run(
        self, argv: Sequence[str], env: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[Run]:
        """Run Terraform while the body reads the output. If the body raises, interrupt Terraform
        and wait.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)
        }
        with (
            self._hold_folder() as lock,
            record_run(self.folder),
            _output_file() as (stdout, out),
            _output_file() as (stderr, err),
        ):
            process = subprocess.Popen(
                under_subreaper(argv, grace_s=GRACE_S),
                cwd=self.folder,
                env=inherited
                | {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "NO_COLOR": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # The subreaper holds the lock as long as Terraform runs.
                pass_fds=(lock,),
                start_new_session=True,
                umask=0o077,
            )
            try:
                yield Run(process, out, err)
                process.wait()
            except BaseException as exc:
                self._interrupt(process, interrupts=int(isinstance(exc, KeyboardInterrupt)))
                raise

    @contextmanager
    def _hold_folder(self) -> Iterator[int]:
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_reported = False
            for _ in Clock().polls(_LOCK_WAIT_S, longest_s=_PAUSE_S):
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if not is_reported:
                    self.reporter.progress(
                        "waiting for the Terraform of a killed clusterctl, which is writing its "
                        "state"
                    )
                    is_reported = True
            else:
                raise LockedError(
                    "another Terraform process is changing this cluster",
                    where=str(self.folder),
                    why="it still runs, although the clusterctl that started it was killed",
                    fix="wait until it has ended, then run the same command again",
                )
            yield fd
        finally:
            os.close(fd)

    def _interrupt(self, process: subprocess.Popen[bytes], *, interrupts: int) -> None:
        """Interrupt Terraform once and wait until it has written its state. A second Ctrl-C kills
        it.

        interrupts: how often the user has pressed Ctrl-C so far. Other exceptions don't count,
            since they may
        repeat by themselves: a closed terminal sends SIGHUP twice, and a broken pipe stays broken.
        """
        is_interrupted = False
        while process.poll() is None:
            try:
                if not is_interrupted:
                    process.terminate()
                    is_interrupted = True
                with suppress(Exception):
                    message = "interrupted: waiting until Terraform has written its state"
                    self.reporter.progress(f"{message}, {GRACE_S} seconds at most")
                process.wait()
            except BaseException as exc:
                interrupts += isinstance(exc, KeyboardInterrupt)
                if interrupts > 1:
                    process.send_signal(signal.SIGHUP)
                    process.wait()
                    raise
