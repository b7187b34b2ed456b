"""Entry point of ``python -m payload train|gemm|probe|...``: parses the command line and runs the
command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import singledispatch

from payload.cli.arguments import check, parse
from payload.cli.config import (
    AllreduceConfig,
    BenchConfig,
    EvalConfig,
    ExportConfig,
    GemmConfig,
    PredictConfig,
    ProbeConfig,
    SampleConfig,
    TelemetryConfig,
    TrainConfig,
)
from payload.cli.settings import CommandConfig
from payload.errors import LaunchError, PayloadError, UsageError, line_of
from payload.node.host import keep_freed_memory, launcher_rank
from payload.node.rank import allow_ptrace


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code. If it raises ``PayloadError``, rank 0 prints the
    error.
    """
    _limit_threads()
    try:
        config = parse(argv)
        check(config)
    except UsageError as exc:
        return _refuse(exc)
    keep_freed_memory()
    allow_ptrace()
    try:
        code = _run(config)
    except PayloadError as exc:
        _report(exc, rank=_world_rank())
        return exc.exit_code
    except Exception as exc:
        line = line_of(exc)
        if line is None or sys.excepthook is not sys.__excepthook__:
            # MPI's hook prints the error and ends all ranks.
            raise
        _report(PayloadError(line, code="rank-error"), rank=0)
        return PayloadError.exit_code
    return code


@singledispatch
def _run(config: CommandConfig) -> int:
    """Run the command that has these settings, and return its exit code.

    The command is imported late: NumPy and MPI are slow to load, and `--help` must work without
    them.
    """
    raise TypeError(f"no command has {type(config).__name__}")


@_run.register
def _(config: TrainConfig) -> int:
    from payload.commands.train import run

    return run(config)


@_run.register
def _(config: EvalConfig) -> int:
    from payload.commands.eval import run

    return run(config)


@_run.register
def _(config: SampleConfig) -> int:
    from payload.commands.sample import run

    return run(config)


@_run.register
def _(config: PredictConfig) -> int:
    from payload.commands.predict import run

    return run(config)


@_run.register
def _(config: ExportConfig) -> int:
    from payload.commands.export import run

    return run(config)


@_run.register
def _(config: BenchConfig) -> int:
    from payload.commands.bench import run

    return run(config)


@_run.register
def _(config: GemmConfig) -> int:
    from payload.commands.gemm import run

    return run(config)


@_run.register
def _(config: AllreduceConfig) -> int:
    from payload.commands.allreduce import run

    return run(config)


@_run.register
def _(config: ProbeConfig) -> int:
    from payload.commands.probe import run

    return run(config)


@_run.register
def _(config: TelemetryConfig) -> int:
    from payload.commands.telemetry import run

    return run(config)


def _refuse(error: UsageError) -> int:
    """Print the error of a wrong command line or config file on rank 0, and return the exit
    code.
    """
    # mpirun ends all ranks when a rank fails, so all ranks wait for each other in MPI before rank 0
    # prints.
    rank = launcher_rank(os.environ)
    first_error: PayloadError = error
    if rank is not None:
        try:
            from payload.comm import world

            world.start(error)
        except LaunchError:
            # Print the error in the command line, which is more useful to the user.
            pass
        except PayloadError as exc:
            first_error = exc
    _report(first_error, rank=rank or 0)
    return first_error.exit_code


def _report(error: PayloadError, *, rank: int) -> None:
    if rank == 0:
        # Add the code for programs that show the error to their users.
        code = f"[{error.code}] " if os.environ.get("PAYLOAD_ERROR_CODES") else ""
        sys.stderr.write(f"payload: error: {code}{error}\n")
        sys.stderr.flush()


def _world_rank() -> int:
    """Return this process's MPI rank, or 0 if the command does not use MPI."""
    world = sys.modules.get("payload.comm.world")
    return world.world_rank() if world else 0


def _limit_threads() -> None:
    """Limit NumPy's BLAS to the cores of this rank. By default, each rank would use all cores of
    the node.
    """
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
