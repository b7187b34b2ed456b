"""The text of sbatch scripts: golden files, and what bash makes of it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.request.user_script import UserScript
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.checks import check_launcher
from clusterctl.scheduler.sites.script import submit_options
from clusterctl.spec.job import JobSpec, Project, job_spec
from clusterctl.spec.names import FROM_RUN
from clusterctl.spec.sweep import ArgumentForm, Scaling, Sweep, sweep_arguments
from payload.node.job import Slurmstepds
from tests.support.messages import condition, refused
from tests.support.played.batch import (
    HASH,
    HOSTILE,
    INVENTORY,
    Batch,
    play,
    rendered,
    shell_job,
    user_script,
)
from tests.support.processes import eventually

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("train", "mpirun", "everything", "array", "python-ranks", "torchrun", "shell", "requeue")
OWN_LINES = """\
#!/bin/bash -e
# a comment
#SBATCH --nodes=2
#SBATCH --time=5
echo hello
#SBATCH --nodes=7
"""


def run(batch: Batch, body: str, **fields: Any) -> tuple[int, str, str]:
    """The exit status, stdout and stderr of a job whose shell script has this body."""
    return batch.run(rendered(shell_job(batch, body, **fields)))


def golden_jobs(folder: Path) -> dict[str, JobSpec]:
    shell = user_script(folder, "own.sh", OWN_LINES)
    python = user_script(folder, "it's mine.py", "print('hi')\n")
    return {
        "train": JobSpec(name="train", bundled="train", nodes=2, args=("--epochs", "3")),
        "mpirun": JobSpec(
            name="train", bundled="train", nodes=2, tasks_per_node=4, cpus=2, launcher="mpirun"
        ),
        "everything": JobSpec(
            name="probe",
            bundled="probe",
            nodes=3,
            tasks_per_node=2,
            cpus=4,
            gpus=2,
            mem=2048,
            time="25:01:01",
            partition="train",
            account="physics",
            qos="high",
            constraint="a100&nvlink",
        ),
        "array": JobSpec(name="sweep", script=python, array="0-9%2", args=("a b", "$x")),
        "python-ranks": JobSpec(name="ranks", script=python, nodes=2),
        "torchrun": JobSpec(
            name="ranks",
            script=python,
            nodes=2,
            tasks_per_node=2,
            launcher="torchrun",
            args=("a b",),
        ),
        "requeue": JobSpec(
            name="train", bundled="train", nodes=2, time=90, signal="USR1@300", requeue=True
        ),
        "shell": JobSpec(name="own", script=shell, time=1),
    }


@pytest.mark.parametrize("name", NAMES)
def test_golden(name, tmp_path, golden):
    golden(f"{name}.sbatch", rendered(golden_jobs(tmp_path)[name]))


@pytest.mark.parametrize("name", NAMES)
def test_script_is_short_and_passes_shellcheck(name):
    # One has the argument '$x'.
    argv = [
        "shellcheck",
        "--exclude=SC2016",
        GOLDEN / f"{name}.sbatch",
    ]
    assert subprocess.run(argv, capture_output=True, text=True, check=False).stdout == ""
    assert len((GOLDEN / f"{name}.sbatch").read_text().splitlines()) <= 45


def test_training_knows_the_options_that_submit_it_again():
    """Those that decide its place and limits, and no values of variables."""
    options = {"nodes": 3, "ranks": 2, "time": "90m", "mem": "4GiB", "gpus": 0, "account": "a-b"}
    more = {"requeue": False, "launcher": "mpirun", "env": {"KEY": "secret"}}
    more["slurm"] = ("--nice=1", "--hold", "--export=K=secret")
    job = JobSpec(name="t", bundled="train", args=("--lr", "1"), array="1-2", **options, **more)
    job = job.model_copy(update={"scaling": Scaling(nodes=(1, 2))})
    words = [
        *submit_options(
            job.model_copy(update={"env": {**job.env, FROM_RUN: "/r"}, "from_run": "12"})
        )
    ]
    expected = "--name=t --nodes=3 --set=ranks=2 --gpus=0 --mem=4GiB --time=1h30m".split()
    expected += [
        "--account=a-b",
        *"--slurm=--nice=1 --slurm=--hold --no-requeue --launcher=mpirun --env=KEY".split(),
    ]
    assert words == expected
    options = shlex.quote(shlex.join(["--cluster=demo", *expected]))
    assert f"CLUSTERCTL_SUBMITTED_WITH={options} " in rendered(job)


@pytest.mark.parametrize(
    ("line", "is_array"),
    [
        ("--array=0-3", True),
        ("--array 0-3", True),
        ("-a 0-3", True),
        ("-a0-3", True),
        ("-N 2 -a 1,2", True),
        ("--account=x", False),
        ("-A x", False),
        ("--nodes=2 # -a 3", False),
    ],
)
def test_array_that_the_script_asks_for_has_logs_of_its_own(tmp_path, line, is_array):
    script = user_script(tmp_path, "a.sh", f"#!/bin/bash\n#SBATCH {line}\ntrue\n")
    text = rendered(JobSpec(name="a", script=script))
    assert ("--output=stdout-%a.log" in text) is is_array
    assert ("task-$SLURM_ARRAY_TASK_ID" in text) is is_array


@pytest.mark.parametrize(
    ("name", "content", "code", "shown"),
    [
        ("a\nb.sh", b"true\n", "files-unfit/script", "can't be printed"),
        ("big.sh", b"#" * ((4 << 20) + 1), "files-unfit/script", "4 MiB"),
        ("binary.sh", b"\x7fELF\0", "files-unfit/script", "not a text file"),
        ("utf16.sh", "#!/bin/bash\n".encode("utf-16"), "files-unfit/script", "iconv -f UTF-16"),
        (
            "dos.sh",
            b"#!/bin/bash\r\n#SBATCH --nodes=2\r\nsrun hostname\r\n",
            "files-unfit/script",
            r"s/\r$//",
        ),
        ("last.sh", b"#!/bin/bash\nsrun hostname\ntrue\r\n", "files-unfit/script", r"s/\r$//"),
        ("mac.sh", b"#!/bin/bash\rsrun hostname\r", "files-unfit/script", r"s/\r/\n/g"),
        (
            "bom.sh",
            b"\xef\xbb\xbf#!/bin/bash\n#SBATCH --nodes=2\n",
            "files-unfit/script",
            r"\xef\xbb\xbf",
        ),
        (
            "bom.py",
            b"\xef\xbb\xbf#SBATCH --nodes=2\nprint()\n",
            "files-unfit/script",
            r"\xef\xbb\xbf",
        ),
        ("missing.sh", None, "file-unreadable", "missing.sh"),
        (".", None, "file-unreadable", "directory"),
    ],
)
def test_scripts_that_can_not_be_submitted(tmp_path, name, content, code, shown):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(code, UsageError, shown):
        UserScript.read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "directives"),
    [
        (
            "dos.py",
            b"#!/usr/bin/env python3\r\n#SBATCH --nodes=2\r\nprint()\r\n",
            ("#SBATCH --nodes=2",),
        ),
        ("bom.py", b"\xef\xbb\xbfprint()\n", ()),
        ("progress.sh", b"#!/bin/bash\nprintf 'a\rb'\n", ()),
    ],
)
def test_script_with_other_newlines_that_run(tmp_path, name, content, directives):
    """Python reads all newlines, and bash a carriage return within a line."""
    (tmp_path / name).write_bytes(content)
    assert UserScript.read(tmp_path / name).directives.lines == directives


@pytest.mark.parametrize("nodes", [1, 2])
def test_arguments_reach_the_program_unchanged(batch, nodes):
    script = user_script(batch.folder, "it's.py", "import sys; print(sys.argv[1:])\n")
    ran = batch.run(rendered(JobSpec(name="j", script=script, args=HOSTILE, nodes=nodes)))
    assert ran == (0, f"{list(HOSTILE)}\n", "")
    assert ("--mpi=pmix" in batch.calls.read_text()) == (nodes > 1)


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_programs_exit_status_is_the_jobs(batch, status):
    """And its folder is that in which sbatch was called."""
    assert run(batch, f"pwd; exit {status}")[:2] == (status, f"{batch.folder}\n")


@pytest.mark.parametrize(
    ("body", "status", "how"),
    [
        ("exit 139", 139, "exit"),
        ("kill -SEGV $$", 139, "SIGSEGV"),
        ("kill -35 $$", 163, "signal 35"),
    ],
)
def test_end_tells_a_signal_from_an_exit_code(batch, body, status, how):
    assert run(batch, body)[0] == status
    assert [
        (event["status"], event["how"]) for event in events(batch) if event["event"] == "end"
    ] == [(status, how)]


def test_task_of_an_array_has_a_folder_of_its_own(batch):
    """It finds what only looks like the folders of tasks."""
    batch.environment["SLURM_ARRAY_TASK_ID"] = "7"
    for name in ("task-3", "task-configs", "stdout-of-mine.log"):
        (batch.folder / name).mkdir()
    rc, out, _ = run(batch, "pwd; cat ../'my job.sh' >/dev/null; ls -d *task* std*", array="0-9")
    assert (rc, out.splitlines()) == (
        0,
        [f"{batch.folder}/task-7", "stdout-of-mine.log", "task-configs"],
    )


def test_task_of_an_array_is_requeued_by_its_number(batch):
    variables = {"ARRAY_JOB_ID": "12", "ARRAY_TASK_ID": "4", "JOB_NODELIST": "n"}
    batch.environment |= {f"SLURM_{name}": value for name, value in variables.items()}
    play(batch.folder.parent / "bin" / "scontrol", 'echo "$@" >>"$SLURM_SUBMIT_DIR/scontrol-calls"')
    assert run(batch, "exit 75", array="0-24", requeue=True)[0] == 75
    assert (batch.folder / "scontrol-calls").read_text() == "requeue 12_4\n"


@pytest.mark.parametrize("nodes", [1, 2])
def test_folders_of_a_task_are_created_on_all_its_nodes(batch, nodes):
    """If nodes share no folder, only the first node has the folders that the script creates."""
    batch.environment |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_NUM_NODES": str(nodes)}
    assert run(batch, "true", array="0-9")[0] == 0
    calls = [line for line in batch.calls.read_text().splitlines() if "job.py prepare" in line]
    assert len(calls) == nodes - 1
    # The second node has the files that were sent, but no folder of a task.
    job = batch.payload / HASH / "payload" / "node" / "job.py"
    other = batch.folder.parent / "other node"
    (other / "files" / "exp").mkdir(parents=True)
    (other / "files" / "exp" / "near").touch()
    sweep = Sweep(grid={"lr": ["1", "2"]})
    (other / "sweep-tasks.json").write_text(json.dumps(sweep.record))
    words = ["prepare", f"{other}/task-1", f"{other}/files/task-1", "exp"]
    subprocess.run([sys.executable, "-IS", job, *words], check=True, env=batch.environment, cwd="/")
    assert (other / "task-1").is_dir()
    assert (other / "files" / "task-1" / "exp" / "near").exists()
    assert (
        json.loads((other / "files" / "task-1" / "sweep-values.json").read_text()) == sweep.tasks[1]
    )


def test_program_does_not_restart_above_its_removed_folder(batch):
    job = shell_job(batch, 'pwd; rm -r "$PWD"')
    (batch.folder / "files").mkdir()
    script = job.script.rename(batch.folder / "files" / job.script.name)
    text = rendered(job.model_copy(update={"script": script}))
    assert batch.run(text)[:2] == (0, f"{batch.folder}/files\n")
    rc, _, err = batch.run(text)
    assert rc == 127
    assert f"{batch.folder}/files/my job.sh" in err


MODULE = """\
import os, pkg.data
print(__name__, os.path.relpath(os.getcwd(), os.environ["SLURM_SUBMIT_DIR"]), open("near").read().strip())
open("out", "w").close()
open("metrics.jsonl", "w").write("{}")
"""


@pytest.mark.parametrize("module", [None, "pkg.train"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("task", ["", "task-7"])
def test_program_of_a_project_starts_in_its_folder(batch, module, ranks, task):
    """It imports the project's packages. Each task of an array has its own folder."""
    for path, text in {
        "src/pkg/__init__.py": "",
        "src/pkg/data.py": "",
        "src/pkg/train.py": MODULE,
        "exp/one/near": "here",
        "exp/far": "",
        **({"exp/one/metrics.jsonl": "of a local run"} if task else {}),
    }.items():
        (batch.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (batch.folder / path).write_text(text)
    script = batch.folder / "src" / "pkg" / "train.py"
    job = JobSpec(
        name="j", script=script, tasks_per_node=ranks, **({"array": "0-9"} if task else {})
    )
    project = Project(batch.folder, "src/pkg/train.py", "exp/one", ("src",))
    batch.environment["SLURM_ARRAY_TASK_ID"] = "7"
    rc, out, err = batch.run(
        rendered(job.model_copy(update={"project": project, "run_module": module}))
    )
    start = f"{task}/exp/one" if task else "exp/one"
    assert (rc, out) == (0, f"__main__ {start} here\n"), err
    folder = batch.folder / task
    assert (folder / "exp" / "one" / "out").exists()
    assert (folder / "metrics.jsonl").read_text() == "{}"
    assert (batch.folder / "exp" / "one" / "out").exists() is not bool(task)


@pytest.mark.parametrize(
    ("bundled", "hang", "options"),
    [
        ("train", None, ["--hang=end@600"]),
        ("train", "warn", ["--hang=warn@600"]),
        ("bench", None, ["--hang=warn@600"]),
        ("bench", "end@300", ["--hang=end@300"]),
        ("train", "off", []),
    ],
)
def test_hang_ends_only_train_by_default(bundled, hang, options):
    job = JobSpec(name="j", bundled=bundled, **({"hang": hang} if hang else {}))
    (started,) = (line for line in rendered(job).splitlines() if "/job.py run " in line)
    assert [word for word in started.split() if word.startswith("--hang")] == options


@pytest.mark.parametrize("hang", ["kill", "end@", "end@0", "off@3", "warn@1234567"])
def test_wrong_mode_of_hangs_is_refused(hang):
    with refused("bad-format", UsageError):
        job_spec("train", {"hang": hang})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.pl", 'print "@ARGV\\n";'),
        ("my job", '#!/usr/bin/perl -w\nprint "@ARGV\\n";'),
        ("a.slurm", "#!/usr/bin/env -S bash -eu\necho $*"),
        ("a", "#!/usr/bin/env -S uv run --script\nimport sys\nprint(*sys.argv[1:])"),
    ],
)
def test_script_is_run_by_the_program_that_it_names(batch, name, text):
    job = JobSpec(name="j", script=user_script(batch.folder, name, f"{text}\n"), args=("-x", "$y"))
    assert batch.run(rendered(job))[:2] == (0, "-x $y\n")


SWEPT = """\
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["SWEEP_LR_X"], open("sweep-values.json").read()]))
"""


@pytest.mark.parametrize("form", [None, *ArgumentForm])
def test_task_of_a_sweep_is_started_with_its_values(batch, form):
    script = user_script(batch.folder, "p.py", SWEPT)
    values = {
        "on": "true",
        "off": "false",
        "shift": "-1e-3",
        "layers": "[64,64]",
        "text": "a='b', \"c\"\n",
    }
    sweep = Sweep(grid={"++lr-x": ["0.1", "2 $x"], **values}, form=form)
    job = JobSpec(name="j", script=script, sweep=sweep, array=sweep.array, args=("a",))
    batch.environment["SLURM_ARRAY_TASK_ID"] = "1"
    assert batch.run(rendered(job))[0] == 2  # by hand, without the list
    (batch.folder / "sweep-tasks.json").write_text(json.dumps(sweep.record))
    words, variable, noted = json.loads(batch.run(rendered(job))[1])
    assert (words, variable) == (["a", *sweep_arguments(sweep.tasks[1], form)], "2 $x")
    assert json.loads(noted) == sweep.tasks[1]


def test_job_notes_its_start_its_signals_and_its_end(batch):
    batch.environment |= {
        "SLURM_JOB_START_TIME": "1600000000",
        "SLURM_JOB_END_TIME": "1700000000",
        "SLURM_JOB_PARTITION": "train",
        "SLURM_RESTART_COUNT": "2",
    }
    body = "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done"
    process = batch.start(rendered(shell_job(batch, body)))
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    events = [json.loads(line) for line in (batch.folder / "job.events").read_text().splitlines()]
    assert [{**event, "time": event["time"] > 0} for event in events] == [
        {
            "time": True,
            "event": "start",
            "nodes": ["node-1", "node-2"],
            "restarts": 2,
            "since": 1600000000,
            "until": 1700000000,
            "job": "",
            "partition": "train",
        },
        {"time": True, "event": "signal", "signal": "SIGUSR1"},
        {"time": True, "event": "end", "status": 9, "how": "exit"},
    ]


def test_threads_follow_the_cores_of_a_task(batch):
    for environment, threads in (
        ({}, "1\n"),
        ({"SLURM_CPUS_PER_TASK": "3"}, "3 3\n"),
        ({"OMP_NUM_THREADS": "2"}, "2 3\n"),
    ):
        batch.environment |= environment
        assert run(batch, "echo $OMP_NUM_THREADS $SRUN_CPUS_PER_TASK")[1] == threads


def test_mpirun_takes_ranks_and_cores_from_the_scripts_own_lines(batch):
    play(batch.folder.parent / "bin" / "mpirun", 'cat job.hosts; echo "$@"')
    script = user_script(
        batch.folder, "p.py", "#!/usr/bin/env python3\n#SBATCH --ntasks=5 -N2 -c2\n"
    )
    text = rendered(JobSpec(name="j", script=script, launcher="mpirun"))
    batch.environment |= {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "5",
        "SLURM_CPUS_PER_TASK": "2",
    }
    output = batch.run(text)[1].splitlines()
    assert output[:2] == ["node-1 slots=3", "node-2 slots=3"]
    flags = "-np {} --hostfile job.hosts --map-by ppr:{}:node:PE=2 -x PATH"
    assert output[2].startswith(flags.format(5, 3))
    del batch.environment["SLURM_NTASKS"]  # only nodes were asked for
    assert batch.run(text)[1].splitlines()[2].startswith(flags.format(2, 1))


def test_ranks_leave_slots_for_mpi_comm_spawn(batch):
    play(batch.folder.parent / "bin" / "mpirun", 'cat job.hosts; echo "$@"')
    script = user_script(batch.folder, "p.py", "")
    job = JobSpec(name="j", script=script, nodes=2, tasks_per_node=2, ranks=1, launcher="mpirun")
    batch.environment |= {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "4",
        "SLURM_CPUS_PER_TASK": "3",
    }
    output = batch.run(rendered(job))[1].splitlines()
    assert output[:2] == ["node-1 slots=2", "node-2 slots=2"]
    assert output[2].split()[:6] == ["-np", "1", "--hostfile", "job.hosts", "--map-by", "slot:PE=3"]


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("p.sh", {"launcher": "mpirun"}, "mpirun -n 3"),
        ("p.py", {}, "--launcher mpirun"),
        ("p.py", {"launcher": "torchrun"}, "--launcher mpirun"),
        ("p.py", {"launcher": "mpirun", "nodes": 1}, "--tasks-per-node"),
        ("p.py", {"launcher": "mpirun"}, "--nodes"),
    ],
    ids=["shell", "srun", "torchrun", "one-task", "too-many"],
)
def test_ranks_that_mpirun_does_not_start_are_refused(batch, name, options, word):
    job = JobSpec(
        name="j", script=user_script(batch.folder, name, ""), ranks=3, **{"nodes": 2, **options}
    )
    (fault,) = check_launcher(site_of(INVENTORY), Request.read(job))
    assert condition(fault) == "option-invalid/ranks"
    assert word in str(fault.fix)


def signalled(batch: Batch, job: JobSpec, number: int, log: str = "/dev/null") -> tuple[int, str]:
    """The exit status of a job that gets a signal when it is ready, and what it writes then."""
    process = batch.start(f"{rendered(job).rstrip()} 2>{log}\n")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_script_that_opens_its_output_anew_does_not_empty_the_log(batch, tmp_path):
    """As `echo text > /dev/stderr`, `tee /dev/stderr` and `cp FILE /dev/stdout` do."""
    job = shell_job(
        batch, "echo one; echo two >/dev/stdout; echo three | tee /dev/stderr; echo four; exit 3"
    )
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    process = batch.start(f"{rendered(job).rstrip()} >>{out} 2>>{err}\n")
    assert process.wait(30) == 3
    assert (out.read_text(), err.read_text()) == ("one\ntwo\nthree\nfour\n", "three\n")


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT", "HUP"])
def test_signals_are_passed_on(batch, name):
    body = f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
    assert signalled(batch, shell_job(batch, body), signal.Signals[f"SIG{name}"]) == (
        9,
        f"got {name}\n",
    )


def test_script_waits_for_a_program_that_handles_the_signal(batch):
    job = shell_job(
        batch, "trap 'echo noted' USR1; echo ready; for i in {1..20}; do sleep 0.05; done; exit 5"
    )
    assert signalled(batch, job, signal.SIGUSR1) == (5, "noted\n")


def test_requeueable_job_gets_a_notice_before_its_time_limit(tmp_path):
    text = rendered(JobSpec(name="j", bundled="train", requeue=True))
    assert "#SBATCH --requeue\n#SBATCH --signal=B:USR1@60\n" in text
    script = user_script(tmp_path, "own.sh", "#!/bin/bash\n#SBATCH --signal=B:TERM@90\ntrue\n")
    assert "USR1@60" not in rendered(JobSpec(name="own", script=script, requeue=True))
    script = user_script(
        tmp_path, "note.sh", "#!/bin/bash\n#SBATCH --time=9 # without --signal\ntrue\n"
    )
    assert "USR1@60" in rendered(JobSpec(name="note", script=script, requeue=True))
    script = user_script(tmp_path, "minute.sh", "#!/bin/bash\n#SBATCH --time=00:01:00\ntrue\n")
    assert "USR1@20\n" in rendered(JobSpec(name="minute", script=script, requeue=True))
    assert "USR1@20\n" in rendered(JobSpec(name="short", bundled="train", requeue=True, time="1"))
    assert "#SBATCH --signal=B:INT@9\n" in rendered(
        JobSpec(name="own", script=script, signal="INT@9")
    )


@pytest.mark.parametrize(
    ("status", "requeue", "again"),
    [
        (75, True, True),
        (75, False, False),
        (1, True, True),
        (137, True, True),
        (0, True, False),
        (2, True, False),
    ],
)
def test_program_is_requeued_by_its_exit_code(batch, status, requeue, again):
    """Of an array, only the task itself. A usage error would come again."""
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    play(batch.folder.parent / "bin" / "scontrol", 'echo "$@" >>"$SLURM_SUBMIT_DIR/scontrol-calls"')
    assert run(batch, f"exit {status}", requeue=requeue)[0] == status
    batch.environment |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    run(batch, f"exit {status}", requeue=requeue, array="0-3")
    calls = batch.folder / "scontrol-calls"
    assert (calls.read_text() if calls.exists() else "") == (
        "requeue 12\nrequeue 12_3\n" if again else ""
    )
    last = events(batch)[-1]
    assert last["event"] == ("requeue" if again else "stop" if status == 2 else "end")
    # The script's own exit code is no signal.
    assert last.get("code", 0) == (137 if status == 137 else 0)


@pytest.mark.parametrize(
    ("state", "again"),
    [
        ("RUNNING None", True),
        ("COMPLETING TimeLimit", True),
        ("", True),
        ("COMPLETING None", False),
    ],
)
def test_job_that_was_cancelled_is_not_requeued(batch, state, again):
    play(batch.folder.parent / "bin" / "squeue", f"echo >>squeue-calls; echo '{state}'")
    play(batch.folder.parent / "bin" / "scontrol", 'echo "$@" >>scontrol-calls')
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    assert run(batch, "exit 75", requeue=True)[0] == 75
    # Each question takes a tenth of a second, in which nothing runs.
    assert (batch.folder / "squeue-calls").read_text() == "\n"
    assert (batch.folder / "scontrol-calls").exists() == again


@pytest.mark.parametrize("requeue", [True, False])
def test_end_without_a_slurmstepd_requeues_the_job(batch, requeue):
    """Otherwise the completed job would stay RUNNING until slurmctld misses it."""
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    play(batch.folder.parent / "bin" / "scontrol", 'echo "$@" >>"$SLURM_SUBMIT_DIR/scontrol-calls"')
    text = rendered(shell_job(batch, "echo ran; kill -9 $(ps -o ppid= -p $PPID)", requeue=requeue))
    slurmstepd = '#!/bin/bash\n[[ $STEP ]] || { STEP=1 bash "$0" & wait; exit; }\n'
    assert batch.run(text.replace("#!/bin/bash\n", slurmstepd, 1))[:2] == (-signal.SIGKILL, "ran\n")
    calls = batch.folder / "scontrol-calls"
    assert calls.exists() is requeue
    if requeue:
        assert calls.read_text() == "requeue 12\n"
        batch.environment["SLURM_RESTART_COUNT"] = "1"
        rc, out, _ = batch.run(text)
        assert (rc, "ran" in out) == (0, False)


def events(batch: Batch) -> list[dict[str, Any]]:
    """The events of a job."""
    return [json.loads(line) for line in (batch.folder / "job.events").read_text().splitlines()]


def attempts(batch: Batch, body: str, count: int, **fields: Any) -> list[str]:
    """Run a job with --requeue and restart it. Return its events after each end."""
    play(batch.folder.parent / "bin" / "scontrol", "true")
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    for restart in range(count):
        batch.environment["SLURM_RESTART_COUNT"] = str(restart)
        run(batch, body, requeue=True, **fields)
    return [event["event"] for event in events(batch) if event["event"] not in ("start", "end")]


def test_job_that_fails_alike_three_times_ends(batch):
    assert attempts(batch, "kill -SEGV $$", 3) == ["requeue", "requeue", "stop"]
    last = events(batch)[-1]
    assert (last["reason"], last["kind"]) == ("no-progress", "SIGSEGV")


def test_job_with_newer_checkpoints_is_restarted(batch):
    body = "mkdir -p checkpoint-$SLURM_RESTART_COUNT; exit 1"
    assert attempts(batch, body, 5) == ["requeue"] * 5
    assert [event["progress"][0] for event in events(batch) if event["event"] == "requeue"] == [
        *range(5)
    ]


@pytest.mark.parametrize(
    ("late_s", "ends"), [(0, ["requeue", "requeue", "stop"]), (900, 3 * ["requeue"])]
)
def test_checkpoint_without_a_number_is_progress_unless_it_is_written_at_the_start(
    batch, late_s, ends
):
    newer = f"touch -d @$((`date +%s` + {late_s} + 9 * SLURM_RESTART_COUNT)) last.ckpt"
    assert attempts(batch, f"{newer}; exit 1", 3) == ends


def test_chain_ends_after_its_time(batch):
    assert attempts(batch, "sleep 0.6; exit 75", 2, chain="1s") == ["requeue", "stop"]
    assert events(batch)[-1]["reason"] == "chain-over"


def test_attempt_without_an_end_has_lost_its_nodes(batch):
    """The lost node is recorded at the next start, whose steps have other numbers than before."""
    play(batch.folder.parent / "bin" / "sinfo", "printf '%s\\n' 'node-1 mixed' 'node-2 down+drain'")
    begun = {"time": 5, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1", "node-2"]}
    (batch.folder / "job.events").write_text(json.dumps(begun) + "\n")
    (batch.folder / "rank-logs").mkdir()
    (batch.folder / "rank-logs" / "7.end").touch()
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3"}
    assert run(batch, "test ! -e rank-logs/7.end")[0] == 0
    start = next(event for event in events(batch) if event["restarts"] == 3)
    assert (start["kind"], start["suspects"]) == ("loss of node-2", ["node-2"])
    empty = [call for call in batch.calls.read_text().splitlines() if call.endswith(" true")]
    assert len(empty) == 2 * 3


@pytest.mark.parametrize(
    ("restarts", "drained"),
    [
        # An attempt has recorded no start: a node has refused it.
        (2, {"node-2": "clusterctl health: /shared is not mounted"}),
        (1, None),
    ],
)
def test_start_has_the_nodes_that_were_drained_before_it(batch, restarts, drained):
    now = int(time.time())
    rows = [
        f"node-2|{now}|clusterctl health: /shared is not mounted",
        f"node-3|{now - 9000}|disk",
        "node-4|Unknown|none",
    ]
    show = f"[[ $* != *states=drain* ]] || printf '%s\\n' {shlex.join(rows)}"
    play(batch.folder.parent / "bin" / "sinfo", show)
    begun = {"time": now - 60, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1"]}
    ended = {"time": now - 50, "event": "end", "status": 1}
    (batch.folder / "job.events").write_text(
        "".join(json.dumps(row) + "\n" for row in (begun, ended))
    )
    batch.environment |= {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "node-1",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    assert run(batch, "true")[0] == 0
    start = next(event for event in events(batch) if event.get("restarts") == restarts)
    assert start.get("drained") == drained


def test_node_that_died_after_its_job_py_is_lost(batch):
    play(batch.folder.parent / "bin" / "sinfo", "printf '%s\\n' 'node-1 down+drain' 'node-2 idle'")
    begun = {"time": 5, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1", "node-2"]}
    killed = {"time": 6, "event": "unsupervised", "reason": "RaisedSignal:9(Killed)"}
    (batch.folder / "job.events").write_text(
        "".join(json.dumps(row) + "\n" for row in (begun, killed))
    )
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    assert run(batch, "true")[0] == 0
    start = next(event for event in events(batch) if event.get("restarts") == 1)
    assert (start["kind"], start["suspects"]) == ("loss of node-1", ["node-1"])


SLURMD = "NodeName={0} Arch=x86_64 BootTime=5 SlurmdStartTime={1} LastBusyTime=9"


@pytest.mark.parametrize(
    ("second", "earlier", "kind"),
    [
        # The node of the previous attempt was restarted, and answers again.
        (70, [], "loss of node-2"),
        (3, [], "no recorded end on node-1,node-2"),
        (3, [{"event": "unsupervised", "reason": "RaisedSignal:9(Killed)"}], "end of job.py"),
        # A node that is restarted later is not to hide that job.py was killed, or how the attempt
        # ended.
        (70, [{"event": "unsupervised", "reason": "RaisedSignal:9(Killed)"}], "end of job.py"),
        (70, [{"event": "signal", "signal": "SIGTERM", "state": "PREEMPTED"}], ""),
        (70, [{"event": "end", "status": 1}], ""),
    ],
)
def test_attempt_without_an_end_names_failed_nodes_only(batch, second, earlier, kind):
    nodes = [SLURMD.format("node-1", 3), SLURMD.format("node-2", second)]
    play(batch.folder.parent / "bin" / "sinfo", "printf '%s\\n' 'node-1 idle' 'node-2 idle'")
    show = "printf '%s\\n' " + shlex.join(nodes)
    play(batch.folder.parent / "bin" / "scontrol", f"[[ $* != *'show node '* ]] || {show}")
    begun = {"time": 5, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1", "node-2"]}
    rows = [begun, *({"time": 6, **event} for event in earlier)]
    (batch.folder / "job.events").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch.environment |= {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "node-1",
        "SLURM_RESTART_COUNT": "1",
    }
    assert run(batch, "true")[0] == 0
    start = next(event for event in events(batch) if event.get("restarts") == 1)
    assert start.get("kind", "").startswith(kind)
    assert bool(start.get("kind")) == bool(kind)


@pytest.mark.parametrize(
    ("reason", "earlier", "again"),
    [
        ("RaisedSignal:9(Killed)", "", True),
        ("NonZeroExitCode", "", True),
        # A person has cancelled the job.
        ("None", "", False),
        ("RaisedSignal:9(Killed)", '{"time": 9e9, "event": "signal", "signal": "SIGTERM"}', False),
        ("RaisedSignal:9(Killed)", '{"time": 9e9, "event": "end", "status": 1}', False),
    ],
)
def test_job_whose_job_py_was_killed_is_requeued_by_telemetry(batch, reason, earlier, again):
    batch.has_telemetry(TELEMETRY)
    batch.shorten("requeue", "UNSUPERVISED_S", 0.5)
    play(batch.folder.parent / "bin" / "scontrol", 'echo "$@" >>scontrol-calls')
    play(batch.folder.parent / "bin" / "squeue", f"echo {shlex.quote(reason)}")
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1", "SLURM_NODEID": "0"}
    wait = "until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done"
    note = f"echo {shlex.quote(earlier)} >>job.events" if earlier else "true"
    run(batch, f"{wait}; {note}; kill -KILL $PPID", requeue=True)
    samples = batch.folder / "telemetry" / "node-1.jsonl"
    eventually(lambda: samples.read_text().endswith("end\n"))
    calls = batch.folder / "scontrol-calls"
    assert calls.exists() is again
    if again:
        assert calls.read_text() == "requeue 12\n"
        assert (events(batch)[-1]["event"], events(batch)[-1]["reason"]) == ("unsupervised", reason)


def test_job_that_saves_at_once_again_and_again_is_not_restarted_without_end(batch):
    assert attempts(batch, "exit 75", 3) == ["requeue", "requeue", "stop"]
    last = events(batch)[-1]
    assert (last["reason"], last["kind"]) == ("no-progress", "saved")
    assert [event["reason"] for event in events(batch) if event["event"] == "requeue"] == [
        "saved"
    ] * 2


@pytest.mark.parametrize(
    ("body", "until"),
    [
        # Its progress is known.
        ("mkdir -p checkpoint-$SLURM_RESTART_COUNT; exit 75", 0),
        # It was told to save. Its checkpoints are elsewhere.
        ("trap 'exit 75' USR1; kill -USR1 $PPID; while :; do sleep 0.05; done", 0),
        # It knows its time limit.
        ("exit 75", 1),
    ],
)
def test_job_that_saves_its_work_when_it_is_due_is_restarted(batch, body, until):
    batch.environment["SLURM_JOB_END_TIME"] = str(until)
    assert [name for name in attempts(batch, body, 4) if name != "signal"] == ["requeue"] * 4


def notified(batch, body, **fields):
    """A job with --requeue after the notice before its time limit: status, stderr, and its signal
    event.
    """
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    batch.environment.setdefault("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    play(batch.folder.parent / "bin" / "squeue", STEPS)
    play(batch.folder.parent / "bin" / "scancel", 'echo "$@" >scancel-call')
    play(batch.folder.parent / "bin" / "scontrol", "true")
    rc, _, err = run(batch, body, requeue=True, **fields)
    return rc, err, next(event for event in events(batch) if event["event"] == "signal")


@pytest.mark.parametrize(
    ("trap", "status"), [("", 0), ("trap 'exit 75' USR1;", 75), ("trap '' USR1;", 0)]
)
def test_notice_before_the_time_limit_reaches_only_programs_that_handle_it(batch, trap, status):
    """It would end other programs before their time is over."""
    tell = "kill -USR1 $PPID; until grep -q USR1 job.events; do sleep 0.05; done; sleep 0.5; exit 0"
    rc, err, event = notified(batch, f"{trap} {tell}")
    assert (rc, event["notice"]) == (status, True)
    assert ("does not handle SIGUSR1" in err) is (not trap)
    assert event.get("ignored", False) is (not trap)


def test_signal_other_than_the_warning_reaches_the_program(batch):
    """A person has sent them, at any time."""
    batch.environment["SLURM_JOB_END_TIME"] = str(int(time.time()) + 9000)
    rc, err, event = notified(batch, "kill -USR1 $PPID; exec sleep 20")
    assert (rc, event.get("notice")) == (128 + signal.SIGUSR1, None)
    assert "does not handle" not in err


def test_job_that_lost_a_node_three_times_does_not_start(batch):
    play(batch.folder.parent / "bin" / "sinfo", "echo node-1 down")
    begun = {"time": 5, "event": "start", "restarts": 1, "until": 0, "nodes": ["node-1"]}
    lost = {**begun, "kind": "loss of node-1"}
    (batch.folder / "job.events").write_text(
        "".join(json.dumps(row) + "\n" for row in (begun, lost, lost))
    )
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3"}
    assert run(batch, "touch started", requeue=True)[0] == 1
    assert not (batch.folder / "started").exists()
    assert events(batch)[-1]["reason"] == "no-progress"


@pytest.mark.parametrize(
    ("job", "restart", "status", "runs"),
    [
        ("12", 1, 0, False),
        ("12", 1, 7, True),
        ("12", 0, 0, False),
        ("12", 0, 7, True),
        ("11", 0, 0, True),
    ],
)
def test_completed_job_does_not_run_twice(batch, job, restart, status, runs):
    """A slurmctld that is killed forgets the end of a job, even its start, and starts the job again
    later.

    Another job may have been submitted in the same folder.
    """
    play(batch.folder.parent / "bin" / "sinfo", "echo node-1 idle")
    batch.environment["SLURM_JOB_ID"] = job
    assert run(batch, f"exit {status}")[0] == status
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": str(restart)}
    assert run(batch, "touch started", requeue=True)[0] == 0
    assert (batch.folder / "started").exists() is runs


LIST_HOSTS = r"[[ $1 != show ]] && echo $@ >>scontrol-calls || printf '%s\n' node-2 node-3"


NODE_2_LOST = "mkdir rank-logs; echo 9 -9 node-2 >rank-logs/1.end; exit 14"


def write_failure_of_node_2(batch):
    """Let job 12 have failed once because of node-2, and be in its ninth attempt."""
    begun = {"time": 5, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1"]}
    again = {
        "time": 6,
        "event": "requeue",
        "kind": "SIGBUS",
        "suspects": ["node-2"],
        "progress": [1, 0, 0],
    }
    rows = (begun, again, {"time": 6, "event": "excluded", "nodes": ["node-2"]})
    (batch.folder / "job.events").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch.environment |= {
        "SLURM_JOB_ID": "12",
        "SLURM_RESTART_COUNT": "8",
        "SLURM_JOB_NODELIST": "node-2",
        "SLURM_JOB_NUM_NODES": "2",
    }


@pytest.mark.parametrize("excluded", [True, False])
def test_node_with_two_failures_is_excluded(batch, excluded):
    """Unless Slurm says that too few nodes would remain that satisfy the job.

    The watcher has lifted an earlier exclusion.
    """
    play(batch.folder.parent / "bin" / "squeue", "echo 'RUNNING None 8 node-9'")
    play(batch.folder.parent / "bin" / "scontrol", 'echo "$@" >>scontrol-calls')
    play(
        batch.folder.parent / "bin" / "sbatch",
        f'echo "$@" | tee sbatch-call >&2; {str(excluded).lower()}',
    )
    write_failure_of_node_2(batch)
    stderr = run(batch, NODE_2_LOST, requeue=True)[2]
    calls = (batch.folder / "scontrol-calls").read_text().splitlines()
    assert calls == [
        "requeue 12",
        *(["update jobid=12 excnodelist=node-9,node-2"] if excluded else []),
    ]
    asked = (batch.folder / "sbatch-call").read_text()
    assert asked == f"--test-only --exclude=node-9,node-2 --nodes=2 {batch.folder}/job.sbatch\n"
    # The answer would look like a failure of the job.
    assert asked not in stderr
    assert (events(batch)[-1]["event"] == "excluded") is excluded


def test_node_that_is_excluded_already_is_not_excluded_again(batch):
    """Its user, or an earlier attempt, has excluded the node."""
    play(batch.folder.parent / "bin" / "squeue", "echo 'RUNNING None 8 node-[2-3]'")
    play(batch.folder.parent / "bin" / "scontrol", LIST_HOSTS)
    write_failure_of_node_2(batch)
    run(batch, NODE_2_LOST, requeue=True)
    assert (batch.folder / "scontrol-calls").read_text() == "requeue 12\n"


LIST_FILES = """
run() {{ while [[ $1 == -* ]]; do shift; done; "$@"; }}
if [[ $* == *'sh -c'* ]]; then
    SLURMD_NODENAME=node-1 run "$@"
    {fault}
    SLURMD_NODENAME=node-2 run "$@"
else
    run "$@"
fi"""


@pytest.mark.parametrize(
    ("fault", "event", "kind", "suspects"),
    [
        ("true", "stop", "exit code 127", []),
        ("rm 'my job.sh'", "requeue", "missing files on node-2", ["node-2"]),
        ("exit 1", "stop", "exit code 127", []),
    ],
)
def test_node_that_lacks_files_has_failed(batch, fault, event, kind, suspects):
    """If all nodes have the same files, the program itself can't be started."""
    play(batch.folder.parent / "bin" / "srun", LIST_FILES.format(fault=fault))
    batch.environment["SLURM_JOB_ID"] = "12"
    assert run(batch, "exit 127", requeue=True)[0] == 127
    last = events(batch)[-1]
    assert (last["event"], last["kind"], last["suspects"]) == (event, kind, suspects)


STEPS = """\
if [[ $* == *--steps* ]]; then
    printf '12.%s\n' '0 telemetry' '1 my python' 'batch batch' 'extern extern'
else
    echo RUNNING None
fi"""


def test_hang_ends_the_ranks_and_the_program(batch):
    """A signal to the whole job would cancel the job, and telemetry ends by itself."""
    play(batch.folder.parent / "bin" / "squeue", STEPS)
    play(batch.folder.parent / "bin" / "scancel", 'echo "$@" >scancel-call')
    play(batch.folder.parent / "bin" / "scontrol", "true")
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    job = shell_job(batch, "echo '{}' >hang.json; exec sleep 60", requeue=True)
    assert batch.run(rendered(job))[0] == 137
    assert (batch.folder / "scancel-call").read_text() == "--signal=KILL 12.1\n"
    assert (events(batch)[-1]["event"], events(batch)[-1]["reason"]) == ("requeue", "hang")


ABORTED = """
echo "$@" >>"$PLAYER_CALLS"
while [[ $1 == -* ]]; do shift; done
[[ $* == *task.py* ]] || exec "$@"
echo 'srun: Job step aborted: Waiting up to 32 seconds for job step to finish.' >&2
exec sleep 60"""


def test_srun_that_has_aborted_its_step_and_waits_is_killed(batch):
    """srun itself would wait for half a minute. Nothing shows that a slurmstepd is lost."""
    batch.shorten("job", "ABORTED_S", 0.0)
    play(batch.folder.parent / "bin" / "srun", ABORTED)
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    job = JobSpec(name="j", script=user_script(batch.folder, "p.py", ""), nodes=2, requeue=True)
    assert batch.run(rendered(job).rstrip() + " 2>stderr.log\n")[0] == 137
    last = events(batch)[-1]
    assert (last["event"], last["kind"], last["suspects"]) == ("requeue", "abort by srun", [])


# srun with two ranks. The failure of rank 1 ends the step, but not rank 0.
ONE_FAILS = """
echo "$@" >>"$PLAYER_CALLS"
while [[ $1 == -* ]]; do shift; done
[[ $* == *task.py* ]] || SLURM_STEP_ID=0 exec "$@"
export SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" || echo "srun: error: node-1: task 1: Killed" >&2
echo 'srun: Job step aborted: Waiting up to 32 seconds for job step to finish.' >&2
wait $first
exit 143"""
RANK_1_DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
print("waits for rank 1", flush=True)
time.sleep(60)
"""


def test_ranks_that_handle_sigterm_are_killed_after_another_rank_failed(batch):
    """Slurm would kill them only after 30 s. The rank that failed first is the cause."""
    batch.shorten("job", "ABORTED_S", 0.5)
    batch.shorten("task", "POLL_S", 0.05)
    batch.has_telemetry("sleep 60")
    play(batch.folder.parent / "bin" / "srun", ONE_FAILS)
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    program = user_script(batch.folder, "p.py", RANK_1_DIES)
    job = JobSpec(name="j", script=program, nodes=1, tasks_per_node=2, requeue=True)
    assert batch.run(rendered(job).rstrip() + " 2>stderr.log\n")[0] == 137
    last = events(batch)[-1]
    assert (last["event"], last["kind"], last["place"]) == (
        "requeue",
        "SIGKILL",
        "rank 1 on node-1",
    )
    assert last["suspects"] == ["node-1"]
    assert (batch.folder / "rank-logs" / "0.log").read_text() == "waits for rank 1\n"


# Ranks without MPI: srun does not notice the loss. A round may be too short for telemetry under
# load.
KILLED_SLURMSTEPDS = """
import itertools, os, socket, time
for number in itertools.count(1):
    with socket.socket(socket.AF_UNIX) as slurmstepd:
        slurmstepd.bind(f"{os.environ['SPOOL']}/node-1_12.{number}")
        time.sleep(0.3)
"""


@pytest.fixture
def spool() -> Iterator[Path]:
    """A folder with a short path, because the path of a socket is limited."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_srun_that_does_not_notice_a_lost_slurmstepd_is_killed(batch, spool):
    batch.shorten("job", "ABORTED_S", 0.0)
    batch.shorten("task", "POLL_S", 0.05)
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1", "SPOOL": str(spool)}
    program = user_script(batch.folder, "p.py", KILLED_SLURMSTEPDS)
    job = JobSpec(name="j", script=program, nodes=2, requeue=True)
    assert batch.run(rendered(job).rstrip() + " 2>stderr.log\n")[0] == 137
    assert events(batch)[-1]["kind"] == "loss of slurmstepd"
    (cause,) = [each for each in events(batch) if each["event"] == "cause"]
    assert (cause["code"], "node-1" in cause["text"]) == ("lost-slurmstepd", True)


def test_program_goes_on_if_the_step_of_telemetry_is_aborted(batch):
    """telemetry.log has the messages of telemetry's own srun."""
    batch.shorten("job", "ABORTED_S", 0.0)
    batch.shorten("task", "POLL_S", 0.05)
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    text = (
        "import time\n"
        "open('telemetry.log', 'a').write('srun: Job step aborted: Waiting up to 32 seconds')"
    )
    program = user_script(batch.folder, "p.py", f"{text}\ntime.sleep(1)\n")
    job = JobSpec(name="j", script=program, nodes=2, requeue=True)
    assert batch.run(rendered(job).rstrip() + " 2>stderr.log\n")[0] == 0


@pytest.mark.parametrize(
    ("is_removed", "step", "lost"), [(0, 3, ["12.3"]), (1, 3, []), (0, 1, ["12.9"])]
)
def test_slurmstepd_with_an_unused_socket_is_lost(spool, is_removed, step, lost):
    """A slurmstepd that ends by itself removes its socket after the end. Step 1 is that of
    telemetry.
    """
    stepds = Slurmstepds("12", "1")
    path = spool / f"node-1_12.{step}"
    with socket.socket(socket.AF_UNIX) as slurmstepd, socket.socket(socket.AF_UNIX) as later:
        slurmstepd.bind(str(path))
        assert [stepds.killed(), stepds.killed()] == [[], []]
        # A user's own step in the running job.
        later.bind(str(spool / "node-1_12.9"))
        stepds.killed()
    assert stepds.killed() == []
    if is_removed:
        path.unlink()
    assert [stepds.killed(), stepds.killed()] == [lost, []]


CANCELLED = """
while [[ $1 == -* ]]; do shift; done
[[ $* == *task.py* ]] || exec "$@"
trap "echo 'srun: Job step aborted: Waiting up to 32 seconds for job step to finish.' >&2" TERM
echo ready
for i in {1..40}; do sleep 0.05; done
exit 7"""


def test_ranks_of_a_cancelled_job_have_time_to_save(batch):
    """srun prints the same message then, and at a time limit."""
    batch.shorten("job", "ABORTED_S", 0.0)
    play(batch.folder.parent / "bin" / "srun", CANCELLED)
    job = JobSpec(name="j", script=user_script(batch.folder, "p.py", ""), nodes=2)
    assert signalled(batch, job, signal.SIGTERM, "stderr.log") == (7, "")


SAVING = """
while [[ $1 == -* ]]; do shift; done
[[ $* == *task.py* ]] || exec "$@"
trap 'exit 137' TERM
printf %s "$LINE" >&2
until [[ -z $LINE ]] || grep -q CANCELLED stderr.log; do sleep 0.05; done
echo ready
until [[ -s scancel-call ]]; do sleep 0.05; done
exit 75"""
LINE = "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-27T06:34:36{} ***\n"


@pytest.mark.parametrize(
    ("line", "state", "status", "asked"),
    [
        ("", "RUNNING None", 75, ["--steps 1", "scancel 1"]),
        (LINE.format(""), "RUNNING None", 75, [" 1", "--steps 2", "scancel 2"]),
        (LINE.format(""), "COMPLETING None", 137, [" 1"]),
        (LINE.format(" DUE TO TIME LIMIT"), "COMPLETING TimeLimit", 137, []),
    ],
    ids=["kill", "scancel-batch", "cancel", "time-limit"],
)
def test_ranks_and_not_srun_get_sigterm(batch, line, state, status, asked):
    """At SIGTERM, srun itself kills its ranks. If Slurm ends the job, it also signals the ranks.

    asked: the requests to Slurm, with the number of signals that are recorded before each.
    """
    count = '$(grep -c SIGTERM job.events)" >>asked'
    squeue = f'step=; [[ $* != *--steps* ]] || step=--steps; echo "$step {count}\n{STEPS}'
    play(batch.folder.parent / "bin" / "srun", SAVING)
    play(batch.folder.parent / "bin" / "squeue", squeue.replace("RUNNING None", state))
    play(
        batch.folder.parent / "bin" / "scancel",
        f'echo "scancel {count}; echo gone >&2; echo "$@" >scancel-call',
    )
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1", "LINE": line}
    job = JobSpec(name="j", script=user_script(batch.folder, "p.py", ""), nodes=2)
    (batch.folder / "asked").touch()
    assert signalled(batch, job, signal.SIGTERM, "stderr.log") == (status, "")
    assert (batch.folder / "asked").read_text().splitlines() == asked
    assert "gone" not in (batch.folder / "stderr.log").read_text()
    if status == 75:
        assert (batch.folder / "scancel-call").read_text() == "--signal=TERM 12.1\n"


def test_script_goes_on_after_a_step_was_aborted(batch):
    batch.shorten("job", "ABORTED_S", 0.0)
    message = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
    job = shell_job(batch, f"echo '{message}' >&2; sleep 2; exit 7")
    assert batch.run(rendered(job).rstrip() + " 2>stderr.log\n")[0] == 7


SQUEUE = "echo RUNNING None {restarts} '(null)'"


def test_requeue_that_fails_leaves_the_programs_exit_status(batch):
    play(batch.folder.parent / "bin" / "scontrol", "echo refused >&2; exit 1")
    play(batch.folder.parent / "bin" / "squeue", SQUEUE.format(restarts=0))
    batch.environment["SLURM_JOB_ID"] = "12"
    rc, _, err = run(batch, "exit 75", requeue=True)
    assert (rc, err.splitlines()[-1]) == (75, "refused")


@pytest.mark.parametrize(("state", "again"), [("RUNNING", True), ("COMPLETING", False)])
def test_requeue_is_repeated_until_slurmctld_answers(batch, state, again):
    """Unless the job was cancelled meanwhile."""
    away = (
        '[[ $1 == requeue ]] || exit 0; mkdir away 2>/dev/null && exit 1; echo "$@" '
        ">>scontrol-calls"
    )
    play(batch.folder.parent / "bin" / "scontrol", away)
    play(
        batch.folder.parent / "bin" / "squeue",
        f"[[ ! -e away ]] || s={state}; echo ${{s:-RUNNING}} None 0",
    )
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    assert run(batch, "exit 75", requeue=True)[0] == 75
    assert (batch.folder / "away").exists()
    assert (batch.folder / "scontrol-calls").exists() is again


def test_job_whose_start_is_not_recorded_is_not_requeued(batch):
    """Its disk is full."""
    play(batch.folder.parent / "bin" / "scontrol", 'test "$1" != requeue || touch requeued')
    begun = {"time": 5, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1"]}
    again = {"time": 6, "event": "requeue", "kind": "SIGBUS", "suspects": [], "progress": [1, 0, 0]}
    (batch.folder / "job.events").write_text(
        "".join(json.dumps(row) + "\n" for row in (begun, again))
    )
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    assert (
        run(batch, "cp job.events before; head -n 2 before >job.events; exit 7", requeue=True)[0]
        == 7
    )
    assert not (batch.folder / "requeued").exists()


@pytest.mark.parametrize(("restarts", "last"), [(2, "end"), (1, "requeue"), (0, "requeue")])
def test_attempt_that_slurm_has_replaced_requeues_nothing(batch, restarts, last):
    """Its node was cut off, and Slurm has started the job elsewhere.

    A slurmctld that was killed may have forgotten the start of this attempt. Then nothing has
    replaced it.
    """
    play(batch.folder.parent / "bin" / "scontrol", 'test "$1" != requeue || touch requeued')
    play(batch.folder.parent / "bin" / "squeue", SQUEUE.format(restarts=restarts))
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    assert run(batch, "exit 1", requeue=True)[0] == 1
    assert (batch.folder / "requeued").exists() is (last == "requeue")
    assert events(batch)[-1]["event"] == last


def test_attempt_that_ended_after_sigterm_has_lost_no_node(batch):
    """Slurm, or a person, has ended it: for a job of higher priority, for example."""
    play(batch.folder.parent / "bin" / "sinfo", "echo node-1 idle")
    begun = {"time": 5, "event": "start", "restarts": 0, "until": 0, "nodes": ["node-1"]}
    signal_event = {"time": 6, "event": "signal", "signal": "SIGTERM"}
    (batch.folder / "job.events").write_text(
        "".join(json.dumps(row) + "\n" for row in (begun, signal_event))
    )
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    assert run(batch, "true", requeue=True)[0] == 0
    assert "kind" not in next(event for event in events(batch) if event.get("restarts") == 1)


TELEMETRY = (
    "trap 'echo end >>telemetry/node-1.jsonl; exit 0' TERM; mkdir -p telemetry; "
    'env | grep -E "^(SLURM_(NTASKS|MEM|CPU|GPU)|SRUN_CPUS)" >leaked; '
    "echo start >telemetry/node-1.jsonl; while :; do sleep 0.05; done"
)


def test_telemetry_lasts_as_long_as_the_program(batch):
    batch.has_telemetry(TELEMETRY)
    batch.environment["SLURM_CPUS_PER_TASK"] = "3"
    until = "until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done; cat telemetry/node-1.jsonl"
    rc, out, _ = run(batch, until)
    assert (rc, out) == (0, "start\n")
    assert (batch.folder / "telemetry" / "node-1.jsonl").read_text() == "start\nend\n"
    # What the job asks for its own steps does not reach that of telemetry.
    assert (batch.folder / "leaked").read_text() == ""
    call = batch.calls.read_text()
    assert "--overlap" in call
    assert "--mem=0 --gres=none" in call
    assert "--external-launcher" not in call.split()


def test_steps_of_the_program_do_not_wait_for_telemetry(batch):
    """Slurm 24.11 lets `srun -c2 PROGRAM` wait for each step that is not for another launcher."""
    batch.has_telemetry(TELEMETRY)
    batch.environment["SLURM_OOM_KILL_STEP"] = "0"
    rc, _, _ = run(batch, "until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done")
    assert rc == 0
    assert "--external-launcher" in batch.calls.read_text().split()


def test_notice_that_slurm_sends_only_to_the_steps_is_recorded(batch):
    """As `#SBATCH --signal=USR1@60` asks: the script does not get it."""
    batch.has_telemetry(f"echo $PPID >watcher; {TELEMETRY}")
    body = (
        "until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done; "
        "until grep -q USR1 job.events; do kill -USR1 $(<watcher); sleep 0.1; done; exit 0"
    )
    rc, _, event = notified(batch, body)
    assert (rc, event["notice"]) == (0, True)


@pytest.mark.parametrize("name", ["USR1", "USR2", "INT", "HUP"])
def test_signal_for_the_program_does_not_end_telemetry(batch, name):
    """Slurm sends the signal of `#SBATCH --signal=USR1@60` to all processes of all steps."""
    batch.has_telemetry(f"echo $PPID $$ >pids; {TELEMETRY}")
    body = f"until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done; kill -{name} $(<pids)"
    assert run(batch, body)[0] == 0
    assert (batch.folder / "telemetry" / "node-1.jsonl").read_text() == "start\nend\n"


@pytest.mark.parametrize("body", ["exit 1", "echo no >&2; exit 1", "kill -KILL $$"])
def test_failing_telemetry_does_not_fail_the_job(batch, body):
    batch.has_telemetry(body)
    rc, out, err = run(batch, "echo fine; exit 6")
    assert (rc, out, err) == (6, "fine\n", "")


@pytest.mark.parametrize(
    ("output", "is_left"),
    [
        ("", False),
        ("srun: cluster configuration lacks support for cpu binding", False),
        ("no such file", True),
    ],
)
def test_telemetry_log_is_kept_only_if_not_empty(batch, output, is_left):
    batch.has_telemetry(f"[[ -z '{output}' ]] || echo '{output}' >&2; {TELEMETRY}")
    # A job that ends sooner kills telemetry while it starts.
    run(batch, "until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done")
    assert (batch.folder / "telemetry.log").exists() is is_left


def test_telemetry_ends_when_the_batch_script_is_killed(batch):
    batch.has_telemetry(TELEMETRY)
    body = "until [[ -s telemetry/node-1.jsonl ]]; do sleep 0.05; done; echo $$; exec sleep 60"
    process = batch.start(rendered(shell_job(batch, body)))
    assert process.stdout is not None
    program = int(process.stdout.readline())
    process.kill()
    os.kill(program, signal.SIGKILL)
    process.communicate(timeout=60)
    telemetry_log = batch.folder / "telemetry" / "node-1.jsonl"
    eventually(lambda: telemetry_log.read_text() == "start\nend\n")


def test_program_does_not_keep_telemetry_alive(batch):
    batch.has_telemetry(TELEMETRY)
    job = shell_job(batch, "(sleep 30 >/dev/null 2>&1 & echo $! >daemon); true")
    assert batch.run(rendered(job))[0] == 0
    assert (batch.folder / "telemetry" / "node-1.jsonl").read_text() == "start\nend\n"
    os.kill(int((batch.folder / "daemon").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("state", "status"), [("idle", 0), ("down", 14)])
def test_mpirun_that_lost_a_node_silently_has_failed(batch, state, status):
    play(batch.folder.parent / "bin" / "sinfo", f"echo node-1 {state}")
    play(batch.folder.parent / "bin" / "mpirun", "true")
    batch.environment |= {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node-1"}
    script = user_script(batch.folder, "p.py", "print()\n")
    assert (
        batch.run(rendered(JobSpec(name="j", script=script, nodes=2, launcher="mpirun")))[0]
        == status
    )
