"""How tests run the payload as users do: in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.payload.ranks import LAUNCHERS, Ranks
from tests.support.payload import (  # noqa: F401
    device,
    pythons_own_intern,
    real_device,
    tensorboard_alone,
)

_ROOT = Path(__file__).parents[3]
_MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    *("--mca", "mpi_yield_when_idle", "1", "-n"),
)
# A waiting rank of Open MPI yields its core and polls again at once. If it sleeps instead, programs
# take a quarter less CPU time, and on a busy machine half the time.
_NAP = "#include <unistd.h>\nint sched_yield(void) { return usleep(20); }\n"
_SESSION_S = 12 * 3600

Runner = Callable[..., subprocess.CompletedProcess[str]]
Starter = Callable[..., subprocess.Popen[str]]


def _start(*argv: str, seconds: int = 600, **environ: str) -> subprocess.Popen[str]:
    """A process that knows of no launcher but the one in ``argv``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # As the payload sets it.
    env = {
        **clean,
        "PYTHONPATH": str(_ROOT),
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    # SIGTERM lets mpirun take its ranks along, which a killed mpirun would leave behind.
    bounded = ("timeout", "--kill-after=10", str(seconds), *argv)
    return subprocess.Popen(
        bounded, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _ended(started: subprocess.Popen[str], rc: int | None) -> subprocess.CompletedProcess[str]:
    with started as process:
        output, errors = process.communicate()
    return _checked(
        subprocess.CompletedProcess(process.args, process.returncode, output, errors), rc
    )


def _checked(
    ran: subprocess.CompletedProcess[str], rc: int | None
) -> subprocess.CompletedProcess[str]:
    assert rc in (None, ran.returncode), ran.stdout + ran.stderr
    return ran


def python(*words: str, rc: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own; ``rc``: the exit code that it must have."""
    return _ended(_start(sys.executable, *words, **environ), rc)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started; none if it has ended."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        return [int(child) for child in path.read_text().split()]
    except FileNotFoundError:
        return []


@pytest.fixture(scope="session")
def nap(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library to preload into ranks, which has them sleep while they wait."""
    library = tmp_path_factory.mktemp("nap") / "nap.so"
    subprocess.run(
        ("cc", "-shared", "-fPIC", "-o", library, "-xc", "-"), input=_NAP, text=True, check=True
    )
    return str(library)


@pytest.fixture(scope="session")
def launch(nap: str) -> Starter:
    """Start Python on some ranks by mpirun; 0 ranks: without a launcher."""

    def run(size: int, *argv: str, seconds: int = 600, **environ: str) -> subprocess.Popen[str]:
        launcher = (*_MPIRUN, str(size)) if size else ()
        return _start(*launcher, sys.executable, *argv, seconds=seconds, LD_PRELOAD=nap, **environ)

    return run


@pytest.fixture(scope="session")
def mpi_job(launch: Starter) -> Iterator[Ranks]:
    """The job that runs the programs of all tests, one after the other: see ranks.py."""
    with contextlib.closing(Ranks(functools.partial(launch, seconds=_SESSION_S))) as job:
        yield job


@pytest.fixture(scope="session")
def program(mpi_job: Ranks, launch: Starter) -> Runner:
    """Run `payload`, or one of the small programs beside this file, on some ranks; 0: without a
    launcher.

    ``rc``: the exit code that it must have; None: any.
    ``launched``: start it by mpirun, in a test of how mpirun ends ranks or of their environment.
    """

    def run(
        size: int,
        name: str,
        *words: str,
        rc: int | None = 0,
        launched: bool = False,
        seconds: int = 600,
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        file = name if name == "payload" else str(Path(__file__).with_name("programs") / name)
        if not launched and not environ:
            return _checked(mpi_job.run([file, *words], size, seconds=seconds), rc)
        argv = ("-m", file) if name == "payload" else (file,)
        return _ended(launch(size, *argv, *words, seconds=seconds, **environ), rc)

    return run


@pytest.fixture(scope="session")
def mpirun(program: Runner) -> Runner:
    """Run ``python -m payload ...`` on some ranks."""
    return lambda size, *words, **options: program(size, "payload", *words, **options)


@pytest.fixture(scope="session")
def alone(mpirun: Runner) -> Runner:
    """Run ``python -m payload ...`` without a launcher."""
    return functools.partial(mpirun, 0)
