"""``python -m payload train|gemm|probe|...``: parse, then hand over to ``run`` of the module of that name.

It gives the exit code, or raises a ``PayloadError``, which is told here in one line.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from payload.cli.arguments import check, parse
from payload.cli.config import COMMANDS
from payload.errors import LaunchError, PayloadError, UsageError, line_of
from payload.node.host import keep_freed_memory, launcher_rank


def main(argv: Sequence[str]) -> int:
    """Run one command and give its exit code."""
    _limit_threads()
    try:
        config = parse(argv)
        check(config)
    except UsageError as exc:
        return _refuse(exc)
    keep_freed_memory()
    # Only now: NumPy and MPI are slow to load, and `--help` must work without them.
    name = next(name for name, kind in COMMANDS.items() if kind is type(config))
    command = importlib.import_module(f"payload.commands.{name}")
    try:
        code: int = command.run(config)
    except PayloadError as exc:
        _report(exc, rank=_world_rank())
        return exc.exit_code
    except Exception as exc:
        line = line_of(exc)
        if line is None or sys.excepthook is not sys.__excepthook__:
            raise  # MPI's hook says so, and ends the other ranks, too
        _report(PayloadError(line, code="rank-error"), rank=0)
        return PayloadError.exit_code
    return code


def _refuse(error: UsageError) -> int:
    """Say once what is wrong with the command line, or with the config file that any of the ranks was given.

    mpirun ends all ranks as soon as one exits with an error: the others wait in MPI until rank 0 has spoken.
    """
    rank = launcher_rank(os.environ)
    refused: PayloadError = error
    if rank is not None:
        try:
            importlib.import_module("payload.comm.world").start(error)
        except LaunchError:
            pass  # of what is wrong, the command line is nearer to the user
        except PayloadError as exc:
            refused = exc
    _report(refused, rank=rank or 0)
    return refused.exit_code


def _report(error: PayloadError, *, rank: int) -> None:
    if rank == 0:
        # For a program that shows the error as its own.
        code = f"[{error.code}] " if os.environ.get("PAYLOAD_ERROR_CODES") else ""
        sys.stderr.write(f"payload: error: {code}{error}\n")
        sys.stderr.flush()


def _world_rank() -> int:
    """0 for a command that does without MPI."""
    world = sys.modules.get("payload.comm.world")
    return world.world_rank() if world else 0


def _limit_threads() -> None:
    """Keep NumPy's BLAS to the cores this rank was given: by itself, each rank's takes all of the node's."""
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
