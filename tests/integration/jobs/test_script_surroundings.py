"""What the program finds: the variables that were asked for, and the container that it runs in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from clusterctl.spec.job import JobSpec
from clusterctl.util.assets import data_folder
from tests.support.played.batch import (
    HASH,
    HOSTILE,
    Batch,
    play,
    recorded_causes,
    rendered,
    shell_job,
    user_script,
)

ANSIBLE = data_folder("ansible") / "roles"
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], os.getcwd()]))\n"
OURS = ("python", "payload", "node", "nodes", "ranks", "slots")  # the batch script's own variables
# Variables that describe the job that has them.
SET = (
    *(
        "PYTHONUNBUFFERED",
        "OMP_NUM_THREADS",
        "SLURM_PMIX_TIMEOUT",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
    ),
    *("TORCH_FR_DUMP_TEMP_FILE", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"),
)
BASHS = ("UID", "BASHOPTS", "IFS")  # bash, which plays srun, does not let them pass


def run_and_read(batch: Batch, job: JobSpec) -> tuple[dict[str, str], list[str], str]:
    rc, out, err = batch.run(rendered(job))
    assert (rc, err) == (0, "")
    env, args, cwd = json.loads(out.splitlines()[-1])
    return env, args, cwd


def python_job(batch: Batch, **fields) -> JobSpec:
    return JobSpec(name="j", script=user_script(batch.folder, "it's.py", SHOW), **fields)


@pytest.mark.parametrize(("tasks", "names"), [(1, OURS + BASHS), (2, OURS)])
def test_variables_reach_the_program_unchanged(batch, tasks, names):
    env = {f"V{i}": value for i, value in enumerate(HOSTILE)} | dict.fromkeys(names, "mine")
    env |= {"OMP_NUM_THREADS": "7"}
    got, _, _ = run_and_read(batch, python_job(batch, env=env, tasks_per_node=tasks))
    assert {name: got.get(name) for name in env} == env


@pytest.fixture
def sbatch(batch: Batch) -> Batch:
    """A node with the sbatch that keeps a job's variables back, and an sbatch that prints its
    environment.
    """
    own = batch.folder.parent / "own"
    own.mkdir()
    Path(shutil.copy(ANSIBLE / "slurmd" / "files" / "sbatch", own)).chmod(0o755)
    play(batch.folder.parent / "bin" / "sbatch", 'echo "$@"; env')
    batch.environment["PATH"] = f"{own}:{batch.environment['PATH']}"
    return batch


@pytest.mark.parametrize(
    ("given", "env", "kept"),
    [
        ({}, {}, {}),
        ({"OMP_NUM_THREADS": "1"}, {}, {"OMP_NUM_THREADS": "1"}),
        ({}, {"OMP_NUM_THREADS": "3", "MINE": "a b"}, {"OMP_NUM_THREADS": "3", "MINE": "a b"}),
        ({}, {"MASTER_ADDR": "elsewhere"}, {"MASTER_ADDR": "elsewhere"}),
        ({"SLURM_CPUS_PER_TASK": "2"}, {}, {}),
        # Slurm's, of the job that submits.
        ({"SLURM_MEM_PER_NODE": "2048"}, {}, {}),
        ({"SLURM_MEM_PER_CPU": "500"}, {}, {}),
        ({}, {"TORCH_FR_DUMP_TEMP_FILE": "/x"}, {"TORCH_FR_DUMP_TEMP_FILE": "/x"}),
    ],
)
def test_job_that_a_job_submits_has_only_the_users_variables(sbatch, given, env, kept):
    sbatch.environment |= given
    job = shell_job(sbatch, "export RANK=0; sbatch --wait 'my worker.sh'", env=env)
    rc, out, err = sbatch.run(rendered(job))
    first, *lines = out.splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert (rc, first) == (0, "--wait my worker.sh"), err
    assert {name: found[name] for name in (*SET, "MINE") if name in found} == kept


def test_script_on_standard_input_reaches_sbatch(sbatch):
    play(sbatch.folder.parent / "bin" / "sbatch", "cat")
    assert sbatch.run(rendered(shell_job(sbatch, "echo script | sbatch")))[:2] == (0, "script\n")


def test_sbatch_wrapper_without_sbatch_is_command_not_found(sbatch):
    (sbatch.folder.parent / "bin" / "sbatch").unlink()
    assert sbatch.run(rendered(shell_job(sbatch, "sbatch x")))[0] == 127


@pytest.mark.parametrize(
    ("job_path", "path", "found"),
    [
        ("/e/bin:/b/bin", "/usr/bin:/bin", "/e/bin:/b/bin:/usr/bin:/bin"),
        ("/e/bin", "/usr/bin:/e/bin:/bin", "/usr/bin:/e/bin:/bin"),
        (None, "/usr/bin:/bin", "/usr/bin:/bin"),
    ],
)
def test_login_shell_in_a_job_keeps_its_path(job_path, path, found):
    profile = ANSIBLE / "job_env" / "files" / "profile.sh"
    env = {"PATH": path, **({"CLUSTERCTL_PATH": job_path} if job_path else {})}
    argv = ["/bin/sh", "-euc", f". '{profile}'; echo \"$PATH\""]
    assert (
        subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
        == f"{found}\n"
    )


def test_job_tells_login_shells_its_path(batch):
    out = batch.run(rendered(shell_job(batch, 'echo "$CLUSTERCTL_PATH $PATH"')))[1].split()
    assert out[1].startswith(f"{out[0]}:")


@pytest.mark.parametrize(("given", "found"), [({}, "60"), ({"SLURM_PMIX_TIMEOUT": "300"}, "300")])
def test_steps_of_a_script_do_not_wait_long_for_a_failed_rank(batch, given, found):
    """A shell script has the variables of the job, too."""
    batch.environment |= given
    job = shell_job(batch, 'echo "$SLURM_PMIX_TIMEOUT $LR"; exit 3', env={"LR": "0.1 $x"})
    assert batch.run(rendered(job))[:2] == (3, f"{found} 0.1 $x\n")


@pytest.mark.parametrize(
    ("given", "prefix"), [({}, None), ({"TORCH_FR_DUMP_TEMP_FILE": "/x"}, "/x")]
)
def test_ranks_record_the_operations_of_nccl_beside_their_logs(batch, given, prefix):
    """Unless the user chooses another path."""
    job = shell_job(batch, 'echo "$TORCH_FR_DUMP_TEMP_FILE"', env=given)
    assert batch.run(rendered(job))[1].strip() == (
        prefix or f"{batch.folder.resolve()}/rank-logs/nccl-"
    )


def test_mpirun_passes_variables_to_the_ranks(batch):
    play(batch.folder.parent / "bin" / "mpirun", 'echo "$*"; env | grep -E "^(A|B)="')
    job = python_job(
        batch, nodes=2, launcher="mpirun", env={"A": "1", "B": "x y", "OMP_NUM_THREADS": "2"}
    )
    output = batch.run(rendered(job))[1]
    of_all = "PATH PYTHONUNBUFFERED OMP_NUM_THREADS MASTER_ADDR MASTER_PORT CLUSTERCTL_HEARTBEAT"
    assert (
        "".join(f" -x {name}" for name in (*of_all.split(), "TORCH_FR_DUMP_TEMP_FILE", "A", "B "))
        in output
    )
    assert output.endswith(("A=1\nB=x y\n", "B=x y\nA=1\n"))


def test_bundled_program_stays_first_on_its_path():
    text = rendered(JobSpec(name="train", bundled="train", env={"PYTHONPATH": "/my libs"}))
    assert """ PYTHONPATH="$payload":'/my libs' """ in text


@pytest.mark.parametrize(
    "setting", ["SLURM_EXPORT_ENV=NONE", "SLURM_EXPORT_ENV=SEED=7", "SRUN_EXPORT_ENV=A"]
)
@pytest.mark.parametrize(
    ("name", "text", "launcher"),
    [
        ("p.py", "#SBATCH -N2 --export=NONE", "srun"),
        ("p.py", "#SBATCH -N2", "mpirun"),
        ("p.sh", "srun hostname", "srun"),
        ("p.sh", "mpirun hostname", "srun"),
    ],
)
def test_steps_get_all_variables_despite_export_lines(batch, setting, name, text, launcher):
    """After `#SBATCH --export`, sbatch sets a variable with which srun and mpirun's srun leave out
    PATH.
    """
    variable, _, value = setting.partition("=")
    for command in ("srun", "mpirun"):
        play(batch.folder.parent / "bin" / command, f'echo "steps get ${{{variable}-ALL}}"')
    batch.environment[variable] = value
    job = JobSpec(
        name="j", script=user_script(batch.folder, name, f"{text}\n"), launcher=launcher, nodes=2
    )
    assert batch.run(rendered(job))[1] == "steps get ALL\n"


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "my image's.sif"
    path.touch()
    return str(path)


@pytest.mark.parametrize("tool", ["apptainer", "singularity"])
@pytest.mark.parametrize("tasks", [1, 2])
def test_program_runs_in_the_container(batch, image, tool, tasks):
    batch.has_apptainer(tool)
    own = {"MODEL_HOME": "/mine, too", "X": "$y"}
    job = python_job(batch, container=image, args=HOSTILE, env=own, tasks_per_node=tasks)
    env, args, cwd = run_and_read(batch, job)
    binds = [str(batch.folder), *([f"{batch.payload}/{HASH}"] if tasks > 1 else [])]
    assert env["APPTAINER_BIND"].split(",") == binds
    assert {name: env[name] for name in ("APPTAINER_CONTAINER", *own)} == {
        "APPTAINER_CONTAINER": image
    } | own
    assert (args, cwd) == (list(HOSTILE), str(batch.folder))
    assert env["STANDIN_FLAGS"] == ""


def test_container_sees_the_jobs_gpus_and_what_ranks_share(batch, image, tmp_path):
    batch.has_apptainer()
    (tmp_path / "pmix").mkdir()
    batch.environment |= {"SLURM_JOB_GPUS": "0,1", "PMIX_SERVER_TMPDIR": str(tmp_path / "pmix")}
    env, _, _ = run_and_read(batch, python_job(batch, container=image, gpus=2))
    assert env["STANDIN_FLAGS"] == "--nv"
    assert env["APPTAINER_BIND"].split(",") == [str(batch.folder), str(tmp_path / "pmix")]


@pytest.mark.parametrize(
    ("status", "slurm", "flags"),
    [(0, {}, "--nv"), (9, {}, ""), (0, {"SLURM_JOB_ID": "7"}, "")],
    ids=["GPUs", "no driver", "Slurm gave it none"],
)
def test_container_without_scheduler_sees_the_gpus_of_its_host(batch, image, status, slurm, flags):
    batch.has_apptainer()
    batch.environment |= slurm
    play(batch.folder.parent / "bin" / "nvidia-smi", f"echo 'GPU 0: Tesla T4'; exit {status}")
    env, _, _ = run_and_read(batch, python_job(batch, container=image))
    assert env["STANDIN_FLAGS"] == flags


def test_array_task_runs_in_its_folder_in_the_container(batch, image):
    batch.has_apptainer()
    batch.environment["SLURM_ARRAY_TASK_ID"] = "3"
    env, _, cwd = run_and_read(batch, python_job(batch, container=image, array="1-4"))
    assert cwd == f"{batch.folder}/task-3"
    assert env["APPTAINER_BIND"] == str(batch.folder)


def test_image_below_the_users_home(batch):
    batch.has_apptainer()
    home = Path(batch.environment["HOME"])
    (home / "my images").mkdir()
    (home / "my images" / "$x.sif").touch()
    env, _, _ = run_and_read(batch, python_job(batch, container="~/my images/$x.sif"))
    assert env["APPTAINER_CONTAINER"] == f"{home}/my images/$x.sif"


def test_secrets_of_torchrun_are_read_outside_the_image(batch, image):
    secret = {"TOKEN": SecretStr("x")}
    text = rendered(python_job(batch, container=image, launcher="torchrun", secret=secret))
    container, agent = (
        next(line for line in text.splitlines() if name in line)
        for name in ("job.py container", "job.py torchrun")
    )
    assert "--secrets=" in container
    assert "TOKEN" in container
    assert "--secrets=" not in text[text.index(agent) :]


def test_container_gets_the_jobs_secrets(batch, image, tmp_path):
    batch.has_apptainer()
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "environ").write_bytes(b"TOKEN=canary\0")
    words = [
        "container",
        f"--image={image}",
        "--kept=/x",
        "--bind=/",
        f"--secrets={tmp_path}/secrets",
    ]
    node = batch.payload / HASH / "payload" / "node"
    argv = [
        sys.executable,
        "-IS",
        node / "job.py",
        *words,
        "--env=TOKEN",
        "sh",
        "-c",
        "echo $TOKEN",
    ]
    done = subprocess.run(argv, env=batch.environment, capture_output=True, text=True, check=True)
    assert done.stdout == "canary\n"


def test_shell_script_runs_in_the_container(batch, image):
    batch.has_apptainer()
    job = shell_job(batch, 'echo "$APPTAINER_CONTAINER"; exit 5', container=image)
    assert batch.run(rendered(job))[:2] == (5, f"{image}\n")


def test_bundled_program_uses_the_images_python(batch, image):
    text = rendered(JobSpec(name="train", bundled="train", container=image))
    variables = "--env=CLUSTERCTL_SUBMITTED_WITH,PYTHONPATH"
    assert (
        f'--bind="$SLURM_SUBMIT_DIR","$payload" {variables} \\\n    python3 -m payload train'
        in text
    )


UNFIT = "clusterctl: the container image can't be used on node-1: "


def test_node_without_engine_is_named_in_one_line(batch, image):
    rc, out, err = batch.run(rendered(python_job(batch, container=image, tasks_per_node=2)))
    assert (rc, out) == (127, "")
    assert err.startswith(UNFIT)
    assert err.count("\n") == 1
    assert recorded_causes(batch.folder) == ["image-unfit"]
    batch.environment["SLURM_LOCALID"] = "1"  # the other ranks of that node say nothing
    assert batch.run(rendered(python_job(batch, container=image, tasks_per_node=2))) == (
        127,
        "",
        "",
    )


NO_IMAGE = f"{UNFIT}there is no image /no/such.sif"


def test_node_without_the_image_is_named_in_one_line(batch):
    batch.has_apptainer()
    rc, _, err = batch.run(rendered(python_job(batch, container="/no/such.sif")))
    assert rc == 127
    assert err.partition(": copy")[0] == NO_IMAGE
    assert err.count("\n") == 1
    assert recorded_causes(batch.folder) == ["image-unfit"]
