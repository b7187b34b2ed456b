"""JobSpec -> the text of its sbatch script. Nothing is run or sent here."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from clusterctl.errors import UsageError
from clusterctl.jobs.environment import BASE_ENVIRONMENT, PLAIN, Environment
from clusterctl.jobs.userscript import OURS, UserScript
from clusterctl.scheduler.slurm.config import slurm_minutes
from clusterctl.spec.distributions import JOB_PROFILE
from clusterctl.spec.job import REQUEUE_EXIT_CODE, JobOptions, JobSpec, Launcher
from clusterctl.spec.models import ClusterSpec, Partition
from clusterctl.spec.units import format_duration
from clusterctl.util.assets import render

ENV_BIN = f"{BASE_ENVIRONMENT}/bin"
PAYLOAD_ROOT = "/opt/clusterctl/payload"
_SIGNAL = "USR1@60"  # Slurm keeps time by the minute: less would come too late
EXPORTED = ("PATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")  # to the ranks that mpirun starts

# Runs on every node: telemetry, until its input is closed. A job may end sooner than telemetry has started:
# it then gets two seconds to say at least what host this is.
_WATCH = (
    '"$@" </dev/null & read -r _; '
    "for _ in {1..20}; do "
    "[[ ! -s telemetry/$SLURMD_NODENAME.jsonl ]] && kill -0 $! || break; sleep 0.1; done 2>/dev/null; "
    "kill -TERM $!; wait $!"
)

# In a job's folder, what the job was not given: patterns of bash with extglob.
_NOT_GIVEN = "|".join([*sorted(OURS), "@(stdout|stderr)-+([0-9]).log", "task-+([0-9])"])
# Runs once a rank, on its node: image, folders to bind, names of variables, then after -- the command. The
# container sees the host's variables, but for those that the image sets itself: <TOOL>ENV_ overrides these.
# PMIx keeps what ranks share in a folder of slurmd's.
ENTER = """\
image=$1 folders=$2 names=$3
shift 4
node=${SLURMD_NODENAME:-$HOSTNAME}
rank=${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-0}}
give_up() {
    ((rank)) || echo "clusterctl: node $node $1" >&2
    exit 127
}
tool=$(command -v apptainer || command -v singularity) ||
    give_up "has neither apptainer nor singularity: install one there, or submit without --container"
[[ -e $image ]] || give_up "has no image $image: put it where all nodes see it"
options=(--bind "$folders")
[[ -z ${PMIX_SERVER_TMPDIR:-} ]] || options+=(--bind "$PMIX_SERVER_TMPDIR")
gpus=${SLURM_JOB_GPUS:-}${SLURM_STEP_GPUS:-}
[[ -n $gpus || -n ${SLURM_JOB_ID:-} ]] || gpus=$(nvidia-smi --list-gpus 2>/dev/null) || gpus=
[[ -z $gpus ]] || options+=(--nv)
prefix=${tool##*/}
for name in $names; do
    export "${prefix^^}ENV_$name=${!name}"
done
exec "$tool" exec "${options[@]}" "$image" "$@\""""
_ON_THE_CPU = "probe"  # it proves the way between ranks, and is to start at once


def render_script(
    job: JobSpec, *, payload_hash: str, interval_s: float, environment: Environment = PLAIN
) -> str:
    """The sbatch script of a job; ``interval_s`` is the time between two samples of telemetry.

    Raises:
        UsageError: the user's script can't be read or can't be run as a job.
    """
    own = UserScript.read(job.script) if job.script is not None else None
    payload_root = f"{PAYLOAD_ROOT}/{payload_hash}"
    telemetry = [f"{ENV_BIN}/python", "-m", "payload", "telemetry", "--interval", f"{interval_s:g}"]
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
        watch=_WATCH,
        telemetry=[*telemetry, "--out", "telemetry"],
        hostfile_line=_hostfile_line() if job.launcher is Launcher.MPIRUN else None,
        run_me_again=REQUEUE_EXIT_CODE if job.requeue else None,
        program=program(job, own, payload_root, environment, launched=_launched),
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
        ("time", _time(job.time) if job.time is not None else None),
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("constraint", job.constraint),
    ]
    return [f"--{name}={value}" for name, value in values if value is not None]


def _time(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}"


class Launched(Protocol):
    """A command as something starts it, once a task; ``exported``: variables that the ranks are to get."""

    def __call__(self, job: JobSpec, command: str, *, exported: Iterable[str]) -> str: ...


def program(
    job: JobSpec, own: UserScript | None, payload_root: str, environment: Environment, *, launched: Launched
) -> str:
    """The program's command line, quoted for bash."""
    env = _environment(job, payload_root)
    by_itself = own is not None and not own.is_python  # a shell script starts its ranks itself
    alone = own is not None and job.tasks == 1 and not own.directives
    is_rank = not by_itself and not alone
    runner = f"{payload_root}/payload/rank.py" if is_rank and own is not None and own.is_python else ""
    command = _command(job, own, environment, runner)
    if job.container is not None:
        folders = ('"$submit_dir"', *([payload_root] if own is None or runner else []))
        command = contained(command, image=job.container, folders=folders, variables=env)
    if is_rank:
        command = launched(job, command, exported=env)
    # `env` rather than `export`: whatever their names, they can't change this script's own variables.
    return f"env {_assignments(env)} {command}" if env else command


def _command(job: JobSpec, own: UserScript | None, environment: Environment, runner: str) -> str:
    """What one rank runs: a Python program by ``runner``, if any; in a container by the image's Python."""
    python = f"{environment.bin}/python" if job.container is None else "python3"
    if own is None:
        if job.bundled is None:
            raise UsageError("a job needs a bundled program or a script")
        return f"{python} -m payload {shlex.join([job.bundled, *job.args])}"
    script = f'"$submit_dir"/{shlex.quote(own.name)}'
    arguments = f" {shlex.join(job.args)}" if job.args else ""
    interpreter = f"{python} {runner}".rstrip() if own.is_python else shlex.join(own.interpreter)
    return f"{interpreter} {script}{arguments}"


def _environment(job: JobSpec, payload_root: str) -> dict[str, str]:
    """The program's own variables; a bundled program finds itself first."""
    if not job.bundled:
        return dict(job.env)
    others = job.env.get("PYTHONPATH")
    return {**job.env, "PYTHONPATH": f"{payload_root}:{others}" if others else payload_root}


def _assignments(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())


def _launched(job: JobSpec, command: str, *, exported: Iterable[str]) -> str:
    """The command as the launcher starts it, once a task."""
    # A script's own `#SBATCH --export` is about the batch script; what that sets reaches all ranks.
    if job.launcher is Launcher.SRUN:
        return f"srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL {command}"
    exports = " ".join(f"-x {name}" for name in dict.fromkeys((*EXPORTED, *exported)))
    spread = '--map-by "ppr:$slots:node${SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}"'
    return f'env SLURM_EXPORT_ENV=ALL mpirun -np "$ranks" --hostfile hostfile {spread} {exports} {command}'


def _hostfile_line() -> str:
    """A line of the hostfile as a printf format: nodes and slots are known only when the job runs."""
    # printf reads \n itself, which keeps the script's line whole.
    return render("hostfile.j2", nodes=["%s"], slots="%s").replace("\n", "\\n")


def contained(command: str, *, image: str, folders: Iterable[str], variables: Iterable[str]) -> str:
    """The command line, quoted for bash, that runs ``command`` (likewise) in a container.

    ``folders`` are words of bash and are seen inside where they are outside; an ``image`` below ``~/`` is in
    the job user's home.
    """
    binds = ",".join(folders)
    names = shlex.quote(" ".join(variables))
    return f"bash -c {shlex.quote(ENTER)} container {_word(image)} {binds} {names} -- {command}"


def _word(path: str) -> str:
    below_home = path.removeprefix("~/")
    return shlex.quote(path) if below_home == path else f'"$HOME"/{shlex.quote(below_home)}'


def partition_of(spec: ClusterSpec, job: JobSpec) -> Partition:
    """The partition that a job names; the first one if it names none.

    Raises:
        UsageError: there is no such partition, or it has less than the job asks for.
    """
    by_name = {partition.name: partition for partition in spec.partitions}
    partition = spec.partitions[0] if job.partition is None else by_name.get(job.partition)
    if partition is None:
        raise UsageError(
            f"there is no partition {job.partition!r}", fix=f"--partition can be: {', '.join(by_name)}"
        )
    _refuse_too_much(spec, partition, job)
    return partition


def _refuse_too_much(spec: ClusterSpec, partition: Partition, job: JobSpec) -> None:
    count = len(spec.node_names(partition))
    if job.nodes > count:
        raise UsageError(
            f"a job can't have {job.nodes} nodes",
            why=f"partition {partition.name} has {count}",
            fix=f"say --nodes {count} or less, or name another partition",
        )
    longest = partition.max_time
    counts = slurm_minutes if spec.has_slurm else int  # in slurm.conf 90s are 2 minutes
    if job.time is not None and longest is not None and counts(job.time) > counts(longest):
        raise UsageError(
            f"a job can't have {format_duration(job.time)}",
            why=f"max_time of partition {partition.name} is {format_duration(longest)}",
            fix="ask for less with --time",
        )


def with_gpus(spec: ClusterSpec, job: JobSpec) -> JobSpec:
    """The job with what it did not say of GPUs and ranks, from its partition's ``gpus``.

    All GPUs of a node and one rank on each; as many ranks as GPUs where one of both was given. Scripts of the
    user's, jobs with ``--device cpu`` and partitions without GPUs stay as they are.
    """
    chosen = {one.name: one for one in spec.partitions}.get(job.partition or spec.partitions[0].name)
    if chosen is None or chosen.gpus is None or job.bundled in (None, _ON_THE_CPU) or _on_cpu(job.args):
        return job
    said: dict[str, Any] = {}
    if "gpus" not in job.model_fields_set and spec.has_slurm:  # without it, a job has all there are
        ranks = job.tasks_per_node if "tasks_per_node" in job.model_fields_set else chosen.gpus.count
        said["gpus"] = min(ranks, chosen.gpus.count)
    if "tasks_per_node" not in job.model_fields_set:
        said["tasks_per_node"] = max(said.get("gpus", job.gpus if spec.has_slurm else chosen.gpus.count), 1)
    return job.model_copy(update=said)


def _on_cpu(args: Sequence[str]) -> bool:
    return "--device=cpu" in args or ("--device", "cpu") in pairwise(args)
