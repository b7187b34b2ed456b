"""Errors that a user can correct: one line on stderr and an exit code, without a traceback.

    PayloadError        1   a check failed, such as a wrong sum or ranks with different weights
    ├── UsageError      2   the command line is wrong, or names something that does not exist
    └── LaunchError     3   the launcher started a different number of ranks than MPI sees

A run that a signal ends exits with ``STOPPED`` if it saved a checkpoint, otherwise with ``ENDED``.
If a rank runs out of memory or raises ``RankError``, it prints a line, and all ranks end with exit
code 1. Any other
exception is a bug or a broken machine: it prints a traceback and aborts the whole MPI job.
"""

from __future__ import annotations

STOPPED = 75
"""Exit code after a signal if the run saved a checkpoint and can be resumed (EX_TEMPFAIL of
sysexits.h).
"""

ENDED = 128 + 15
"""Exit code after a signal if the run saves no checkpoints: that of a process that SIGTERM ends."""


class PayloadError(Exception):
    """An error that the user can correct. It is raised on every rank, so that all exit codes are
    the same.

    ``code`` is the cause as a word for programs, such as ``checkpoint-damaged``.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class UsageError(PayloadError):
    """The command line is wrong, or names something that does not exist."""

    exit_code = 2


class LaunchError(PayloadError):
    """The launcher (srun or mpirun) started a different number of ranks than MPI sees."""

    exit_code = 3


class RankError(Exception):
    """Error raised on a single rank while the other ranks continue. The error ends all ranks."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


_TOO_LARGE = ("Maximum allowed ", "array is too big", "Python int too large")
"""How NumPy's ValueError and OverflowError messages start if an array is too large for any memory.
"""


def line_of(error: BaseException) -> str | None:
    """Return a message for the user if the error is a ``RankError`` or a lack of memory, not a
    bug.
    """
    if isinstance(error, RankError):
        return str(error)
    is_too_large = isinstance(error, ValueError | OverflowError) and str(error).startswith(
        _TOO_LARGE
    )
    return _out_of_memory(error) if is_too_large or isinstance(error, MemoryError) else None


def _out_of_memory(error: BaseException) -> str:
    failed_allocation = " ".join(str(error).split()).rstrip(".") or "an allocation failed"
    hint = "use smaller sizes, a smaller --micro-batch-size, --recompute, --zero or more ranks"
    return f"out of memory: {failed_allocation}; {hint}"
