"""Jobs that fail in many ways, on two nodes: each error's first line names the cause, and quotes the log once."""

# ruff: noqa: E501 - a job a line

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, raised

pytestmark = pytest.mark.sweep

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions:
  - {{name: train, nodes: 2}}
{more}
"""
# One rank, the last, fails while the others wait for it in MPI.
RANKS = """\
import ctypes, os, signal, socket, subprocess, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == world.size - 1:
    {line}
world.Barrier()
"""
ALONE = "import ctypes, os, signal, socket, subprocess, sys, time\n{line}\n"
NODES = ("--nodes", "2")


@dataclass(frozen=True)
class Planted:
    """A job that fails: a Python program's line, or a shell script (which has newlines); and its cause."""

    name: str
    line: str
    cause: str
    flags: tuple[str, ...] = ()
    rc: int = 4

    def write(self, folder: Path) -> Path:
        place = folder / self.name
        place.mkdir()
        if "\n" in self.line:
            path = place / "job.sh"
            path.write_text(self.line)
            return path
        path = place / "job.py"
        path.write_text((RANKS if "--nodes" in self.flags else ALONE).format(line=self.line))
        return path


def killed(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})"


def ranked(cause: str) -> str:
    return rf"{cause}.*rank 1 on \S+-train-2"


# With each launcher, on two nodes.
SPREAD = (
    ("raise", "raise KeyError('a bug')", ranked("KeyError: 'a bug'")),
    ("exit", "os._exit(3)", ranked("exit code 3")),
    ("segv", killed("SIGSEGV"), ranked("segmentation fault")),
    ("abort", "os.abort()", ranked("aborted")),
    ("bus", killed("SIGBUS"), ranked("bus error")),
    ("kill", killed("SIGKILL"), ranked("killed by SIGKILL")),
    ("module", "import cv2", ranked("no module cv2")),
    ("disk", "raise OSError(28, 'No space left on device')", ranked("disk full")),
)
SINGLE = (
    ("null", "ctypes.string_at(0)", "segmentation fault"),
    ("fpe", killed("SIGFPE"), "floating point exception"),
    ("ill", killed("SIGILL"), "illegal instruction"),
    ("memory", "bytearray(10**15)", "out of memory: an allocation was refused|out of memory"),
    ("file", "open('/nosuch/data.csv')", "/nosuch/data.csv is not there"),
    ("library", "ctypes.CDLL('libnosuch.so.3')", r"missing shared library libnosuch\.so\.3"),
    ("syntax", "f = (", "syntax error.*SyntaxError"),
    ("assert", "assert 1 == 2, 'no'", "assertion failed.*AssertionError: no"),
    ("refused", "socket.create_connection(('127.0.0.1', 1))", "connection refused"),
    ("resolve", "socket.create_connection(('nosuch.invalid', 1))", "a host name is unknown"),
    ("denied", "open('/etc/shadow')", "permission denied.*/etc/shadow"),
    ("full", "open('/dev/full', 'w').write('x' * 10**6)", "disk full"),
    ("exit1", "print('the end is near'); sys.exit(1)", "exit code 1"),
    ("arguments", "import argparse; argparse.ArgumentParser().parse_args(['--lrr'])", "wrong arguments.*unrecognized"),
    ("interrupt", "raise KeyboardInterrupt", "interrupted"),
    ("format", "open('a', 'w').write('x'); os.chmod('a', 0o755); os.execv('./a', ['a'])", "another architecture"),
    ("descriptors", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); [open('/dev/null') for _ in range(20)]", "too many open files"),
    ("port", "a, b = socket.socket(), socket.socket(); a.bind(('', 4711)); b.bind(('', 4711))", "port is in use"),
    ("quota", "raise OSError(122, 'Disk quota exceeded')", "disk quota exceeded"),
    ("readonly", "open('/sys/x', 'w')", "read-only file system|permission denied"),
    ("cuda", "raise RuntimeError('CUDA error: invalid device ordinal')", "a GPU that it has not"),
    ("nccl", "raise RuntimeError('NCCL error: ncclSystemError: System call failed')", "NCCL: the connection"),
    ("command", "#!/bin/bash\nset -e\nnosuchcommand\n", "command not found.*nosuchcommand"),
    ("executable", "#!/bin/bash\necho hi > tool\nexec ./tool\n", r"not executable.*tool"),
    ("bash", "#!/bin/bash\nif true; then\n", "syntax error"),
    ("here", "#!/bin/bash\npython3 -c \"open('kept/data.csv')\"\n", r"no file kept/data\.csv.*: it is here, and was not sent", ("--exclude", "kept")),
)  # fmt: skip
SLURMS = (
    Planted("oom", "x = bytearray(10**9); x[::4096] = b'x' * len(x[::4096]); time.sleep(60)", r"out of memory.*(used of|more than) 100 MiB", ("--mem", "100MiB")),
    Planted("slots", "#!/bin/bash\nmpirun -np 64 true\n", "not enough slots"),
    Planted("srun", "#!/bin/bash\nsrun ./nosuch\n", "command not found"),
)  # fmt: skip
SPREAD_SLURM = tuple(
    Planted(f"{launcher}-{name}", line, cause, (*NODES, "--launcher", launcher))
    for launcher in ("srun", "mpirun")
    for name, line, cause in SPREAD
)
WITH_SLURM = (*SPREAD_SLURM, *(Planted(*one) for one in SINGLE), *SLURMS)
PLAIN = (
    *(Planted(name, line, cause, NODES) for name, line, cause in SPREAD),
    *(Planted(*one) for one in SINGLE[:3]),
)


@dataclass(frozen=True)
class Ended:
    """How each planted job ended."""

    cluster: Cluster
    ids: dict[str, str]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    name = f"f{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("failures home"), tmp_path_factory.mktemp("failures cwd")
    with raised(name, SPEC.format(name=name, more=""), home, cwd) as one:
        kept = cwd / "here" / "kept"
        ids = {}
        for planted in WITH_SLURM:
            path = planted.write(cwd)
            if planted.name == "here":
                kept.mkdir()
                (kept / "data.csv").touch()
            ids[planted.name] = one.json("submit", path, *planted.flags)["job_id"]
        yield Ended(one, ids)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"p{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("plain home"), tmp_path_factory.mktemp("plain cwd")
    with raised(name, SPEC.format(name=name, more="scheduler: none"), home, cwd) as one:
        yield one


def check(stderr: str, stdout: str, planted: Planted) -> None:
    """The first line of the error names the cause; the log's last line is on the screen once."""
    first = next(line for line in stderr.splitlines() if line.startswith("error: "))
    assert re.search(planted.cause, first), stderr
    if planted.line.startswith("raise "):
        assert (stdout + stderr).count("Traceback (most recent call last)") == 1, stdout + stderr


@pytest.mark.parametrize("planted", WITH_SLURM, ids=lambda planted: planted.name)
def test_the_first_line_names_the_cause(slurm: Ended, planted: Planted) -> None:
    job_id = slurm.ids[planted.name]
    ran = slurm.cluster.quoting("logs", job_id, "--follow")
    assert ran.returncode == planted.rc, str(ran)
    check(ran.stderr, ran.stdout, planted)
    (job,) = json.loads(slurm.cluster.quoting("-o", "json", "jobs", job_id).stdout)["jobs"]
    assert job["state"] in {"FAILED", "OUT_OF_MEMORY"}, job  # not CANCELLED or TIMEOUT: no rank is waited for
    assert job["diagnosis"]["state"] == job["state"]


@pytest.mark.parametrize("planted", PLAIN, ids=lambda planted: planted.name)
def test_without_a_scheduler(plain: Cluster, planted: Planted) -> None:
    path = planted.write(plain.runner.cwd)
    ran = plain.quoting("submit", path, *planted.flags, "--wait")
    assert ran.returncode == planted.rc, str(ran)
    check(ran.stderr, ran.stdout, planted)
