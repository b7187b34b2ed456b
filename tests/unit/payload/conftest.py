"""Where the payload's tests compute, and how they run it as users do: in processes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from payload.device import Device, choose
from tests.support import forks
from tests.unit.payload.doubles.strict import Strict

_ROOT = Path(__file__).parents[3]
# A rank that waits yields its core: there may be more ranks, and other tests, than cores.
_MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    *("--mca", "mpi_yield_when_idle", "1", "-n"),
)

Runner = Callable[..., subprocess.CompletedProcess[str]]


def _start(*argv: str, seconds: int = 600, **environ: str) -> subprocess.Popen[str]:
    """A process that knows of no launcher but the one in ``argv``."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMIX_", "PMI_"))}
    env = {**clean, "PYTHONPATH": str(_ROOT), **environ}
    # SIGTERM lets mpirun take its ranks along, which a killed mpirun would leave behind.
    bounded = ("timeout", "--kill-after=10", str(seconds), *argv)
    return subprocess.Popen(bounded, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run(*argv: str, seconds: int = 600, **environ: str) -> subprocess.CompletedProcess[str]:
    with _start(*argv, seconds=seconds, **environ) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module", autouse=True)
def _pythons_own_intern() -> Iterator[None]:
    """PyTorch needs it, and Ansible's modules, which other tests load, replace it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "intern", getattr(sys.intern, "unpatched_implementation", sys.intern))
        yield


@pytest.fixture(scope="session")
def real_device() -> Device:
    """A GPU where CuPy finds one, else the CPU; pytest's header says which."""
    return choose("auto", 0)


@pytest.fixture(scope="session", params=["real", "strict"])
def device(request: pytest.FixtureRequest, real_device: Device) -> Device:
    """The real one, and then the double of CuPy, on which fails what would fail on a GPU."""
    return real_device if request.param == "real" else Strict()


@pytest.fixture(scope="session")
def alone() -> Runner:
    """Start ``python -m payload ...`` without a launcher."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        if environ:  # which may be of Python itself
            return _run(sys.executable, "-m", "payload", *arguments, **environ)
        return forks.payload(arguments)

    return run


@pytest.fixture(scope="session")
def forked() -> Iterator[tuple[str, ...]]:
    """The beginning of a command for mpirun: its ranks are forked, see ranks.py."""
    folder = tempfile.mkdtemp(prefix="ranks-")  # a socket's path may be too long in pytest's
    address = f"{folder}/socket"
    argv = [sys.executable, "-m", "tests.unit.payload.ranks", address]
    # One thread of BLAS, as the payload sets it.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv, cwd=_ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout
        assert server.stdout.readline() == b"ready\n"
        yield (sys.executable, "-I", "-S", str(Path(__file__).with_name("ranks.py")), address)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def mpirun(forked: tuple[str, ...]) -> Runner:
    """Start ``python -m payload ...`` on some ranks."""

    def run(ranks: int, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        if not environ:  # which may be of Python itself
            return _run(*_MPIRUN, str(ranks), *forked, "payload", *arguments)
        return _run(*_MPIRUN, str(ranks), sys.executable, "-m", "payload", *arguments, **environ)

    return run


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """As ``mpirun``, without waiting for the end."""

    def run(ranks: int, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return _start(*_MPIRUN, str(ranks), sys.executable, "-m", "payload", *arguments, **environ)

    return run


@pytest.fixture(scope="session")
def program(forked: tuple[str, ...]) -> Runner:
    """Start one of the small programs beside this file on some ranks."""

    def run(ranks: int, name: str, *arguments: str, seconds: int = 300) -> subprocess.CompletedProcess[str]:
        path = Path(__file__).with_name("programs") / name
        command = (*_MPIRUN, str(ranks), *forked, str(path), *arguments)
        return _run(*command, seconds=seconds, OMP_NUM_THREADS="1")  # as the payload sets it

    return run
