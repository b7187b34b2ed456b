"""One runner for programs; and programs and temporary folders that do not outlive us, even if we are killed.

Such a folder is removed by the next clusterctl. It is locked while it is in use, so a folder with our
prefix that is not locked belongs to a killed process. Also calls in parallel threads: Ctrl-C does not wait
for those that hang.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from clusterctl.errors import ClusterctlError, UnreachableError
from clusterctl.util.progress import NO_LIMIT, Limit

PREFIX = ".clusterctl-run-"
_SUBREAPER = Path(__file__).with_name("subreaper.py")
_MEMORY = Path("/dev/shm")  # noqa: S108 - likewise
SHORT = Path("/tmp")  # noqa: S108 - for what needs a short path, in private folders

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS: Final = 32
# A signal that arrives just before a thread blocks does not wake that thread: waits end, or Ctrl-C is lost.
_INTERRUPTIBLE_S: Final = 0.2


def under_subreaper(argv: Sequence[str], *, grace_s: int = 0) -> list[str]:
    """The command run by our subreaper: it and its descendants end with us. Linux only; else unchanged.

    With ``grace_s`` it is interrupted first, and killed only if it goes on that long after. SIGTERM to the
    process does the same; SIGHUP after it kills at once.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", str(_SUBREAPER), str(os.getpid()), str(grace_s), *argv]


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended, here or on a host: its exit status, and what it said."""

    rc: int
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """The end of what a program said that failed."""
        return (self.stderr.strip() or self.stdout.strip())[-1500:] or f"exit {self.rc}"


def run(
    argv: Sequence[str],
    *,
    stdin: str | bytes = "",
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run a program that ends with us, and wait for it. ``env`` takes the place of our environment.

    Raises:
        OSError: there is no such program.
        TimeoutExpired: it took too long, and was ended with all its descendants.
    """
    given = stdin.encode() if isinstance(stdin, str) else stdin
    with _started(argv, env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd) as process:
        try:
            stdout, stderr = process.communicate(given, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        # ssh ends the lines of its own messages with both.
        said = (one.decode(errors="replace").replace("\r\n", "\n") for one in (stdout, stderr))
        return Result(process.returncode, *said)


def run_heard(
    argv: Sequence[str],
    heard: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """The same, where ``heard`` gets each line of stdout and stderr as it comes; both are then the stdout."""
    said = []
    with _started(argv, env, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=cwd) as process:
        try:
            for raw in process.stdout or ():
                said.append(line := raw.decode(errors="replace"))
                heard(line.rstrip("\r\n"))
        except BaseException:
            process.kill()
            raise
    return Result(process.returncode, "".join(said), "")


def run_streamed(
    argv: Sequence[str], heard: Callable[[bytes], None], *, env: Mapping[str, str] | None = None
) -> Result:
    """The same, where ``heard`` gets stdout in pieces, as they come; only stderr is kept."""
    with (
        tempfile.TemporaryFile() as errors,
        _started(argv, env, stdin=subprocess.DEVNULL, stderr=errors.fileno()) as process,
    ):
        try:
            while process.stdout and (data := process.stdout.read1()):  # type: ignore[attr-defined]
                heard(data)
        except BaseException:
            process.kill()
            raise
        process.wait()
        errors.seek(0)
        return Result(process.returncode, "", errors.read().decode(errors="replace"))


def _started(
    argv: Sequence[str], env: Mapping[str, str] | None, *, stdin: int, stderr: int, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    if shutil.which(argv[0]) is None:  # the subreaper could only say it in words
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    return subprocess.Popen(
        under_subreaper(argv), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=env, cwd=cwd
    )


@contextmanager
def temporary_folder(place: str | Path | None = None, *, prefix: str = PREFIX) -> Iterator[Path]:
    """A private folder below ``place`` (default: where temporary files go) while the body runs."""
    parent = Path(place) if place else _temporary_place()
    sweep(parent, prefix=prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):  # a sweep came in between
            if (held := _locked(folder)) is not None:
                if folder.exists():
                    break
                os.close(held)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def sweep(place: str | Path | None = None, *, prefix: str = PREFIX) -> None:
    """Remove the folders of killed processes below ``place`` (default: wherever temporary files go)."""
    places = {Path(place)} if place else {_temporary_place(), SHORT, _MEMORY}
    for folder in [found for one in places for found in one.glob(f"{prefix}*")]:
        with suppress(OSError):  # another user's, or gone meanwhile
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if (held := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def roomiest() -> Path:
    """The place with the most free space for temporary files: on disk, or in memory."""
    places = [_temporary_place(), *([_MEMORY] if os.access(_MEMORY, os.W_OK) else [])]
    return max(places, key=lambda place: shutil.disk_usage(place).free)


def _temporary_place() -> Path:
    """Where temporary files go; in memory where no disk takes one, so that `down` can free some."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # tempfile has tried to write in all places that it knows
        if not _MEMORY.is_dir():
            raise
        tempfile.tempdir = str(_MEMORY)
        return _MEMORY


def _locked(folder: Path) -> int | None:
    """The locked folder's descriptor; None if another holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def on_each(
    hosts: Iterable[str], ask: Callable[[str], R], *, most: int = _MAX_THREADS, limit: Limit = NO_LIMIT
) -> tuple[dict[str, R], dict[str, ClusterctlError]]:
    """What every host answered, and how some failed: at most ``most`` at once, and none stops the others.

    Under a ``limit``, ``ask`` only looks: a call that does not return in time is left alone.
    """

    def answer(host: str) -> R | ClusterctlError:
        try:
            if limit.rest_s <= 0:
                raise TimeoutError
            return ask(host) if limit is NO_LIMIT else started(partial(ask, host))(limit)
        except TimeoutError:
            why, fix = "it gave no answer in the time that there was for all hosts", "look at the host's load"
            return UnreachableError(f"{host} does not answer", why=why, fix=fix, host=host)
        except ClusterctlError as exc:
            return exc

    names = list(hosts)
    answers = dict(zip(names, parallel_map(names, answer, most=most), strict=True))
    failed = {host: one for host, one in answers.items() if isinstance(one, ClusterctlError)}
    return {host: one for host, one in answers.items() if not isinstance(one, ClusterctlError)}, failed


def parallel_map(items: Sequence[T], function: Callable[[T], R], *, most: int = _MAX_THREADS) -> list[R]:
    """The results of the calls in their order; at most ``most`` run at once.

    The first exception is raised, no further call starts, and those that run are waited for: none may go on
    outside a lock that the caller holds. An interrupt waits for none, nor does the interpreter's exit.
    """
    results: list[R | None] = [None] * len(items)
    failed: list[BaseException] = []
    pending = iter(range(len(items)))

    def work() -> None:
        for number in pending:
            if failed:
                return
            try:
                results[number] = function(items[number])
            except BaseException as exc:  # raised again in the caller
                failed.append(exc)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(items)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_INTERRUPTIBLE_S)
    except BaseException as exc:
        exc.__context__ = failed[0] if failed else None
        failed.append(exc)
        raise
    if failed:
        raise failed[0]
    return results  # type: ignore[return-value]  # complete here


def started(call: Callable[[], R]) -> Callable[..., R]:
    """Begin a call in a thread. The function that is returned waits for its result or raises its exception.

    It takes a ``Limit``, and raises TimeoutError once that is over. Nothing waits for a call whose result is
    not asked for, nor does the interpreter's exit.
    """
    done: queue.SimpleQueue[tuple[R | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as exc:  # raised again in the caller
            done.put((None, exc))

    def result(limit: Limit | None = None) -> R:
        while limit is None or limit.rest_s > 0:
            with suppress(queue.Empty):
                found, failed = done.get(timeout=_INTERRUPTIBLE_S)
                if failed is not None:
                    raise failed
                return found  # type: ignore[return-value]  # it is complete
        raise TimeoutError("there is no time left")

    threading.Thread(target=work, daemon=True).start()
    return result
