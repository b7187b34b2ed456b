"""Running of programs, private temporary folders, and calls in parallel threads.

Programs end with clusterctl, even if clusterctl is killed. A temporary folder is locked while it is
in use; an unlocked folder was left by a killed process, and the next clusterctl removes it. Ctrl-C
does not wait for threads that hang.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, TypeVar, cast

from clusterctl.errors import ClusterctlError, UnreachableError
from clusterctl.util.progress import NO_LIMIT, Deadline

PREFIX = ".clusterctl-run-"
_SUBREAPER = Path(__file__).with_name("subreaper.py")
_MEMORY = Path("/dev/shm")  # noqa: S108 - in private folders
# For private folders that need a short path.
SHORT = Path("/tmp")  # noqa: S108 - in private folders

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS: Final = 32
# A signal just before a thread blocks does not wake it, so waits must be short, or Ctrl-C would be
# lost.
_INTERRUPTIBLE_S: Final = 0.2
_PIECE: Final = 1 << 16


def under_subreaper(argv: Sequence[str], *, grace_s: int = 0) -> list[str]:
    """Return a command that runs ``argv``. All its processes end when this process ends, where the
    kernel lists the children of a process (Linux).

    grace_s: seconds between SIGINT and SIGKILL; 0: only SIGKILL. SIGTERM to the command has the
        same effect as the end of this process; SIGHUP during the grace time kills at once.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return list(argv)
    return [sys.executable, "-I", "-S", str(_SUBREAPER), str(os.getpid()), str(grace_s), *argv]


@dataclass(frozen=True, slots=True)
class Result:
    """Exit status and output of a program that ran on this machine or on a host."""

    rc: int
    stdout: str
    stderr: str

    @property
    def reason(self) -> str:
        """The reason of a failure: the end of stderr; if stderr is empty, of stdout; else the exit
        status.
        """
        return (self.stderr.strip() or self.stdout.strip())[-1500:] or f"exit {self.rc}"


def run(
    argv: Sequence[str],
    *,
    stdin: str | bytes = "",
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run a program that ends with this process, and wait for it. ``env`` replaces the environment.

    Raises:
        OSError: the program does not exist.
        TimeoutExpired: the program took longer than ``timeout_s``, and was ended with its
            descendants.
    """
    stdin_bytes = stdin.encode() if isinstance(stdin, str) else stdin
    with _started(argv, env, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd) as process:
        try:
            stdout, stderr = process.communicate(stdin_bytes, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        # ssh ends the lines of its own messages with \r\n.
        outputs = (
            output.decode(errors="replace").replace("\r\n", "\n") for output in (stdout, stderr)
        )
        return Result(process.returncode, *outputs)


def run_with_lines(
    argv: Sequence[str],
    heard: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """Run a program with its stderr joined to its stdout, and call ``heard`` with each line of
    output.
    """
    lines = []
    with running(argv, env=env, cwd=cwd) as (process, output):
        for raw in output:
            lines.append(line := raw.decode(errors="replace"))
            heard(line.rstrip("\r\n"))
    return Result(process.returncode, "".join(lines), "")


def stdout_pieces(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None
) -> Generator[bytes, None, Result]:
    """Run a program, and yield each piece of its stdout. Return its result without this output."""
    with (
        tempfile.TemporaryFile() as errors,
        running(argv, env=env, stderr=errors.fileno()) as (process, output),
    ):
        while data := os.read(output.fileno(), _PIECE):
            yield data
        process.wait()
        errors.seek(0)
        return Result(process.returncode, "", errors.read().decode(errors="replace"))


def run_for_bytes(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None
) -> tuple[bytes, Result]:
    """Run a program, and return its stdout and its result without this output. OSError: the program
    does not exist.
    """
    pieces = stdout_pieces(argv, env=env)
    output = bytearray()
    while True:
        try:
            output += next(pieces)
        except StopIteration as end:
            return bytes(output), end.value


@contextmanager
def running(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None = None,
    stdin: bytes = b"",
    stderr: int = subprocess.STDOUT,
    has_terminal: bool = True,
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run a program. Yield (process, its stdout). Default: it has its stderr, too.

    stdin: is sent to the program by a pipe. has_terminal: whether the program gets Ctrl-C itself,
    and can ask on the terminal. An exception in the ``with`` body ends the program.
    """
    source = subprocess.PIPE if stdin else subprocess.DEVNULL
    with _started(
        argv, env, stdin=source, stderr=stderr, cwd=cwd, has_terminal=has_terminal
    ) as process:
        try:
            if process.stdin:
                # The program may end before it has read all.
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(stdin)
            yield process, cast(IO[bytes], process.stdout)
        except BaseException:
            process.terminate()
            raise


def lines_in_time(output: IO[bytes], *, every_s: float) -> Iterator[bytes | None]:
    """Yield each line of a running program's output, and None after each ``every_s`` seconds
    without output.
    """
    rest = b""
    poll = select.poll()
    poll.register(output.fileno())
    while True:
        if not poll.poll(every_s * 1000):
            yield None
        elif data := os.read(output.fileno(), _PIECE):
            *lines, rest = (rest + data).split(b"\n")
            yield from lines
        else:
            break
    if rest:
        yield rest


def _started(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    *,
    stdin: int,
    stderr: int,
    cwd: Path | None = None,
    has_terminal: bool = True,
) -> subprocess.Popen[bytes]:
    # The subreaper could report a missing program only in words.
    if shutil.which(argv[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    return subprocess.Popen(
        under_subreaper(argv),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        cwd=cwd,
        start_new_session=not has_terminal,
    )


@contextmanager
def temporary_folder(place: str | Path | None = None, *, prefix: str = PREFIX) -> Iterator[Path]:
    """Create a private folder in ``place`` for the ``with`` body. Default: the folder for temporary
    files.
    """
    parent = Path(place) if place else _temporary_place()
    remove_stale_folders(parent, prefix=prefix)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another clusterctl may have removed the new folder before it was locked.
        with suppress(FileNotFoundError):
            if (lock_fd := _locked(folder)) is not None:
                if folder.exists():
                    break
                os.close(lock_fd)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock_fd)


def temporary_beginnings() -> list[str]:
    """Return the beginnings of the paths of all folders of ``temporary_folder`` without a place."""
    return [os.path.join(os.path.realpath(place), PREFIX) for place in _temporary_places()]


def remove_stale_folders(place: str | Path | None = None, *, prefix: str = PREFIX) -> None:
    """Remove folders that killed processes left in ``place`` (default: all places for temporary
    files).
    """
    places = {Path(place)} if place else _temporary_places()
    for folder in [folder_path for parent in places for folder_path in parent.glob(f"{prefix}*")]:
        # The folder may belong to another user, or be removed already.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if (lock_fd := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock_fd)


def roomiest_temporary_folder() -> Path:
    """Return the folder for temporary files, on disk or in memory, that has the most free space."""
    places = [_temporary_place(), *([_MEMORY] if os.access(_MEMORY, os.W_OK) else [])]
    return max(places, key=lambda place: shutil.disk_usage(place).free)


def _temporary_places() -> set[Path]:
    return {_temporary_place(), SHORT, _MEMORY}


def _temporary_place() -> Path:
    """Return the folder for temporary files: in memory if no disk is writable, so that `down`
    works.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no writable folder
        if not _MEMORY.is_dir():
            raise
        tempfile.tempdir = str(_MEMORY)
        return _MEMORY


def _locked(folder: Path) -> int | None:
    """Lock a folder and return its descriptor. None if another process holds the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def call_on_hosts(
    hosts: Iterable[str],
    ask: Callable[[str], R],
    *,
    most: int = _MAX_THREADS,
    limit: Deadline = NO_LIMIT,
) -> tuple[dict[str, R], dict[str, ClusterctlError]]:
    """Call ``ask`` with each host in parallel. Return two mappings: host -> answer, and host ->
    error.

    limit: calls that take longer are abandoned, and their hosts get an UnreachableError. With a
        limit, ``ask`` must not change anything.
    """

    def answer(host: str) -> R | ClusterctlError:
        try:
            if limit.rest_s <= 0:
                raise TimeoutError
            return ask(host) if limit is NO_LIMIT else start_in_thread(partial(ask, host))(limit)
        except TimeoutError:
            reason = "the time limit for all hosts has passed"
            fix = f"check the load of {host}"
            return UnreachableError(f"{host} does not answer", why=reason, fix=fix, host=host)
        except ClusterctlError as exc:
            return exc

    names = list(hosts)
    answers = dict(zip(names, parallel_map(names, answer, most=most), strict=True))
    errors = {host: value for host, value in answers.items() if isinstance(value, ClusterctlError)}
    return {
        host: value for host, value in answers.items() if not isinstance(value, ClusterctlError)
    }, errors


def parallel_map(
    items: Sequence[T], function: Callable[[T], R], *, most: int = _MAX_THREADS
) -> list[R]:
    """Call a function for each item in parallel. Return the results in the order of the items.

    After an exception, no further call starts. The exception is raised when the running calls have
    ended, because these calls may need a lock that the caller holds. An interrupt does not wait for
    running calls.
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
            except BaseException as exc:  # re-raised in caller
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
    return results  # type: ignore[return-value]


def start_in_thread(call: Callable[[], R]) -> Callable[..., R]:
    """Start a call in a thread. Return a function that waits for the call's result or raises its
    exception.

    The returned function takes a ``Deadline``, and raises TimeoutError once the limit has passed. The
    process may exit before the call has returned.
    """
    results: queue.SimpleQueue[tuple[R | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as exc:  # re-raised in caller
            results.put((None, exc))

    def result(limit: Deadline | None = None) -> R:
        while limit is None or limit.rest_s > 0:
            with suppress(queue.Empty):
                value, error = results.get(timeout=_INTERRUPTIBLE_S)
                if error is not None:
                    raise error
                return value  # type: ignore[return-value]
        raise TimeoutError("the time limit has passed")

    threading.Thread(target=work, daemon=True).start()
    return result
