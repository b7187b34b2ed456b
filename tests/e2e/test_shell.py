"""Interactive allocations: a shell on a node, one command there, a port of it here; never a forgotten one."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.request

import pytest

from tests.support.cluster import Cluster
from tests.support.manual import ROOT
from tests.support.messages import shows
from tests.support.sweeps import in_sweep
from tests.support.terminal import Terminal, terminal

MINE = ("--name=shell", "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING", "--noheader", "--format=%i")


def allocations(cluster: Cluster) -> list[str]:
    """The ids of interactive allocations that wait or hold nodes."""
    return cluster.ssh(f"{cluster.name}-ctl", "squeue " + " ".join(MINE)).split()


def gone(cluster: Cluster) -> bool:
    """Whether all of them end, within a minute."""
    deadline = time.monotonic() + 60
    while allocations(cluster):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def shell(window: Terminal) -> None:
    """Wait until a shell takes commands."""
    window.read_until("$ ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_shell_runs_a_command_and_returns_its_exit_code(cluster: Cluster) -> None:
    script = 'hostname; id -un; command -v python; srun hostname | sort; printf "<%s>" "$@"; exit 3'
    ran = cluster("shell", "--nodes", "2", "--", "bash", "-c", script, "-", "a b", "$(id)", "'q'", rc=3)
    first, second = (f"{cluster.name}-train-{i}" for i in (1, 2))
    python = "/opt/clusterctl/env/bin/python"
    assert ran.stdout.splitlines() == [first, cluster.user, python, first, second, "<a b><$(id)><'q'>"]
    assert f"holds {first}, {second} " in ran.stderr
    assert gone(cluster)


def test_a_program_runs_in_a_shell_as_it_is_submitted(cluster: Cluster) -> None:
    """The ranks run in a copy of the sent folder. A file that they write stays, and a message names it."""
    (folder := cluster.runner.cwd / "tried").mkdir()
    (folder / "show.py").write_text(
        "import os\nprint(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))\n"
        "open(f'rank-{os.environ[\"RANK\"]}.txt', 'w').write('new')\n"
    )
    answer = cluster.json("shell", "--nodes", "2", "--folder", folder, "--", "launch", "python", "show.py")
    first = f"{cluster.name}-train-1"
    assert sorted(answer["stdout"].splitlines()) == [f"0 2 {first}", f"1 2 {first}"]
    assert answer["files"] == ["rank-0.txt", "rank-1.txt"]
    remove = f"ls {answer['dir']}/rank-1.txt && rm -r {answer['dir']}"
    cluster.ssh(f"{cluster.name}-ctl", remove, user=cluster.user)


def test_its_answer_for_programs(cluster: Cluster) -> None:
    answer = cluster.json(
        "shell", "--mem", "200M", "--time", "5m", "--", "sh", "-c", "echo out; echo err >&2"
    )
    assert answer["ok"]
    assert (answer["exit_code"], answer["stdout"], answer["stderr"]) == (0, "out\n", "err\n")
    assert answer["nodes"] == [f"{cluster.name}-train-1"]
    assert cluster.sacct(answer["job_id"], "ReqMem,Timelimit,JobName") == "200M|00:05:00|shell"
    failed = cluster.json("shell", "--", "false", rc=1)
    assert not failed["ok"]
    assert failed["failures"][0]["code"] == "command"
    assert cluster.json("shell", rc=2)["failures"][0]["code"] == "no-json-answer"


def test_stdin_reaches_the_command(cluster: Cluster) -> None:
    ran = cluster.runner("-f", cluster.spec, "shell", "--", "tr", "a-z", "A-Z", stdin="hello\n")
    assert ran.stdout == "HELLO\n"


def test_a_shell_on_a_terminal(cluster: Cluster) -> None:
    with terminal(cluster.runner, "-f", cluster.spec, "shell", "--nodes", "2") as window:
        shell(window)
        window.type("stty size; echo on $(hostname) with $(srun hostname | wc -l) nodes\r")
        window.read_until(f"on {cluster.name}-train-1 with 2 nodes")
        assert "24 80" in window.shown
        window.type("bash -c 'echo be''gun; exec sleep 300'\r")
        window.read_until("begun")
        window.type("\x03")  # is for the program that runs there
        window.type("exit 5\r")
        assert window.end() == 5
    assert gone(cluster)


def test_no_terminal_and_no_command_is_an_error(cluster: Cluster) -> None:
    assert shows(cluster("shell", rc=2).stderr, "needs-terminal")


def test_what_slurm_can_not_give_is_refused_with_a_way_out(cluster: Cluster) -> None:
    assert shows(cluster("shell", "--partition", "nope", "--", "true", rc=2).stderr, "unknown-partition")
    assert "--nodes" in cluster("shell", "--nodes", "0", "--", "true", rc=2).stderr


def test_the_wait_is_said_and_ctrl_c_takes_the_request_back(cluster: Cluster) -> None:
    blocker = cluster.runner.cwd / "blocker.sh"
    blocker.write_text("sleep 600\n")
    job = cluster.json("submit", blocker, "--nodes", "2")["job_id"]
    # salloc may be served before sbatch.
    cluster.job_in("RUNNING", job)
    try:
        with terminal(cluster.runner, "-f", cluster.spec, "shell", "--nodes", "2") as window:
            window.read_until("is waiting in the queue")
            assert len(allocations(cluster)) == 1
            window.type("\x03")
            assert window.end() == 130
            assert "Traceback" not in window.shown
        assert gone(cluster)
    finally:
        cluster("cancel", job)


@pytest.mark.parametrize("end", ["SIGKILL", *in_sweep("SIGTERM", "closed terminal")])
def test_however_it_ends_the_nodes_are_given_back(cluster: Cluster, end: str) -> None:
    with terminal(cluster.runner, "-f", cluster.spec, "shell") as window:
        shell(window)
        assert len(allocations(cluster)) == 1
        if end == "closed terminal":
            window.close()
        else:
            window.process.send_signal(signal.Signals[end])
        window.process.wait(60)
        assert gone(cluster)


def test_a_cancelled_allocation_ends_the_shell_and_that_is_said(cluster: Cluster) -> None:
    with terminal(cluster.runner, "-f", cluster.spec, "shell") as window:
        shell(window)
        (job,) = allocations(cluster)
        cluster("cancel", job)
        assert window.end() != 0
        assert f"clusterctl jobs {job}" in window.shown


def test_a_port_of_the_node_is_reached_here(cluster: Cluster) -> None:
    """A server that only the node's own loopback reaches."""
    here, there = free_port(), 8765
    make = "mkdir -p site && cd site && echo from $(hostname) > index.html"
    serve = f"{make} && exec python -m http.server {there} --bind 127.0.0.1"
    process = cluster.runner.start(
        "-f", cluster.spec, "shell", "--forward", f"{here}:{there}", "--", "bash", "-c", serve
    )
    try:
        assert fetched(f"http://127.0.0.1:{here}/").startswith(f"from {cluster.name}-train-")
        taken = cluster("shell", "--forward", str(here), "--", "true", rc=2).stderr
        assert shows(taken, "port-unusable")
        assert f"--forward LOCAL:{here}" in taken
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert gone(cluster)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", here)) != 0


@pytest.mark.sweep
def test_a_notebook_on_a_node_is_reached_here(cluster: Cluster) -> None:
    """JupyterLab in an environment of its own; its API, over the forwarded port."""
    here = free_port()
    serve = ["jupyter", "lab", "--no-browser", "--ip=127.0.0.1", "--port=8888", "--ServerApp.token=open"]
    forward = ["--requirements", ROOT / "examples" / "requirements-notebook.txt", "--forward", f"{here}:8888"]
    process = cluster.runner.start("-f", cluster.spec, "shell", *forward, "--", *serve)
    try:
        assert "version" in json.loads(fetched(f"http://127.0.0.1:{here}/api", timeout_s=300))
        kernels = json.loads(fetched(f"http://127.0.0.1:{here}/api/kernelspecs?token=open"))
        assert kernels["default"] == "python3"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert gone(cluster)


def fetched(url: str, *, timeout_s: float = 60) -> str:
    """What is served there, as soon as it is."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - ours
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
