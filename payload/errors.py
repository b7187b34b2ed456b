"""Errors that a user can correct: one line on stderr and an exit code, without a traceback.

    PayloadError        1   a check failed: a wrong sum, ranks whose weights differ
    ├── UsageError      2   the command line is wrong, or asks for what is not there
    └── LaunchError     3   the launcher started other ranks than MPI sees

A run that was asked to stop by a signal has no error: it ends with ``STOPPED`` or ``ENDED``.

Memory that runs out on any rank ends them all: one line there, and 1 (see ``line_of``). So does a
``RankError``, of which the other ranks know nothing.

All other exceptions are bugs or a broken machine: they leave a traceback and abort the whole MPI job.
"""

from __future__ import annotations

STOPPED = 75
"""Exit code of a run that saved a checkpoint because a signal asked it to stop, and can be started again from
it: EX_TEMPFAIL of sysexits.h."""


ENDED = 128 + 15
"""Exit code of a run without checkpoints that a signal asked to stop: as of a process that SIGTERM ends."""


class PayloadError(Exception):
    """Raised on every rank alike (see ``comm.base.on_all_ranks``): all end with the same exit code.

    ``code`` is stable and names the condition, such as ``checkpoint-damaged``: see docs/errors.md.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class UsageError(PayloadError):
    """The command line is wrong, or asks for what is not there."""

    exit_code = 2


class LaunchError(PayloadError):
    """The launcher and MPI disagree about the number of ranks."""

    exit_code = 3


class RankError(Exception):
    """Raised on one rank alone, between two that it shares with others: ends all of them."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


_BEYOND = ("Maximum allowed ", "array is too big", "Python int too large")
"""So NumPy begins its ValueError or OverflowError about what no memory could have addresses for."""


def line_of(error: BaseException) -> str | None:
    """What to tell a user of an error of one rank that ends them all; None: it is a bug."""
    if isinstance(error, RankError):
        return str(error)
    beyond = isinstance(error, ValueError | OverflowError) and str(error).startswith(_BEYOND)
    return _out_of_memory(error) if beyond or isinstance(error, MemoryError) else None


def _out_of_memory(error: BaseException) -> str:
    """What a user can do about it; NumPy and CuPy say how much was wanted."""
    wanted = " ".join(str(error).split()).rstrip(".") or "an allocation failed"
    less = "smaller sizes or a smaller --micro-batch-size, --recompute, --zero or more ranks need less"
    return f"out of memory: {wanted}; {less}"
