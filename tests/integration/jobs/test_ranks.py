"""What ranks find in their environment: who they are and where they meet, whatever starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.checks import check_launcher
from clusterctl.spec.job import JobSpec
from clusterctl.util.assets import data_folder
from payload.node import task as node_task
from tests.support.messages import condition
from tests.support.played.batch import (
    HASH,
    INVENTORY,
    Batch,
    play,
    rendered,
    shell_job,
    user_script,
)
from tests.support.processes import suspend

NOISY = """\
import os, select, signal, sys, time
out = lambda text: os.write(1, text.encode() + b"\\n")
out("begun")
{body}
"""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
SHOW = "import json, os; print(json.dumps({n: v for n, v in os.environ.items() if n.isupper()}))\n"


def task(*words: str) -> list[str]:
    """The command line of a process that srun, mpirun or torchrun starts."""
    return [sys.executable, "-IS", str(data_folder("payload") / "node" / "task.py"), *words]


def rank(by: str, folder: Path, *options: str, **environment: str) -> list[str]:
    """The variables of a rank that ``by`` starts with this environment."""
    found = environment_of_rank(by, folder, *options, **environment)
    return [found[name] for name in NAMES]


def environment_of_rank(by: str, folder: Path, *options: str, **environment: str) -> dict[str, str]:
    argv = task(f"--of={by}", *options, sys.executable, "-c", SHOW)
    env = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(
        argv, env=env, cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("node", "tasks", "local_size"),
    [
        ("0", "1", "1"),
        ("0", "2(x3),1", "2"),
        ("2", "2(x3),1", "2"),
        ("3", "2(x3),1", "1"),
        ("1", "4,12(x2)", "12"),
    ],
)
def test_rank_of_srun(tmp_path, node, tasks, local_size):
    of_srun = {
        "PROCID": "5",
        "STEP_NUM_TASKS": "7",
        "LOCALID": "0",
        "NODEID": node,
        "STEP_TASKS_PER_NODE": tasks,
    }
    environment = {f"SLURM_{name}": value for name, value in of_srun.items()}
    assert rank("srun", tmp_path, **environment) == ["5", "7", "0", local_size, node]
    assert rank("srun", tmp_path, **environment, LOCAL_RANK="3")[2] == "3"  # the job's own


def test_rank_of_mpirun(tmp_path):
    of_mpirun = {"RANK": "4", "SIZE": "5", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "NODE_RANK": "0"}
    environment = {f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpirun.items()}
    environment |= {"SLURM_PROCID": "1", "SLURM_NODEID": "1"}  # of the daemon that mpirun has there
    assert rank("mpirun", tmp_path, "--per-node=2", **environment) == ["4", "5", "0", "1", "2"]


@pytest.mark.parametrize(
    ("room", "output"),
    [((0, 9, 9), "space"), ((9, 9, 0), "inodes"), ((9, 9, 9), ""), ((9, 0, 0), "")],
)
def test_warn_of_full_folder_names_the_folder_and_the_node(monkeypatch, capfd, room, output):
    numbers = dict(zip(("f_bavail", "f_files", "f_favail"), room, strict=True))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**numbers))
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    node_task.warn_of_full_folder("/tmp")
    expected = f"clusterctl: /tmp of n2 has no free {output}" if output else ""
    assert capfd.readouterr().err.partition(",")[0] == expected


def test_warn_of_full_folder_without_such_a_folder_is_silent(capfd):
    node_task.warn_of_full_folder("/no/such/folder")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "torchrun"])
def test_rank_has_the_hostname_of_its_own_node(tmp_path, launcher):
    """Launchers pass on the variable of the job's script, which runs on the first node."""
    found = environment_of_rank(launcher, tmp_path, HOSTNAME="node-1", RANK="1", WORLD_SIZE="1")
    assert found["HOSTNAME"] == socket.gethostname()


@pytest.mark.parametrize(
    ("rank_size_local", "per_node", "tasks", "nodes"),
    [
        ("0 1 0", 1, "1", "1"),
        ("1 2 0", 1, "1(x2)", "2"),
        ("3 4 1", 2, "2(x2)", "2"),
        ("4 5 0", 2, "2(x2),1", "3"),
        ("2 3 2", 3, "3", "1"),
        ("1 2 1", 4, "2", "1"),
    ],
)
def test_rank_of_mpirun_sees_slurms_view(tmp_path, rank_size_local, per_node, tasks, nodes):
    """The variables of the daemon's step on another node, and of the batch script, are replaced."""
    rank, size, local = rank_size_local.split()
    environment = {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": local,
        **dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), "0"),
        **dict.fromkeys(
            ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS"), "1"
        ),
        "SLURM_STEP_NODELIST": "n2",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_JOB_ID": "7",
    }
    found = environment_of_rank("mpirun", tmp_path, f"--per-node={per_node}", **environment)
    assert [
        found[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NTASKS", "NPROCS", "NNODES")
    ] == [*(rank, local, size, size, nodes)]
    assert found["SLURM_NODEID"] == found["NODE_RANK"]
    assert found["SLURM_TASKS_PER_NODE"] == found["SLURM_STEP_TASKS_PER_NODE"] == tasks
    assert (found["SLURM_STEP_NUM_TASKS"], found["SLURM_STEP_NODELIST"]) == (size, "n[1-3]")


def test_rank_of_mpirun_without_slurm_sees_no_slurm(tmp_path):
    found = environment_of_rank(
        "mpirun", tmp_path, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2"
    )
    assert not [name for name in found if name.startswith("SLURM_")]


def test_rank_of_torchrun(tmp_path):
    own = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    assert rank("torchrun", tmp_path, **own, SLURM_PROCID="0") == ["3", "4", "1", "2", "1"]


def shown(batch: Batch, **fields: object) -> dict[str, str]:
    """The variables of a Python program of this job."""
    script = user_script(batch.folder, "show.py", SHOW)
    rc, out, err = batch.run(rendered(JobSpec(name="j", script=script, **fields)))
    assert (rc, err) == (0, "")
    return dict(json.loads(out))


def test_ranks_meet_on_the_first_node_at_a_port_of_their_jobs(batch):
    first = shown(batch, nodes=2)
    assert first["MASTER_ADDR"] == "node-1"
    batch.environment["SLURM_JOB_ID"] = "8"
    second = shown(batch, nodes=2)
    ports = {int(one["MASTER_PORT"]) for one in (first, second)}
    assert len(ports) == 2
    assert all(65000 <= port < 65536 for port in ports)
    batch.environment["SLURM_JOB_ID"] = "9"
    own = shown(batch, nodes=2, env={"MASTER_PORT": "29500", "MASTER_ADDR": "else"})
    assert (own["MASTER_ADDR"], own["MASTER_PORT"]) == ("else", "29500")


def test_program_alone_is_rank_0_of_1(batch):
    batch.environment["RANK"] = "5"  # of the job that submitted it
    found = shown(batch)
    assert [found[name] for name in NAMES] == ["0", "1", "0", "1", "0"]
    assert not (batch.folder / "rank-logs").exists()
    assert shown(batch, env={"LOCAL_RANK": "1"})["LOCAL_RANK"] == "1"


def test_shell_script_has_no_rank_and_its_ranks_can_connect(batch):
    batch.environment |= {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1"}
    body = 'echo "${RANK-}${WORLD_SIZE-}${LOCAL_RANK-}" $MASTER_ADDR $((MASTER_PORT > 0))'
    assert batch.run(rendered(shell_job(batch, body)))[1].split() == ["node-1", "1"]


def test_torchrun_is_started_once_a_node(batch):
    batch.environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
    python = batch.folder.parent / "bin" / "agent"
    play(python, 'printf "%s\\n" "$@" "$PET_SIGNALS_TO_HANDLE"')
    script = user_script(batch.folder, "show.py", SHOW)
    job = JobSpec(
        name="j", script=script, nodes=2, tasks_per_node=2, launcher="torchrun", args=("a b",)
    )
    text = rendered(job).replace('torchrun "$python"', f"torchrun {python}")
    rc, out, err = batch.run(text)
    assert (rc, err) == (0, "")
    output = out.splitlines()
    assert output[:4] == ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    assert {"--rdzv-id=7-0", "--rdzv-backend=c10d", "--local-addr=node-1", "--no-python"} <= set(
        output
    )
    assert output[-3:-1] == [str(script), "a b"]
    assert "SIGUSR1" in output[-1]
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2" in batch.calls.read_text()


@pytest.mark.parametrize("own", [True, False], ids=["shell", "bundled"])
def test_torchrun_starts_only_python_programs(batch, own):
    job = JobSpec(name="j", bundled="train", launcher="torchrun")
    if own:
        job = shell_job(batch, "true", launcher="torchrun")
    faults = check_launcher(site_of(INVENTORY), Request.read(job))
    assert [condition(fault) for fault in faults] == ["option-invalid/torchrun"]


@pytest.mark.parametrize(
    ("body", "status", "last"),
    [
        ("sys.exit('the end')", 1, "the end"),
        ("os.write(2, b'the end\\n'); os._exit(7)", 7, "the end"),
        ("out('the end'); os.kill(os.getpid(), 9)", 137, "the end"),
        # A program may wait for all its children, and leave one of its own behind.
        (
            "\ntry:\n    while True: os.wait()\nexcept ChildProcessError: out('no child')",
            0,
            "no child",
        ),
        (
            (
                "import subprocess; subprocess.Popen(['sleep', '9'], stdout=-3, stderr=-3); "
                "out('left')"
            ),
            0,
            "left",
        ),
    ],
    ids=["exit", "status", "killed", "waits", "leaves-a-child"],
)
def test_rank_output_is_recorded_and_passed_on(batch, body, status, last):
    script = user_script(batch.folder, "noisy.py", NOISY.format(body=body))
    batch.environment["SLURM_PROCID"] = "2"
    rc, out, err = batch.run(rendered(JobSpec(name="j", script=script, nodes=2)))
    assert (rc, "begun" in out, last in out + err) == (status, True, True)
    recorded = (batch.folder / "rank-logs" / "2.log").read_text()
    assert len(recorded) == len(f"begun\n{last}\n")
    assert ("begun" in recorded, last in recorded) == (True, True)
    ends = [record.read_text().split()[1:] for record in batch.folder.glob("rank-logs/*.end")]
    code = "-9" if "os.kill" in body else str(status)
    assert ends == ([[code, "node-1"]] if status else [])


@pytest.mark.parametrize(
    ("body", "code"),
    [("exit 137", 137), ("exit 139", 139), ("kill -KILL $$", -9), ("kill -SEGV $$", -11)],
)
def test_rank_ends_as_its_program_by_a_signal_or_an_exit_code(
    body: str, code: int, tmp_path: Path
) -> None:
    """So the launcher reports a signal only if a signal has ended the program."""
    env = {"PATH": "/usr/bin:/bin", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    argv = task("--of=srun", "/bin/sh", "-c", body)
    assert subprocess.run(argv, env=env, cwd=tmp_path, check=False, timeout=60).returncode == code


@pytest.fixture
def copied(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[float], tuple[int, int, socket.socket]]]:
    """Starts the copying of a rank's output, with LINE_S. Returns its output, its log and its
    target.
    """
    with ExitStack() as stack:

        def start(line_s: float) -> tuple[int, int, socket.socket]:
            monkeypatch.setattr(node_task, "LINE_S", line_s)
            source, output = os.pipe()
            log, recorded = os.pipe()
            # Each write to the target is a datagram.
            target, written = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            stack.enter_context(target)
            stack.enter_context(written)
            arguments = (source, written.fileno(), recorded, threading.Lock())
            arguments[-1].acquire()
            threading.Thread(target=node_task.record, args=arguments, daemon=True).start()
            target.settimeout(60)
            return output, log, target

        yield start


def test_record_of_line_in_parts_is_written_whole(copied):
    """Otherwise the words of several ranks mix in a line."""
    output, log, target = copied(600)
    for part in (b"rank", b" 1 of 2\nbar 1\rbar", b" 2"):
        os.write(output, part)
        assert os.read(log, 100) == part
    os.close(output)
    assert [target.recv(100), target.recv(100)] == [b"rank 1 of 2\nbar 1\r", b"bar 2"]


def test_record_of_line_without_end_is_written_soon(copied):
    """The program waits, and its last words are those of an unfinished line."""
    output, _, target = copied(0.01)
    os.write(output, b"loading ...")
    assert target.recv(100) == b"loading ..."
    os.write(output, b"done\n")
    assert target.recv(100) == b"done\n"
    os.close(output)


@pytest.mark.parametrize("cgroup", [True, False], ids=["its-shell", "its-group"])
def test_rank_is_signalled_once_and_its_last_lines_are_kept(batch, cgroup):
    body = """
def save(*_):
    time.sleep(0.5)
    out(f"saved {len(os.read(arrived, 9))}")
    sys.exit(75)
arrived, arrives = os.pipe()
os.set_blocking(arrives, False)
signal.set_wakeup_fd(arrives)  # a byte for each signal, also where two are handled as one
signal.signal(signal.SIGTERM, save)
out("ready")
select.select([arrived], [], [], 60)  # a sleep misses a signal that arrives as it begins"""
    script = user_script(batch.folder, "noisy.py", NOISY.format(body=body))
    place = batch.folder / "cgroup"
    place.write_text(
        "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n" if cgroup else "0::/\n"
    )
    batch.environment["SLURM_JOB_ID"] = "7"
    program = batch.payload / HASH / "payload" / "node" / "task.py"
    program.write_text(program.read_text().replace("/proc/self/cgroup", str(place)))
    process = batch.start(rendered(JobSpec(name="j", script=script, nodes=2)))
    record = batch.folder / "rank-logs" / "0.log"
    while not record.exists() or "ready" not in record.read_text():
        time.sleep(0.02)
    # Slurm signals the shell where it tracks by cgroups, and else all.
    if cgroup:
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.splitlines()) == (75, ["begun", "ready", "saved 1"])
    assert record.read_text() == out


def alone(batch: Batch, by: str, line: str, **popen: Any) -> subprocess.Popen[str]:
    """A rank of two that runs a line of Python; if that says so, it is ready."""
    script = user_script(
        batch.folder, "line.py", f"import os, signal, subprocess, sys, time\n{line}\n"
    )
    argv = task(f"--of={by}", sys.executable, str(script))
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env = {**batch.environment, **ranks, "SLURM_STEP_NUM_TASKS": "2"}
    io = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | popen
    process = subprocess.Popen(argv, env=env, cwd=batch.folder, text=True, **io)
    if "'ready'" in line:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("leads", [True, False])
def test_torchrun_signals_the_group_or_the_shell_of_a_rank(batch, leads):
    """Since 2.2 the group that it starts a rank in, before that the process alone."""
    # CPython's handlers may miss what arrives as a sleep begins: a blocked signal is not missed.
    line = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [15])\nprint('ready', flush=True)\n"
        "sys.exit(75 if signal.sigtimedwait([15], 60) else 1)"
    )
    with alone(batch, "torchrun", line, start_new_session=leads) as process:
        (os.killpg if leads else os.kill)(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 75


SUPERVISED = """
from payload.node import task
task.POLL_S = 0.002
task.hold_signals()
task.wake_regularly()
pid = task.start(["sleep", "600"])
received = []
print("ready", flush=True)
while signal.SIGTERM not in received:
    assert task.supervise(pid, received.append) is None
os.kill(pid, signal.SIGKILL)
while (status := task.supervise(pid, received.append)) is None:
    pass
print(status, *received, flush=True)
"""


def test_supervise_of_a_process_that_was_suspended_reports_only_signals_that_were_sent():
    """sigtimedwait of Python returns any number if the process is stopped until the time is
    over.
    """
    line = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(data_folder('payload').parent)!r})\n"
        f"{SUPERVISED}"
    )
    argv = [sys.executable, "-c", line]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        suspend(process.pid, times=100)
        process.send_signal(signal.SIGUSR1)
        suspend(process.pid, times=100)
        process.send_signal(signal.SIGTERM)
        assert (
            process.communicate(timeout=60)[0]
            == f"-9 {signal.SIGUSR1.value} {signal.SIGTERM.value}\n"
        )


def test_signal_may_reach_a_program_and_its_shell_at_once(batch):
    """So Slurm ends the other ranks of one that failed."""
    for _ in range(5):
        line = "print('ready', flush=True)\ntime.sleep(60)"
        with alone(batch, "torchrun", line, start_new_session=True) as process:
            os.killpg(process.pid, signal.SIGTERM)
            assert process.wait(timeout=30) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("line", "status", "output"),
    [
        ("sys.exit(-1)", 255, ""),  # 127 is no signal
        ("sys.exit(147)", 147, ""),  # and 19 would stop the shell
        ("os.kill(os.getpid(), 11)", -11, ""),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("print(signal.getsignal(2) is signal.default_int_handler)", 0, "True\n"),
    ],
)
def test_rank_ends_as_its_program_ended(batch, line, status, output):
    process = alone(batch, "torchrun", line)
    assert process.communicate(timeout=60)[0] == output
    assert process.returncode == status


def test_program_has_no_signal_blocked_or_ignored(batch):
    """Python ignores SIGPIPE, and both supervisors block signals: their programs start with
    neither.
    """
    of_job = batch.run(rendered(shell_job(batch, "grep -E 'Sig(Blk|Ign)' /proc/self/status")))[1]
    env = {**batch.environment, "WORLD_SIZE": "2"}
    argv = task("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    of_rank = subprocess.run(
        argv, env=env, cwd=batch.folder, capture_output=True, text=True, check=True
    ).stdout
    for output in (of_job, of_rank):
        blocked, ignored = (int(mask, 16) for mask in output.split()[1::2])
        assert (blocked, ignored & 0xFFFFFFF) == (0, 0)  # glibc ignores two signals of its own


def test_ranks_of_torchrun_on_a_node_have_a_mig_device_each(batch):
    batch.environment["CUDA_VISIBLE_DEVICES"] = "MIG-a,MIG-b"
    process = alone(batch, "torchrun", "print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert process.communicate(timeout=60)[0] == "MIG-a\n"


def test_rank_ends_once_all_that_it_wrote_is_recorded(batch):
    """A launcher that reads late: slurmstepd kills what is left once the rank has ended."""
    # More than a pipe holds, and less than two: the program itself ends at once.
    process = alone(batch, "srun", "print('x' * 100_000, flush=True); open('ended', 'w')")
    while not (batch.folder / "ended").exists():
        time.sleep(0.02)
    time.sleep(0.5)
    assert process.poll() is None
    assert len(process.communicate(timeout=60)[0]) == 100_001
    assert (batch.folder / "rank-logs" / "0.log").stat().st_size == 100_001


def test_rank_waits_for_its_child_processes_for_a_limited_time(batch):
    process = alone(
        batch, "srun", "subprocess.Popen(['sleep', '60'])", stdout=None, start_new_session=True
    )
    try:
        assert process.wait(timeout=50) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
