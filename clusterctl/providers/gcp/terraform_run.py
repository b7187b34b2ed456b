"""Runs Terraform: it ends with us, gets one interrupt and the time to write its state, and never two at once.

It leads a session of its own, so that Ctrl-C on the terminal reaches it once, through us; a second one would
make it stop without its state. Where we are killed, its subreaper does the same (see ``util/process.py``): a
Terraform that went on unseen would make machines that no record names.

A lock on a remote state that outlived its Terraform is released only if that was one of ours, and is dead. A
local state needs none of this: the kernel drops its lock. A bucket's lock says who took it and when, but not
which process; so the start of a run of ours is recorded beside the state until the run ends. A record that
outlived its run is of a run that was killed, since no two of ours work on a folder at once. A run that gets
the lock forgets those that were killed before.
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
_SAID: Final = {
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
    """An address, such as ``module.nodes.google_compute_instance.node["demo-train-1"]``, and its parts."""

    address: str
    type: str
    key: str | int | None = None

    @classmethod
    def of(cls, raw: Event) -> Resource:
        return cls(raw["addr"], raw["resource_type"], raw.get("resource_key"))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """An error or a warning of Terraform, or of a provider; ``address`` is empty where it has none."""

    severity: str
    summary: str
    detail: str = ""
    address: str = ""

    @classmethod
    def of(cls, raw: Event) -> Diagnostic:
        """The ``diagnostic`` of an event, or one of ``validate -json``. Snippets of the module are left."""
        return cls(raw["severity"], raw["summary"], raw.get("detail") or "", raw.get("address") or "")

    @property
    def text(self) -> str:
        return f"{self.summary}: {self.detail}" if self.detail else self.summary


def parse_event(line: str) -> Event | None:
    """The event of a line; None where it is none, as what a crash leaves."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def errors_in(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The errors, each once, without those that only say that there were others."""
    failed = dict.fromkeys(d for d in found if d.severity == "error")
    return tuple(d for d in failed if d.summary not in _NOISE) or tuple(failed)


def printed_error(text: str, *, code: int) -> Diagnostic:
    """The error that was printed for people, as by ``init``; else the end of the text, as by a crash."""
    plain = _FRAME.sub("", _COLOR.sub("", text))
    before, found, error = plain.partition("Error: ")
    if not found:
        return Diagnostic("error", f"Terraform ended with exit code {code}", before.strip()[-2000:])
    summary, _, detail = error.partition("\n")
    return Diagnostic("error", summary.strip(), " ".join(_SOURCE.sub("", detail).split()))


def progress_of(event: Event) -> tuple[Resource, str] | None:
    """Return the resource that an event is about, and what a person reads of it; None if that is nothing."""
    hook, said = event.get("hook"), _SAID.get(str(event.get("type")))
    if said is None or not isinstance(hook, Mapping) or "action" not in hook:
        return None
    action = str(hook["action"])
    doing, done = _VERBS.get(action, (action, action))
    seconds = int(hook.get("elapsed_seconds") or 0)
    return Resource.of(hook["resource"]), said.format(doing=doing, done=done, seconds=seconds)


def first_of(names: Sequence[str], most: int) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


_SUMMARY: Final = "Error acquiring the state lock"
_FIELD: Final = re.compile(r"^\s*(ID|Who|Created):\s+(.*?)\s*$", re.MULTILINE)
_RECORD: Final = ".clusterctl.runs"
_SOON_S: Final = 120.0  # a run takes its lock within that time


def stale_lock(failed: Iterable[Diagnostic], folder: Path, *, before: float) -> tuple[str, datetime] | None:
    """Return the id and the time of the lock that was in the way, if a run of ours that was killed took it.

    before: when the failed run began (Unix seconds). Some backends name that run's own wish for a lock.
    """
    me, killed = f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}", _killed(folder)
    for diagnostic in failed:
        fields = dict(_FIELD.findall(diagnostic.detail))
        if diagnostic.summary == _SUMMARY and fields.get("Who") == me and {"ID", "Created"} <= fields.keys():
            day, clock = fields["Created"].split()[:2]
            created = datetime.fromisoformat(f"{day}T{clock[:15]}+00:00")  # Go's nanoseconds, UTC
            ours = any(began <= created.timestamp() <= began + _SOON_S for began in killed)
            if ours and created.timestamp() < before:
                return fields["ID"], created
    return None


def forget_runs(folder: Path) -> None:
    (folder / _RECORD).unlink(missing_ok=True)


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record the start of a run while it lasts. The caller holds the folder's lock."""
    path, killed = folder / _RECORD, _killed(folder)
    write_atomic(path, json.dumps([*killed, time.time()]))
    try:
        yield
    finally:
        if killed:
            write_atomic(path, json.dumps(killed))
        else:
            forget_runs(folder)


def _killed(folder: Path) -> list[float]:
    """When the runs began that were killed (Unix seconds)."""
    try:
        return [float(began) for began in json.loads((folder / _RECORD).read_bytes())]
    except (FileNotFoundError, ValueError, TypeError):
        return []


GRACE_S: Final = 60  # to end what is under way and write the state
_LOCK: Final = ".clusterctl.lock"
_LOCK_WAIT_S: Final = GRACE_S + 30.0
_PAUSE_S: Final = 0.2
_POLL_S: Final = 0.1
_STDERR_BYTES: Final = 20_000
# What would change what is planned, or where the state is, behind our back.
_NOT_INHERITED: Final = ("TF_CLI_ARGS", "TF_VAR_", "TF_WORKSPACE", "TF_DATA_DIR", "TF_INPUT", "TF_REATTACH_")


@contextmanager
def _sink() -> Iterator[tuple[int, IO[bytes]]]:
    """What a program can write to, and go on writing to when we are dead: a broken pipe would end it at once.

    In memory, where the kernel has that: what is shown of a plan is not for the disk. The reader has its own
    offset.
    """
    in_memory = hasattr(os, "memfd_create")
    with os.fdopen(os.memfd_create("terraform"), "wb") if in_memory else NamedTemporaryFile() as file:
        path = f"/proc/self/fd/{file.fileno()}" if in_memory else file.name
        with Path(path).open("rb") as reader:
            yield file.fileno(), reader


@dataclass(slots=True)
class Run:
    """A run of Terraform. After ``lines``, ``code`` is its exit code and ``stderr`` the end of its stderr."""

    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    code: int = -1
    stderr: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of stdout as they come."""
        begun, is_over = b"", False
        while not is_over:
            is_over = self.process.poll() is not None
            for part in iter(self.out.readline, b""):
                begun += part
                if begun.endswith(b"\n"):
                    yield begun.decode(errors="replace")
                    begun = b""
            if not is_over:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_POLL_S)
        if begun:
            yield begun.decode(errors="replace")
        self.code = self.process.wait()
        self.stderr = self.err.read()[-_STDERR_BYTES:].decode(errors="replace")


@dataclass(slots=True)
class Runner:
    """Runs Terraform in ``folder``, and tells ``reporter`` what it waits for."""

    folder: Path
    reporter: Reporter

    @contextmanager
    def run(self, argv: Sequence[str], env: Mapping[str, str] = MappingProxyType({})) -> Iterator[Run]:
        """Run it while the body reads its lines. If the body raises, interrupt Terraform and wait for it."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        with (
            self._alone() as lock,
            recorded(self.folder),
            _sink() as (stdout, out),
            _sink() as (stderr, err),
        ):
            process = subprocess.Popen(
                under_subreaper(argv, grace_s=GRACE_S),
                cwd=self.folder,
                env=inherited | {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "NO_COLOR": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(lock,),  # to the subreaper, which lives as long as Terraform does
                start_new_session=True,
                umask=0o077,
            )
            try:
                yield Run(process, out, err)
                process.wait()
            except BaseException as exc:
                self._wind_up(process, interrupts=int(isinstance(exc, KeyboardInterrupt)))
                raise

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Hold the folder against a second Terraform of ours; the descriptor of the lock."""
        fd = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            told = False
            for _ in Clock().polls(_LOCK_WAIT_S, longest_s=_PAUSE_S):
                with suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if not told:
                    self.reporter.progress(
                        "waiting for the Terraform of a clusterctl that was killed: it writes its state"
                    )
                    told = True
            else:
                raise LockedError(
                    "another Terraform is at work on this cluster",
                    where=str(self.folder),
                    why="it goes on after the clusterctl that started it was killed",
                    fix="wait until it has ended, then run the same command again",
                )
            yield fd
        finally:
            os.close(fd)

    def _wind_up(self, process: subprocess.Popen[bytes], *, interrupts: int) -> None:
        """Have it interrupted once, and wait until it has written its state; the second Ctrl-C kills it.

        ``interrupts`` is how many have come. All else may come again though nobody is impatient: a terminal
        that is closed sends SIGHUP twice, and a reader that went away stays away.
        """
        told = False
        while process.poll() is None:
            try:
                if not told:
                    process.terminate()
                    told = True
                with suppress(Exception):
                    what = "interrupted: waiting until Terraform has written its state"
                    self.reporter.progress(f"{what}, {GRACE_S} seconds at most")
                process.wait()
            except BaseException as exc:
                interrupts += isinstance(exc, KeyboardInterrupt)
                if interrupts > 1:
                    process.send_signal(signal.SIGHUP)
                    process.wait()
                    raise
