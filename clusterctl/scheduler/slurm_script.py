"""JobSpec -> the text of its sbatch script."""

from __future__ import annotations

from collections.abc import Collection

from clusterctl.scheduler.script import (
    OURS,
    PAYLOAD_ROOT,
    PLAIN,
    WATCH,
    Environment,
    UserScript,
    program,
    telemetry_argv,
)
from clusterctl.spec.distributions import JOB_PROFILE
from clusterctl.spec.job import REQUEUE_EXIT_CODE, JobOptions, JobSpec, Launcher
from clusterctl.util.assets import render

_SIGNAL = "USR1@60"  # Slurm keeps time by the minute: less would come too late

# In a job's folder, what the job was not given: patterns of bash with extglob.
_NOT_GIVEN = "|".join([*sorted(OURS), "@(stdout|stderr)-+([0-9]).log", "task-+([0-9])"])


def render_script(
    job: JobSpec, *, payload_hash: str, interval_s: float, environment: Environment = PLAIN
) -> str:
    """The sbatch script of a job; ``interval_s`` is the time between two samples of telemetry."""
    own = UserScript.read(job.script) if job.script is not None else None
    payload_root = f"{PAYLOAD_ROOT}/{payload_hash}"
    # A line of it as a format of printf, which reads \\n itself: nodes are known only when the job runs.
    hostfile = render("hostfile.j2", nodes=["%s"], slots="%s").replace("\n", "\\n")
    return render(
        "job.sbatch.j2",
        title=job.name,
        needs=f"{own.name} too" if own else "this file",
        submit_dir=own is not None or job.container is not None,
        shell_script=own is not None and not own.is_python,
        own_directives=own.directives if own else (),
        options=_options(job, own),
        array=_is_array(job, own),
        not_given=_NOT_GIVEN if own else None,
        profile=JOB_PROFILE,
        path=environment.path,
        payload_root=payload_root,
        watch=f"node=$SLURMD_NODENAME; {WATCH}",
        telemetry=telemetry_argv(interval_s),
        hostfile_line=hostfile if job.launcher is Launcher.MPIRUN else None,
        run_me_again=REQUEUE_EXIT_CODE if job.requeue else None,
        program=program(job, own, payload_root, environment, _launched),
    )


def _is_array(job: JobSpec, own: UserScript | None) -> bool:
    return job.array is not None or (own is not None and own.asks_for("--array", "-a"))


def _options(job: JobSpec, own: UserScript | None) -> list[str]:
    """The #SBATCH options. They follow the user's own lines, so that flags win over those.

    Where there are such lines, our defaults give way to them: only flags that were given are written.
    """
    task = "-%a" if _is_array(job, own) else ""
    given = job.model_fields_set if own is not None and own.directives else set(type(job).model_fields)
    own_words = [f"--job-name={job.name}", f"--output=stdout{task}.log", f"--error=stderr{task}.log"]
    array = [f"--array={job.array}"] if job.array is not None else []
    return own_words + resource_options(job, given) + _without_gpus(job, own) + array + _ending(job, own)


def _ending(job: JobSpec, own: UserScript | None) -> list[str]:
    """How the job is told that its time is over, and whether it may run again."""
    own_signal = own is not None and own.asks_for("--signal")
    signal = job.signal or (_SIGNAL if job.requeue and not own_signal else None)
    return [
        *(["--requeue"] if job.requeue else []),
        *([f"--signal=B:{signal}"] if signal else []),  # B: the batch script, which passes it on
    ]


def _without_gpus(job: JobSpec, own: UserScript | None) -> list[str]:
    """``--gpus 0`` wins over a script's own line, too; where there is none, it need not be said."""
    asks = own is not None and own.asks_for("--gpus-per-node")
    return ["--gpus-per-node=0"] if asks and "gpus" in job.model_fields_set and not job.gpus else []


def resource_options(job: JobOptions, given: Collection[str]) -> list[str]:
    """What nodes a job wants, as options of sbatch and salloc; defaults only for fields in ``given``."""
    values: list[tuple[str, object]] = [
        ("nodes", job.nodes if "nodes" in given else None),
        ("ntasks-per-node", job.tasks_per_node if "tasks_per_node" in given else None),
        ("cpus-per-task", job.cpus),
        ("gpus-per-node", job.gpus or None),
        ("mem", f"{job.mem}M" if job.mem is not None else None),
        ("time", f"{job.time // 3600:02}:{job.time // 60 % 60:02}:{job.time % 60:02}" if job.time else None),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("constraint", job.constraint),
    ]
    return [f"--{name}={value}" for name, value in values if value is not None]


def _launched(job: JobSpec, command: str, exports: str) -> str:
    """The command as srun or mpirun starts it, once a rank."""
    # A script's own `#SBATCH --export` is about the batch script; what that sets reaches all ranks.
    if job.launcher is Launcher.SRUN:
        return f"srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL {command}"
    spread = '--map-by "ppr:$slots:node${SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}"'
    return f'env SLURM_EXPORT_ENV=ALL mpirun -np "$ranks" --hostfile hostfile {spread} {exports} {command}'
