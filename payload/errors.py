"""Errors that a user can correct: one line on stderr and an exit code, without a traceback.

    PayloadError        1   a check failed, such as a wrong sum or ranks with different weights
    ├── UsageError      2   the command line is wrong, or names something that does not exist
    └── LaunchError     3   the launcher started a different number of ranks than MPI sees

A run that a signal asked to stop has no error: it exits with ``STOPPED`` or ``ENDED``.

If a rank runs out of memory, it prints one line, and all ranks end with exit code 1 (see ``line_of``). The
same happens on a ``RankError``, which occurs on one rank only.

All other exceptions are bugs or a broken machine: they leave a traceback and abort the whole MPI job.
"""

from __future__ import annotations

STOPPED = 75
"""Exit code of a run that saved a checkpoint after a signal and can be restarted (EX_TEMPFAIL of
sysexits.h)."""


ENDED = 128 + 15
"""Exit code of a run without checkpoints after a signal: the same as for a process that SIGTERM ends."""


class PayloadError(Exception):
    """Error raised on every rank (see ``comm.base.on_all_ranks``), so that all end with the same exit code.

    ``code`` is a stable name of the condition, such as ``checkpoint-damaged``: see docs/errors.md.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class UsageError(PayloadError):
    """The command line is wrong, or names something that does not exist."""

    exit_code = 2


class LaunchError(PayloadError):
    """The launcher and MPI disagree about the number of ranks."""

    exit_code = 3


class RankError(Exception):
    """Error raised on a single rank, between two points of synchronization. Ends all ranks."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


_TOO_LARGE = ("Maximum allowed ", "array is too big", "Python int too large")
"""Starts of NumPy's ValueError or OverflowError messages for arrays too large for any memory."""


def line_of(error: BaseException) -> str | None:
    """Return the message for an error that occurred on one rank and ends all ranks. None: it is a bug."""
    if isinstance(error, RankError):
        return str(error)
    is_too_large = isinstance(error, ValueError | OverflowError) and str(error).startswith(_TOO_LARGE)
    return _out_of_memory(error) if is_too_large or isinstance(error, MemoryError) else None


def _out_of_memory(error: BaseException) -> str:
    """Return a message with hints. NumPy and CuPy include the size of the failed allocation."""
    failed_allocation = " ".join(str(error).split()).rstrip(".") or "an allocation failed"
    hint = "use smaller sizes, a smaller --micro-batch-size, --recompute, --zero or more ranks"
    return f"out of memory: {failed_allocation}; {hint}"
