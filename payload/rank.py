"""Runs a Python program as one of several ranks, so that its failure ends the others too. Python 3.6.

    python rank.py PROGRAM ARGUMENT...

When the interpreter exits, mpi4py calls MPI_Finalize, which returns once all ranks have called it: a rank
that failed waits for the others, and they for it. As with `python -m mpi4py`, it calls MPI_Abort instead.
"""

import atexit
import os
import sys
import time
from importlib.machinery import SourceFileLoader
from signal import SIGINT
from types import ModuleType

GRACE_S = 5  # all ranks may call sys.exit, or be interrupted, some later than others
SAVED = 75  # EX_TEMPFAIL: other ranks may still save their work, however long that takes


class Rank:
    """``status`` is what the program exits with."""

    status = 0

    def run(self, path: str) -> None:
        """Run the program as `python PROGRAM` would."""
        if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):  # not under -P
            sys.path[0] = os.path.dirname(os.path.realpath(path))
        main = ModuleType("__main__")
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=__builtins__)
        sys.modules["__main__"] = main
        atexit.register(self.leave)  # the first one registered is called last
        try:
            with open(path, "rb") as file:
                program = compile(file.read(), path, "exec", dont_inherit=True)
            exec(program, main.__dict__)  # noqa: S102
        except (SystemExit, KeyboardInterrupt) as exc:
            code = getattr(exc, "code", 128 + SIGINT)
            self.status = code if isinstance(code, int) else int(code is not None)
            raise
        except BaseException as exc:
            trace = exc.__traceback__.tb_next if exc.__traceback__ else None  # without the line above
            sys.excepthook(type(exc), exc.with_traceback(trace), trace)
            self.status = 1
        if self.status:
            atexit.unregister(self.leave)
            self.abort()
            sys.exit(self.status)

    def leave(self) -> None:
        """Abort unless all ranks leave with an error of their own."""
        mpi = sys.modules.get("mpi4py.MPI")
        if self.status in (0, SAVED) or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return
        all_leave = mpi.COMM_WORLD.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not all_leave.Test():
            if time.monotonic() > deadline:
                self.abort()
                return
            time.sleep(0.02)

    def abort(self) -> None:
        """Have mpi4py call MPI_Abort where it would call MPI_Finalize: when all files are flushed."""
        if "mpi4py.MPI" in sys.modules:
            from mpi4py.run import set_abort_status

            set_abort_status(self.status)


if __name__ == "__main__":
    del sys.argv[0]
    Rank().run(sys.argv[0])
