"""``python -m payload train|probe|telemetry``: parse, then hand over."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from payload.comm.launch import launcher_rank
from payload.config import Config, ProbeConfig, TelemetryConfig, TrainConfig, parse
from payload.errors import LaunchError, PayloadError, UsageError

_MODULES: dict[type[Config], str] = {
    TrainConfig: "payload.train",
    ProbeConfig: "payload.probe",
    TelemetryConfig: "payload.telemetry",
}


def main(argv: Sequence[str]) -> int:
    """Run one command and give its exit code."""
    _limit_threads()
    try:
        config = parse(argv)
    except UsageError as exc:
        return _refuse(exc)
    # Only now: NumPy and MPI are slow to load, and `--help` must work without them.
    command = importlib.import_module(_MODULES[type(config)])
    try:
        code: int = command.run(config)
    except PayloadError as exc:
        _report(exc, rank=_world_rank())
        return exc.exit_code
    return code


def _refuse(error: UsageError) -> int:
    """Say once what is wrong with the command line that all ranks were given.

    mpirun ends all ranks as soon as one exits with an error: the others wait in MPI until rank 0 has spoken.
    """
    rank = launcher_rank(os.environ)
    _report(error, rank=rank or 0)
    if rank is not None:
        with suppress(LaunchError):
            importlib.import_module("payload.comm.mpi").start()
    return error.exit_code


def _report(error: PayloadError, *, rank: int) -> None:
    if rank == 0:
        sys.stderr.write(f"payload: error: {error}\n")
        sys.stderr.flush()


def _world_rank() -> int:
    """0 for a command that does without MPI."""
    mpi = sys.modules.get("payload.comm.mpi")
    return mpi.world_rank() if mpi else 0


def _limit_threads() -> None:
    """Keep NumPy's BLAS to the cores this rank was given: by itself, each rank's takes all of the node's."""
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
