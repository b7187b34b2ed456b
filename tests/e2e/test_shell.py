"""Interactive allocations: a shell, a command or a forwarded port on a node; none is left running."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.messages import condition, shows
from tests.support.processes import eventually
from tests.support.terminal import Terminal, terminal

MINE = (
    "--name=shell",
    "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING",
    "--noheader",
    "--format=%i",
)


def allocations(cluster: Cluster) -> list[str]:
    """The ids of interactive allocations that wait or hold nodes."""
    return cluster.ssh(f"{cluster.name}-ctl", "squeue " + " ".join(MINE)).split()


def allocation_is_gone(cluster: Cluster) -> bool:
    """Return whether all allocations end within a minute."""
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
    ran = cluster(
        "shell", "--nodes", "2", "--", "bash", "-c", script, "-", "a b", "$(id)", "'q'", rc=3
    )
    first, second = (f"{cluster.name}-train-{i}" for i in (1, 2))
    python = "/opt/clusterctl/env/bin/python"
    assert ran.stdout.splitlines() == [
        first,
        cluster.user,
        python,
        first,
        second,
        "<a b><$(id)><'q'>",
    ]
    assert f"holds {first}, {second} " in ran.stderr
    assert allocation_is_gone(cluster)


def test_program_runs_in_a_shell_as_it_is_submitted(cluster: Cluster) -> None:
    """The ranks run in a copy of the sent folder. A file that they write stays, and a message names
    it.
    """
    (folder := cluster.runner.cwd / "tried").mkdir()
    (folder / "show.py").write_text(
        "import os\nprint(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))\n"
        "open(f'rank-{os.environ[\"RANK\"]}.txt', 'w').write('new')\n"
    )
    answer = cluster.json(
        "shell", "--nodes", "2", "--folder", folder, "--", "launch", "python", "show.py"
    )
    first = f"{cluster.name}-train-1"
    assert sorted(answer["stdout"].splitlines()) == [f"0 2 {first}", f"1 2 {first}"]
    assert answer["files"] == ["rank-0.txt", "rank-1.txt"]
    remove = f"ls {answer['dir']}/rank-1.txt && rm -r {answer['dir']}"
    cluster.ssh(f"{cluster.name}-ctl", remove, user=cluster.user)


def test_shell_answers_in_json(cluster: Cluster) -> None:
    answer = cluster.json(
        "shell", "--mem", "200M", "--time", "5m", "--", "sh", "-c", "echo out; echo err >&2"
    )
    assert answer["ok"]
    assert (answer["exit_code"], answer["stdout"], answer["stderr"]) == (0, "out\n", "err\n")
    assert answer["nodes"] == [f"{cluster.name}-train-1"]
    assert cluster.sacct(answer["job_id"], "ReqMem,Timelimit,JobName") == "200M|00:05:00|shell"
    failed = cluster.json("shell", "--", "false", rc=1)
    assert not failed["ok"]
    assert condition(failed["failures"][0]) == "tool-failed/command"
    assert condition(cluster.json("shell", rc=2)["failures"][0]) == "option-invalid/output"


def test_shell_passes_stdin_to_the_command(cluster: Cluster) -> None:
    ran = cluster.runner("-f", cluster.spec, "shell", "--", "tr", "a-z", "A-Z", stdin="hello\n")
    assert ran.stdout == "HELLO\n"


def test_shell_has_a_terminal(cluster: Cluster) -> None:
    with terminal(cluster.runner, "shell", "--nodes", "2") as window:
        shell(window)
        window.type("stty size; echo on $(hostname) with $(srun hostname | wc -l) nodes\r")
        window.read_until(f"on {cluster.name}-train-1 with 2 nodes")
        assert "24 80" in window.shown
        window.type("bash -c 'echo be''gun; exec sleep 300'\r")
        window.read_until("begun")
        window.type("\x03")  # is for the program that runs there
        window.type("exit 5\r")
        assert window.end() == 5
    assert allocation_is_gone(cluster)


def test_shell_without_terminal_and_command_is_refused(cluster: Cluster) -> None:
    assert shows(cluster("shell", rc=2).stderr, "needs-terminal")


def test_shell_that_slurm_cannot_allocate_is_refused_with_a_fix(cluster: Cluster) -> None:
    assert shows(
        cluster("shell", "--partition", "nope", "--", "true", rc=2).stderr, "unknown-partition"
    )
    assert "--nodes" in cluster("shell", "--nodes", "0", "--", "true", rc=2).stderr


def test_shell_waiting_for_nodes_is_cancelled_by_ctrl_c(cluster: Cluster) -> None:
    blocker = cluster.runner.cwd / "blocker.sh"
    blocker.write_text("sleep 600\n")
    job = cluster.json("submit", blocker, "--nodes", "2")["job_id"]
    # salloc may be served before sbatch.
    cluster.job_in("RUNNING", job)
    try:
        with terminal(cluster.runner, "shell", "--nodes", "2") as window:
            window.read_until("is waiting in the queue")
            assert len(allocations(cluster)) == 1
            window.type("\x03")
            assert window.end() == 130
            assert "Traceback" not in window.shown
        assert allocation_is_gone(cluster)
    finally:
        cluster("cancel", job)


@pytest.mark.parametrize("end", ["SIGKILL", "closed terminal"])
def test_shell_releases_its_nodes_however_it_ends(cluster: Cluster, end: str) -> None:
    with terminal(cluster.runner, "shell") as window:
        shell(window)
        assert len(allocations(cluster)) == 1
        if end == "closed terminal":
            window.close()
        else:
            window.process.kill()
        window.process.wait(60)
        assert allocation_is_gone(cluster)


def test_shell_of_a_cancelled_allocation_ends_with_the_reason(cluster: Cluster) -> None:
    with terminal(cluster.runner, "shell") as window:
        shell(window)
        (job,) = allocations(cluster)
        cluster("cancel", job)
        assert window.end() != 0
        assert f"clusterctl jobs {job}" in window.shown


def test_shell_forwards_a_port_of_the_node(cluster: Cluster) -> None:
    """A server that only the node's own loopback reaches."""
    here = free_port()
    there = 8765
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
    assert allocation_is_gone(cluster)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", here)) != 0


def fetched(url: str, *, timeout_s: float = 60) -> str:
    """Return the answer of the server on this port, as soon as it answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - ours
                return str(answer.read().decode())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """A running job on both nodes."""
    (script := tmp_path / "wait.sh").write_text("sleep 3600\n")
    job_id = cluster.json("submit", script, "--nodes", "2", "--env", "COLOUR=sea green")["job_id"]
    cluster.job_in("RUNNING", job_id)
    yield job_id
    cluster("cancel", job_id)


def entered(cluster: Cluster, job: str) -> list[str]:
    """The command line of ssh into a job."""
    words: list[str] = cluster.json("code", job)["ssh"]
    return words


def run(*words: str | Path, rc: int = 0) -> str:
    ended = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == rc, ended.stderr
    return ended.stdout


def test_ssh_into_a_job_has_the_jobs_variables(cluster: Cluster, job: str) -> None:
    """ssh enters the first node, inside the job: srun there starts ranks on all nodes of the job."""
    answer = cluster.json("code", job)
    first, second = (f"{cluster.name}-train-{i}" for i in (1, 2))
    assert (answer["host"], answer["node"]) == (f"clusterctl-{cluster.name}-{job}", first)
    show = (
        "hostname; id -un; printenv SLURM_JOB_ID SLURM_JOB_NODELIST MASTER_ADDR COLOUR; command "
        "-v python"
    )
    shown = run(
        *answer["ssh"], f"{show}; srun hostname | sort; cd {answer['folder']} && ls"
    ).splitlines()
    python = "/opt/clusterctl/env/bin/python"
    files = ["wait.sh"]
    of_job = [job, f"{cluster.name}-train-[1-2]", first, "sea green"]
    assert shown == [first, cluster.user, *of_job, python, first, second, *files]
    run(*answer["ssh"], "exit 3", rc=3)


def test_code_enters_the_allocation_of_a_shell(cluster: Cluster) -> None:
    """The batch host of the allocation is the controller, which runs salloc, not a node of the job."""
    with terminal(cluster.runner, "shell") as window:
        shell(window)
        (job,) = allocations(cluster)
        assert run(*entered(cluster, job), "hostname").strip() == f"{cluster.name}-train-1"
        window.type("exit\n")
        assert window.end() == 0


def test_files_pass_through_the_entry_of_a_job(cluster: Cluster, job: str, tmp_path: Path) -> None:
    """Also binary files: Slurm passes on each byte at once, not line by line."""
    *ssh, host = entered(cluster, job)
    (data := tmp_path / "data").write_bytes(bytes(range(256)) * 20_000)
    run("scp", *ssh[1:], data, f"{host}:/tmp/sent")
    run("scp", *ssh[1:], f"{host}:/tmp/sent", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data.read_bytes()
    if shutil.which("rsync"):
        run("rsync", "--rsh", shlex.join(ssh), data, f"{host}:/tmp/synced")
        run(*ssh, host, "cmp /tmp/sent /tmp/synced && rm /tmp/synced")
    run(*ssh, host, "rm /tmp/sent")


def test_forwarded_port_reaches_a_server_in_a_job(cluster: Cluster, job: str) -> None:
    """After ssh is killed, no process of the entry is left, not even a server in a session of its
    own.
    """
    *ssh, host = entered(cluster, job)
    port = free_port()
    server = "http.server --bind 127.0.0.1 8765"
    start = f"setsid python -m {server} >/dev/null 2>&1 & exec cat"
    forward = [*ssh, "-L", f"{port}:127.0.0.1:8765", host, start]
    with subprocess.Popen(forward, stdin=subprocess.PIPE) as process:
        eventually(lambda: answers(port), 60)
        process.kill()
    look = "pgrep -f '[h]ttp.server --bind|[s]shd -i'; ls -d /tmp/clusterctl-code.*"
    node = f"{cluster.name}-train-1"
    eventually(lambda: cluster.ssh(node, look, rc=None) == "", 60)


def answers(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/", timeout=10) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def test_entry_refuses_other_keys(cluster: Cluster, job: str, tmp_path: Path) -> None:
    host = entered(cluster, job)[-1]
    entry = cluster.workspace / "entries" / job
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    ssh = ["ssh", "-F", "/dev/null", "-l", cluster.user, "-o", f"ProxyCommand=sh '{entry}/connect'"]
    ssh += [
        "-o",
        f'UserKnownHostsFile="{entry}/known_hosts"',
        "-o",
        "BatchMode=yes",
        "-o",
        "IdentitiesOnly=yes",
    ]
    run(*ssh, "-i", tmp_path / "key", host, "true", rc=255)
    run(*ssh, "-i", entry / "key", host, "true")


def test_entry_of_a_job_ends_with_the_job(cluster: Cluster) -> None:
    """A connection ends at once, a later one tells why it fails, and the next `code` removes the
    entry.
    """
    (script := cluster.runner.cwd / "tasks.sh").write_text("sleep 3600\n")
    job_id = cluster.json("submit", script, "--array", "1-2")["job_id"]
    for task in (1, 2):
        cluster.job_in("RUNNING", f"{job_id}_{task}")
    assert shows(cluster("code", job_id, rc=2).stderr, "several-tasks")
    ssh = entered(cluster, f"{job_id}_2")
    assert run(*ssh, "echo $SLURM_ARRAY_TASK_ID") == "2\n"
    with subprocess.Popen(
        [*ssh, "echo in; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"in\n"
        cluster("cancel", job_id)
        assert process.wait(120) == 255
    late = subprocess.run([*ssh, "true"], capture_output=True, text=True, timeout=120, check=False)
    assert (late.returncode, re.findall("job ([0-9_]+)", late.stderr)) == (255, [f"{job_id}_2"])
    cluster.job_in("CANCELLED", f"{job_id}_2")
    assert condition(cluster.json("code", f"{job_id}_2", rc=2)["failures"][0]) == "not-running/job"
    assert not (cluster.workspace / "entries" / f"{job_id}_2").exists()
