"""Where the payload's tests compute, and how they run it as users do: in processes of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.cli.arguments import parse
from payload.cli.config import TrainConfig
from payload.device import choose
from payload.device.base import Array, Device
from tests.support.messages import shows
from tests.unit.payload.doubles.strict import Strict
from tests.integration.payload.ranks import LAUNCHERS, Ranks

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


def records(folder: Path, *kinds: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the records of these kinds, or all, that a run wrote."""
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [record for record in found if not kinds or record["kind"] in kinds]


def train_config(*flags: str) -> TrainConfig:
    config = parse(["train", *flags])
    assert isinstance(config, TrainConfig)
    return config


def idx_file(array: Array) -> bytes:
    """Bytes in the format of MNIST's files."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def assert_one_error(stderr: str, code: str, *values: str) -> None:
    """Standard error is one line: the message of this code, with these values."""
    (line,) = stderr.splitlines()
    assert line.startswith("payload: error: ")
    assert shows(line, code), line
    assert [value for value in values if value not in line] == [], line


@pytest.fixture(scope="module", autouse=True)
def _pythons_own_intern() -> Iterator[None]:
    """PyTorch needs it, and Ansible's modules, which other tests load, replace it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "intern", getattr(sys.intern, "unpatched_implementation", sys.intern))
        yield


@pytest.fixture
def tensorboard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tensorboardX from importing PyTorch, which takes 2 s."""
    if "torch" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture(scope="session")
def real_device() -> Device:
    """A GPU where CuPy finds one, else the CPU; pytest's header says which."""
    return choose("auto", 0)


@pytest.fixture(params=["real", "strict"])
def device(request: pytest.FixtureRequest, real_device: Device) -> Device:
    """The real one, and then the double of CuPy, on which fails what would fail on a GPU.

    With the scope of a session, pytest would sort all tests by device, and set up the fixtures of a
    module several times.
    """
    return real_device if request.param == "real" else Strict()


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
