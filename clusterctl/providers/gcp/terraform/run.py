"""Runs Terraform: it ends with us, gets one interrupt and the time to write its state, and never two at once.

It leads a session of its own, so that Ctrl-C on the terminal reaches it once, through us; a second one would
make it stop without its state. Where we are killed, its subreaper does the same (see ``util/lifetime.py``): a
Terraform that went on unseen would make machines that nobody knows of.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from clusterctl.errors import LockedError
from clusterctl.providers.gcp.terraform.locks import noted
from clusterctl.util.lifetime import under_subreaper
from clusterctl.util.progress import LineReporter

GRACE_S: Final = 60  # to end what is under way and write the state
_LOCK: Final = ".clusterctl.lock"
_LOCK_WAIT_S: Final = GRACE_S + 30.0
_PAUSE_S: Final = 0.2
_POLL_S: Final = 0.1
_BLOCK_BYTES: Final = 1 << 16
_STDERR_BYTES: Final = 20_000
# What would change what is planned, or where the state is, behind our back.
_NOT_INHERITED: Final = ("TF_CLI_ARGS", "TF_VAR_", "TF_WORKSPACE", "TF_DATA_DIR", "TF_INPUT", "TF_REATTACH_")


@dataclass(frozen=True, slots=True)
class Ended:
    """How Terraform ended: ``stderr`` is the end of what it wrote there."""

    code: int
    stderr: str


def run(
    argv: Sequence[str],
    folder: Path,
    *,
    heard: Callable[[str], None],
    report: LineReporter,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run it in ``folder`` to its end. ``heard`` gets the lines of its stdout, in this thread.

    Raises:
        LockedError: a Terraform that outlived its clusterctl is still at work there.
        OSError: it can't be started.
    """
    with _alone(folder, report) as lock, noted(folder), _sink() as stdout, _sink() as stderr:
        process = subprocess.Popen(
            under_subreaper(argv, grace_s=GRACE_S),
            cwd=folder,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(lock,),  # to the reaper, which lives as long as Terraform does
            start_new_session=True,
            umask=0o077,
        )
        lines = _Lines(stdout)
        try:
            while process.poll() is None:
                for line in lines.new():
                    heard(line)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        except BaseException as exc:
            _wind_up(process, report, interrupts=int(isinstance(exc, KeyboardInterrupt)))
            raise
        for line in lines.rest():
            heard(line)
        size = os.fstat(stderr).st_size
        tail = os.pread(stderr, _STDERR_BYTES, max(0, size - _STDERR_BYTES))
        return Ended(process.returncode, tail.decode(errors="replace"))


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The caller's variables without what would steer Terraform, and ours."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return {**inherited, "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "NO_COLOR": "1", **ours}


@contextmanager
def _alone(folder: Path, report: LineReporter) -> Iterator[int]:
    """Hold the folder against a second Terraform of ours; the descriptor of the lock."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        told = False
        while not _locked(fd):
            if time.monotonic() > deadline:
                raise LockedError(
                    "another Terraform is at work on this cluster",
                    where=str(folder),
                    why="it goes on after the clusterctl that started it was killed",
                    fix="wait until it has ended, then run the same command again",
                )
            if not told:
                report("waiting for the Terraform of a clusterctl that was killed: it writes its state")
                told = True
            time.sleep(_PAUSE_S)
        yield fd
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _sink() -> Iterator[int]:
    """What a program can write to, and go on writing to when we are dead: a broken pipe would end it at once.

    In memory, where the kernel has that: what is shown of a plan is not for the disk.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("terraform", os.MFD_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()


class _Lines:
    """The lines of a sink, as they come. Its offset is the writer's, and is left alone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read = 0
        self._begun = b""

    def new(self) -> Iterator[str]:
        """The whole lines since the last call."""
        while block := os.pread(self._fd, _BLOCK_BYTES, self._read):
            self._read += len(block)
            *whole, self._begun = (self._begun + block).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace") + "\n"

    def rest(self) -> Iterator[str]:
        """Those up to the end, whole or not."""
        yield from self.new()
        if self._begun:
            yield self._begun.decode(errors="replace")


def _wind_up(process: subprocess.Popen[bytes], report: LineReporter, *, interrupts: int) -> None:
    """Have it interrupted once, and wait until it has written its state; the second Ctrl-C kills it.

    ``interrupts`` is how many have come. All else may come again though nobody is impatient: a terminal that
    is closed sends SIGHUP twice, and a reader that went away stays away.
    """
    told = False
    while process.poll() is None:
        try:
            if not told:
                process.terminate()
                told = True
            with suppress(Exception):
                report(
                    f"interrupted: waiting until Terraform has written its state, {GRACE_S} seconds at most"
                )
            process.wait()
        except BaseException as exc:
            interrupts += isinstance(exc, KeyboardInterrupt)
            if interrupts > 1:
                process.send_signal(signal.SIGHUP)
                process.wait()
                raise
