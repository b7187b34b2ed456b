"""Runs a Python program as an MPI rank whose failure ends the whole job. Supports Python 3.6.

    python rank.py PROGRAM ARGUMENT...
    python rank.py -m MODULE ARGUMENT...

When the interpreter exits, mpi4py calls MPI_Finalize, which waits for all ranks. So a failed rank
and the other ranks would wait for each other. Like `python -m mpi4py`, this program calls MPI_Abort
instead.
"""

import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

# How long a failed rank waits for the other ranks, which may call sys.exit a little later.
GRACE_S = 5
# Printed as by Open MPI 4. Open MPI 5 leaves this message to PMIx, and Slurm's PMIx plugin drops
# it.
_LINE = b"-" * 74 + b"\n"
ABORTED = b"MPI_ABORT was invoked on rank %d in communicator MPI_COMM_WORLD\nwith errorcode %d.\n"
# EX_TEMPFAIL: other ranks may still be saving their work.
SAVED = 75
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_SET_PTRACER = 0x59616D61
_ANY_PROCESS = -1


def allow_ptrace() -> None:
    """Let py-spy, which is no ancestor of this process, read its stacks."""
    # With kernel.yama.ptrace_scope=1, only ancestors may, unless a process allows more.
    if os.path.exists(YAMA):
        # This import is slow, and not every Python has the module.
        with suppress(ImportError):
            import ctypes

            ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_long(_ANY_PROCESS), 0, 0, 0)


def describe_module(main: ModuleType, name: str) -> str:
    """Set the variables of ``main`` that `python -m NAME` sets. Return the path of the module's
    file.
    """
    # This import is slow, and few programs need it.
    from importlib.util import find_spec

    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    main.__dict__.update(__file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader)
    main.__dict__.update(__spec__=spec, __package__=spec.parent)
    return spec.origin


class Rank:
    """A rank of an MPI program. ``status``: the program's exit status."""

    status = 0

    def run(self, path: str, is_module: bool) -> None:
        """Run the Python program ``path`` as `python PROGRAM` would, or a module as `python -m`
        would.
        """
        # With -P, sys.path does not start with the script's folder.
        if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
            sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(path))
        main = ModuleType("__main__")
        if is_module:
            sys.argv[0] = path = describe_module(main, path)
        else:
            loader = SourceFileLoader("__main__", path)
            main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        failure = None
        # atexit calls functions in reverse order, so this function is called last.
        atexit.register(self.leave)
        try:
            with open(path, "rb") as file:
                program = compile(file.read(), path, "exec", dont_inherit=True)
            exec(program, main.__dict__)  # noqa: S102
        except (SystemExit, KeyboardInterrupt) as exc:
            code = getattr(exc, "code", 128 + signal.SIGINT)
            self.status = code if isinstance(code, int) else int(code is not None)
            raise
        except BaseException as exc:
            failure = exc.with_traceback(_below(exc))
        if failure is not None:
            self.fail(failure)

    def fail(self, exc: BaseException) -> None:
        """Print an exception as Python does. Exit with 1, or the status that sys.excepthook exits
        with.
        """
        self.status = 1
        try:
            sys.excepthook(type(exc), exc, exc.__traceback__)
        except SystemExit as leaving:
            self.status = (
                leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            )
        except BaseException as broken:
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(
                type(broken), broken.with_traceback(_below(broken)), broken.__traceback__
            )
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(type(exc), exc, exc.__traceback__)
        finally:
            atexit.unregister(self.leave)
            self.abort()
        sys.exit(self.status)

    def leave(self) -> None:
        """At the exit after a failure, abort the MPI job unless all ranks exit within ``GRACE_S``
        seconds.
        """
        mpi = sys.modules.get("mpi4py.MPI")
        if (
            self.status in (0, SAVED)
            or mpi is None
            or not mpi.Is_initialized()
            or mpi.Is_finalized()
        ):
            return
        all_leave = mpi.COMM_WORLD.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not all_leave.Test():
            if time.monotonic() > deadline:
                self.abort()
                return
            time.sleep(0.02)

    def abort(self) -> None:
        """Make mpi4py call MPI_Abort, not MPI_Finalize, after Python has flushed its files at the
        exit.
        """
        if "mpi4py.MPI" in sys.modules:
            from mpi4py.run import set_abort_status

            set_abort_status(self.status)
            mpi = sys.modules["mpi4py.MPI"]
            if (
                self.status
                and mpi.Is_initialized()
                and "Open MPI v4" not in mpi.Get_library_version()
            ):
                os.write(2, _LINE + ABORTED % (mpi.COMM_WORLD.rank, self.status) + _LINE)


def _below(exc: BaseException) -> "TracebackType | None":
    """Return the exception's traceback without the frame of this file."""
    return exc.__traceback__ and exc.__traceback__.tb_next


if __name__ == "__main__":
    del sys.argv[0]
    allow_ptrace()
    is_module = sys.argv[0] == "-m"
    del sys.argv[:is_module]
    Rank().run(sys.argv[0], is_module)
