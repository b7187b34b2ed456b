"""The ports that jobs claim on a node: MASTER_PORT, and ports that `clusterctl shell` forwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from clusterctl.spec.job import JobSpec
from clusterctl.util.assets import data_folder
from payload.node import ports
from tests.support.played.batch import Batch, rendered, user_script

JOBS = 40
JOB = str(data_folder("payload") / "node" / "job.py")
# Each test has a job of its own, since other tests of this machine may run at the same time.
FIRST = ports.FIRST_PORT


def variables(job: int, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "n1", **more}


def start(job: int, **more: str) -> subprocess.Popen[str]:
    """Start a session of this job, which shows its MASTER_PORT, and ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-IS", JOB, "shell", "sh", "-c", "echo $MASTER_PORT; read -r _"],
        env=variables(job, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def session(job: int, **more: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A session of this job that runs during the `with` block, and its MASTER_PORT."""
    with start(job, **more) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
        process.communicate()


def master_port(job: int) -> int:
    """The MASTER_PORT of a job that has ended at once."""
    with session(job) as (port, _):
        return port


def claim_together(barrier: Barrier, claimed: Queue[int], job: int) -> None:
    barrier.wait()
    claimed.put(ports.claim_job_port(job)[0])
    # No process ends, which would free its port, before all have chosen.
    barrier.wait()


@pytest.mark.parametrize("step", [0, 1, ports.PORTS])
def test_claim_job_port_in_40_processes_at_once_returns_40_ports(step: int) -> None:
    """step: the distance of the ids of the jobs, which select the same ports or neighbouring
    ports.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(JOBS)
    claimed = context.Queue()
    processes = [
        context.Process(target=claim_together, args=(barrier, claimed, 500 + step * number))
        for number in range(JOBS)
    ]
    for process in processes:
        process.start()
    chosen = [claimed.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert len(set(chosen)) == JOBS
    assert all(FIRST <= port < FIRST + ports.PORTS for port in chosen)


def test_jobs_that_start_before_any_listens_have_different_ports() -> None:
    """Ranks listen seconds after the job began, when PyTorch has been imported."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(session(7 + ports.PORTS * number))[0] for number in range(JOBS)
        ]
        assert len(set(found)) == JOBS


def test_job_killed_by_sigkill_leaves_its_port_to_the_next() -> None:
    with session(60) as (port, process):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert master_port(60) == port


def test_port_of_an_ended_job_is_reused() -> None:
    assert master_port(61) == master_port(61)


LISTENERS = {
    "all addresses": (socket.AF_INET, "", 0),
    "loopback": (socket.AF_INET, "127.0.0.1", 0),
    "loopback, as SO_REUSEADDR allows": (socket.AF_INET, "127.0.0.1", socket.SO_REUSEADDR),
    "a part of the load, as SO_REUSEPORT allows": (
        socket.AF_INET,
        "127.0.0.1",
        socket.SO_REUSEPORT,
    ),
    "IPv6 only": (socket.AF_INET6, "::", 0),
    "loopback of IPv6": (socket.AF_INET6, "::1", socket.SO_REUSEADDR),
}


@pytest.mark.parametrize("listener", LISTENERS.values(), ids=LISTENERS.keys())
def test_claim_job_port_passes_over_a_port_with_a_listener(listener: tuple[int, str, int]) -> None:
    family, address, option = listener
    port = master_port(62)
    with socket.socket(family) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if option:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((address, port))
        server.listen()
        assert master_port(62) != port


def test_claim_job_port_ignores_the_remote_port_of_a_connection() -> None:
    """A client that closes first keeps its side of the connection for a minute, with the server's
    port.
    """
    port = master_port(63)
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        peer, _ = server.accept()
        client.close()
        assert peer.recv(1) == b""
        peer.close()
    connections = Path("/proc/net/tcp").read_text()
    assert f":{port:04X} 06 " in connections
    assert f":{port:04X} 00000000:0000 0A" not in connections
    assert master_port(63) == port


def test_claim_job_port_skips_a_port_that_cannot_be_bound() -> None:
    """A connection that a server closed first prevents servers without SO_REUSEADDR for a
    minute.
    """
    port = master_port(64)
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
        assert client.recv(1) == b""
        client.close()
    with session(64) as (chosen, _), socket.socket() as server:
        assert chosen != port
        server.bind(("", chosen))
        server.listen()


def test_claim_job_port_of_an_exhausted_range_is_assigned_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ports, "FIRST_PORT", used.getsockname()[1])
        monkeypatch.setattr(ports, "PORTS", 1)
        port, is_of_jobs = ports.claim_job_port(7)
        assert not is_of_jobs
        assert port not in (0, used.getsockname()[1])
        assert not ports.claim(port)


def test_job_keeps_its_claim_from_its_program(batch: Batch) -> None:
    """A daemon that the program leaves running would otherwise keep the port."""
    show = (
        "import os\n"
        "for fd in os.listdir('/proc/self/fd'): "
        "print(os.path.realpath(f'/proc/self/fd/{fd}'))\n"
    )
    job = JobSpec(name="j", script=user_script(batch.folder, "show.py", show))
    rc, out, err = batch.run(rendered(job))
    assert (rc, err) == (0, "")
    assert "socket:" not in out


def test_shell_with_a_forwarded_port_in_use_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with start(65, CLUSTERCTL_FORWARDED=str(port)) as process:
            assert f"port {port} of n1 is already in use" in process.communicate()[1]


def test_shell_with_a_port_that_another_session_forwards_says_so() -> None:
    """A notebook server would silently use the next port, and the forwarded port lead to the
    other's.
    """
    # Between the ports that Linux assigns and those of jobs, so that no other test gets the port.
    port = 61000 + os.getpid() % (ports.FIRST_PORT - 61000)
    with session(66, CLUSTERCTL_FORWARDED=str(port)) as (_, first):
        with start(67, CLUSTERCTL_FORWARDED=str(port)) as process:
            assert f"port {port} of n1 is already in use" in process.communicate()[1]
        assert first.communicate()[1] == ""
