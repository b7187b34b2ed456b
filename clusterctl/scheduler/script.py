"""The script of a job: what the scripts of all schedulers have in common, and Slurm's, for sbatch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import UsageError
from clusterctl.spec.job import JOB_FIELDS, ONE_RANK_JOBS, REQUEUE_EXIT_CODE, JobSpec, Launcher, is_python
from clusterctl.spec.names import JOB_PROFILE, PAYLOAD_ROOT
from clusterctl.spec.units import format_duration
from clusterctl.state.submissions import ADDED_FILES, SENT_FILES, WRITTEN_FILES
from clusterctl.util.assets import render

if TYPE_CHECKING:
    from clusterctl.packages.wheelhouse import Lock
    from clusterctl.spec.common import Partition
    from clusterctl.spec.job_options import JobOptions
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.brief import PartitionBrief, SpecBrief

BASE_ENVIRONMENT: Final = "/opt/clusterctl/env"  # the Python that every node has
ENVIRONMENTS: Final = "clusterctl/environments"  # in the job user's home
ENV_BIN: Final = f"{BASE_ENVIRONMENT}/bin"
# To what mpirun starts.
_EXPORTED: Final = ("PATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
# What a rank is that no launcher starts, by the names that PyTorch reads.
_ALONE: Final = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
}
MAX_BYTES: Final = 4 << 20  # Slurm's own limit for a batch script (max_script_size)
TAKEN_NAMES: Final = SENT_FILES | WRITTEN_FILES | ADDED_FILES  # in a job's folder
# Runs on every node: telemetry, until its input is closed. A job may end sooner than telemetry has started:
# it then gets two seconds to say at least what host this is.
WATCH: Final = (
    '"$@" </dev/null & read -r _; '
    "for _ in {1..20}; do "
    "[[ ! -s telemetry/$node.jsonl ]] && kill -0 $! || break; sleep 0.1; done 2>/dev/null; "
    "kill -TERM $!; wait $!"
)
Launched = Callable[[JobSpec, str, str], str]  # (job, command, mpirun's options that export variables)
_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")
_ON_THE_CPU: Final = ("probe", "export")  # it proves the way between ranks; it only copies

_SIGNAL = "USR1@60"  # Slurm keeps time by the minute: less would come too late

# In a job's folder, what the job was not given: patterns of bash with extglob.
_NOT_GIVEN = "|".join([*sorted(TAKEN_NAMES), "@(stdout|stderr)-+([0-9]).log", "task-+([0-9])"])


@dataclass(frozen=True, slots=True)
class Environment:
    """The Python of a job's program; without a lock it is the one that every node has."""

    lock: Lock | None = None

    @property
    def bin(self) -> str:
        """Its folder of programs, as the shell on a node reads it."""
        if self.lock is None:
            return ENV_BIN
        return f'"$HOME"/{ENVIRONMENTS}/{self.lock.key}/bin'

    @property
    def path(self) -> str:
        """What PATH begins with."""
        return ENV_BIN if self.lock is None else f"{self.bin}:{ENV_BIN}"


PLAIN: Final = Environment()


def partition_name(spec: ClusterSpec | SpecBrief, job: JobSpec) -> str | None:
    """The partition that a job goes to; None where its script may name another."""
    if job.partition is None and job.script is not None and UserScript.read(job.script).directives:
        return None
    return partition_of(spec, job).name


@dataclass(frozen=True, slots=True)
class UserScript:
    """``directives`` are its own #SBATCH lines, as they stand there; ``interpreter`` runs it.

    Of a Python program the ranks are started; a shell script is run once and starts its own.
    """

    name: str
    interpreter: tuple[str, ...]
    directives: tuple[str, ...]
    is_python: bool

    def asks_for(self, option: str, letter: str | None = None) -> bool:
        """Whether its own #SBATCH lines have this option, as ``--array``, or its letter, as ``-a``."""
        words = [word for line in self.directives for word in _words(line)]
        return any(
            word == option
            or word.startswith(f"{option}=")
            or (letter is not None and word.startswith(letter))
            for word in words
        )

    @classmethod
    def read(cls, path: Path) -> UserScript:
        """Read a script.

        Raises:
            UsageError: there is no such file, or it can't be run as a job.
        """
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as exc:
            raise UsageError(
                f"the script {path} can't be read",
                code="file-unreadable",
                why=exc.strerror or str(exc),
                fix="name a bundled job (see `clusterctl submit --help`), or a script that exists",
            ) from exc
        _refuse_unusable(path, content)
        lines = content.decode(errors="surrogateescape").splitlines()
        shebang = lines[0].removeprefix("#!") if lines and lines[0].startswith("#!") else "/bin/bash"
        interpreter = tuple(shebang.split(maxsplit=1))  # as the kernel reads it: one argument at most
        return cls(path.name, interpreter, _directives(path, lines), is_python(path))


def _refuse_unusable(path: Path, content: bytes) -> None:
    why = ""
    if len(content) > MAX_BYTES:
        why = f"it is larger than {MAX_BYTES >> 20} MiB, which Slurm takes no script of"
    elif path.name in TAKEN_NAMES:
        why = f"{path.name} is the name of a file that clusterctl writes into the job's folder"
    elif not path.name.isprintable():
        why = "its name has characters that can't be printed"
    elif b"\0" in content:
        why = "it is no text"
    if why:
        raise UsageError(
            f"the script {path} can't be submitted",
            code="script-unfit",
            why=why,
            fix="submit a small script of another name",
        )


def _directives(path: Path, lines: list[str]) -> tuple[str, ...]:
    """The #SBATCH lines that sbatch would heed: those before the first command."""
    found = []
    for line in lines:
        if line.strip() and not line.startswith("#"):
            break
        if _HETEROGENEOUS.match(line):
            raise UsageError(
                f"{path} asks for a heterogeneous job, which clusterctl does not submit",
                code="heterogeneous-job",
                fix="use plain `sbatch` on the cluster (`clusterctl ssh`)",
            )
        if line.startswith("#SBATCH"):
            found.append(line.encode(errors="surrogateescape").decode(errors="replace"))
    return tuple(found)


def _words(directive: str) -> list[str]:
    try:
        return shlex.split(directive.removeprefix("#SBATCH"), comments=True)
    except ValueError:  # an open quote; sbatch will say so
        return directive.split()


def telemetry_argv(interval_s: float) -> list[str]:
    words = [f"{ENV_BIN}/python", "-m", "payload", "telemetry", "--interval", f"{interval_s:g}"]
    return [*words, "--out", "telemetry"]


def program(
    job: JobSpec, own: UserScript | None, payload_root: str, environment: Environment, launched: Launched
) -> str:
    """The program's command line, quoted for bash; ``launched`` is as something starts it, once a task.

    Raises:
        UsageError: torchrun can't start it.
    """
    env = dict(job.env)
    if job.bundled:  # it finds itself first
        env["PYTHONPATH"] = ":".join(filter(None, (payload_root, env.get("PYTHONPATH"))))
    by_itself = own is not None and not own.is_python
    torchrun = job.launcher is Launcher.TORCHRUN
    if torchrun and (own is None or by_itself):
        raise UsageError(
            "torchrun starts Python programs",
            code="torchrun-needs-python",
            why="a shell script starts its ranks itself" if own else "the bundled jobs are MPI programs",
            fix="leave --launcher out",
        )
    is_rank = is_launched(job, own)
    env = env if is_rank or by_itself else {**_ALONE, **env}
    runs_ranks = is_rank and own is not None and own.is_python and not torchrun
    runner = f"{payload_root}/payload/node/rank.py" if runs_ranks else ""
    command = _command(job, own, environment, runner)
    if job.container is not None:
        folders = ('"$submit_dir"', *([payload_root] if own is None or runner else []))
        command = contained(command, image=job.container, folders=folders, variables=env)
    if is_rank:
        swept = job.sweep.keys if job.sweep is not None else ()
        names = dict.fromkeys((*_EXPORTED, *env, *map(sweep_variable, swept)))
        exports = " ".join(f"-x {name}" for name in names)
        command = launched(job, command, exports)
    # `env` rather than `export`: whatever their names, they can't change this script's own variables.
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return f"env {settings} {command}" if env else command


def sweep_variable(key: str) -> str:
    """The environment variable that tells a task of a sweep the value of this key."""
    return "SWEEP_" + re.sub(r"\W", "_", key).upper()


def _sweep_tasks(job: JobSpec) -> list[dict[str, str]]:
    """What each task of a sweep is started with, for bash: arguments, variables, and its values as JSON."""
    if job.sweep is None:
        return []
    from clusterctl.spec.sweep import arguments  # noqa: PLC0415 - a model, which most jobs have no use for

    return [
        {
            "words": shlex.join(arguments(values)),
            "variables": " ".join(f"{sweep_variable(k)}={shlex.quote(v)}" for k, v in values.items()),
            "json": shlex.quote(json.dumps(values)),
        }
        for values in job.sweep.tasks
    ]


def is_launched(job: JobSpec, own: UserScript | None) -> bool:
    """Whether a launcher starts the ranks: a Python program alone needs none, a shell script has its own."""
    if own is None or not own.is_python:
        return own is None
    return job.tasks > 1 or bool(own.directives) or job.launcher is Launcher.TORCHRUN


def _command(job: JobSpec, own: UserScript | None, environment: Environment, runner: str) -> str:
    """What one rank runs: a Python program by ``runner``, if any; in a container by the image's Python."""
    python = f"{environment.bin}/python" if job.container is None else "python3"
    swept = ' "${_sweep[@]}"' if job.sweep is not None else ""
    if own is None:
        if job.bundled is None:
            raise UsageError("a job needs a bundled program or a script", code="nothing-to-run")
        return f"{python} -m payload {shlex.join([job.bundled, *job.args])}{swept}"
    script = f'"$submit_dir"/{shlex.quote(own.name)}'
    words = (f" {shlex.join(job.args)}" if job.args else "") + swept
    interpreter = f"{python} {runner}".rstrip() if own.is_python else shlex.join(own.interpreter)
    command = f"{interpreter} {script}{words}"
    if job.launcher is not Launcher.TORCHRUN:
        return command
    agent = shlex.quote(render("torchrun.sh.j2").rstrip())
    return f'bash -c {agent} torchrun {python} "$nodes" "$slots" "$job" {rank("torchrun", command)}'


def rank(by: str, command: str, *, slurm: bool = True) -> str:
    """The command line of a rank that srun, mpirun or torchrun starts, quoted for bash as ``command`` is."""
    starts = f"bash -c {shlex.quote(render('rank.sh.j2', by=by, slurm=slurm).rstrip())} rank"
    return f'{starts} "$slots" {command}' if by == "mpirun" else f"{starts} {command}"


def contained(command: str, *, image: str, folders: Iterable[str], variables: Iterable[str]) -> str:
    """The command line, quoted for bash, that runs ``command`` (likewise) in a container.

    ``folders`` are words of bash and are seen inside where they are outside; an ``image`` below ``~/`` is in
    the job user's home.
    """
    below_home = image.removeprefix("~/")
    place = shlex.quote(image) if below_home == image else f'"$HOME"/{shlex.quote(below_home)}'
    names = shlex.quote(" ".join(variables))
    enter = shlex.quote(render("enter.sh.j2").rstrip())
    return f"bash -c {enter} container {place} {','.join(folders)} {names} -- {command}"


def partition_of(spec: ClusterSpec | SpecBrief, job: JobSpec) -> Partition | PartitionBrief:
    """The partition that a job names; the first one if it names none.

    Raises:
        UsageError: there is no such partition, or it has less than the job asks for.
    """
    by_name: Mapping[str, Partition | PartitionBrief] = {one.name: one for one in spec.partitions}
    partition = spec.partitions[0] if job.partition is None else by_name.get(job.partition)
    if partition is None:
        raise UsageError(
            f"there is no partition {job.partition!r}",
            code="unknown-partition",
            fix=f"--partition can be: {', '.join(by_name)}",
        )
    count = spec.count_of(partition.name)
    if job.nodes > count:
        raise UsageError(
            f"a job can't have {job.nodes} nodes",
            code="too-many-nodes",
            why=f"partition {partition.name} has {count}",
            fix=f"say --nodes {count} or less, or name another partition",
        )
    longest = partition.max_time
    unit = 60 if spec.has_slurm else 1  # in slurm.conf 90s are 2 minutes
    if job.time is not None and longest is not None and -(-job.time // unit) > -(-longest // unit):
        raise UsageError(
            f"a job can't have {format_duration(job.time)}",
            code="time-above-limit",
            why=f"max_time of partition {partition.name} is {format_duration(longest)}",
            fix="ask for less with --time",
        )
    return partition


def with_gpus(spec: ClusterSpec | SpecBrief, job: JobSpec) -> JobSpec:
    """The job with what it did not say of GPUs and ranks, from its partition's ``gpus``.

    All GPUs of a node and one rank on each; as many ranks as GPUs where one of both was given; one of each
    where the job runs on one rank. Scripts of the user's, jobs with ``--device cpu`` and partitions without
    GPUs stay as they are.
    """
    chosen = {one.name: one for one in spec.partitions}.get(job.partition or spec.partitions[0].name)
    on_cpu = "--device=cpu" in job.args or ("--device", "cpu") in pairwise(job.args)
    if chosen is None or chosen.gpus is None or job.bundled in (None, *_ON_THE_CPU) or on_cpu:
        return job
    if job.bundled in ONE_RANK_JOBS:
        said_or_all = "gpus" in job.model_fields_set or not spec.has_slurm
        return job if said_or_all else job.model_copy(update={"gpus": 1})
    said: dict[str, Any] = {}
    if "gpus" not in job.model_fields_set and spec.has_slurm:  # without it, a job has all there are
        ranks = job.tasks_per_node if "tasks_per_node" in job.model_fields_set else chosen.gpus.count
        said["gpus"] = min(ranks, chosen.gpus.count)
    if "tasks_per_node" not in job.model_fields_set:
        said["tasks_per_node"] = max(said.get("gpus", job.gpus if spec.has_slurm else chosen.gpus.count), 1)
    return job.model_copy(update=said)


def with_launcher(job: JobSpec, *, has_pmix: bool) -> JobSpec:
    """The job, by mpirun where srun would start its ranks and has no PMIx for that."""
    by_srun = job.launcher is Launcher.SRUN and not has_pmix
    return job.model_copy(update={"launcher": Launcher.MPIRUN}) if by_srun else job


_BY_PMIX: Final = re.compile(r"^[^#\n]*(?:--mpi[= ]pmix|SLURM_MPI_TYPE=pmix)", re.MULTILINE)
# Without a word of --mpi, Slurm's default decides how MPI programs start. Telemetry overlaps with a step.
_BY_SRUN: Final = re.compile(r"^(?!.*--(?:mpi|overlap))[^#\n]*\bsrun\b", re.MULTILINE)


def reject_pmix(job: JobSpec) -> str:
    """What to know of a job on a cluster whose Slurm has no plugin for PMIx; "" if there is nothing.

    Raises:
        UsageError: its shell script asks for PMIx.
    """
    if job.script is None or is_python(job.script):
        return ""
    text = job.script.read_text(errors="replace")
    if _BY_PMIX.search(text):
        raise UsageError(
            f"{job.script.name} starts ranks by PMIx",
            code="no-pmix",
            where=str(job.script),
            why="this cluster's Slurm has no plugin for PMIx, so the step would fail",
            fix="write `mpirun PROGRAM` instead of `srun --mpi=pmix PROGRAM`",
        )
    if not _BY_SRUN.search(text):
        return ""
    return (
        f"{job.script.name} calls srun: MPI programs fail so in MPI_Init, for Slurm has no plugin for PMIx "
        "here; start them by mpirun"
    )


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
        sweep=_sweep_tasks(job),
        profile=JOB_PROFILE,
        path=environment.path,
        payload_root=payload_root,
        watch=f"node=$SLURMD_NODENAME; {WATCH}",
        telemetry=telemetry_argv(interval_s),
        launcher=job.launcher,
        is_launched=is_launched(job, own),
        hostfile_line=hostfile,
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
    given = job.model_fields_set if own is not None and own.directives else set(JOB_FIELDS)
    own_words = [f"--job-name={job.name}", f"--output=stdout{task}.log", f"--error=stderr{task}.log"]
    array = [f"--array={job.array}"] if job.array is not None else []
    # Over the script's own line, too; where there is none, it need not be said.
    overrides = own is not None and own.asks_for("--gpus-per-node") and "gpus" in job.model_fields_set
    no_gpus = ["--gpus-per-node=0"] if overrides and not job.gpus else []
    return own_words + resource_options(job, given) + no_gpus + array + _ending(job, own)


def _ending(job: JobSpec, own: UserScript | None) -> list[str]:
    """How the job is told that its time is over, and whether it may run again."""
    own_signal = own is not None and own.asks_for("--signal")
    signal = job.signal or (_SIGNAL if job.requeue and not own_signal else None)
    return [
        *(["--requeue"] if job.requeue else []),
        *([f"--signal=B:{signal}"] if signal else []),  # B: the batch script, which passes it on
    ]


def resource_options(job: JobOptions | JobSpec, given: Collection[str]) -> list[str]:
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
    # A script's own `#SBATCH --export` is about the batch script; what that sets reaches all ranks.
    if job.launcher is Launcher.SRUN:
        return f"srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL {rank('srun', command)}"
    if job.launcher is Launcher.TORCHRUN:
        each = '--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$cpus"'
        return f"srun --mpi=none --kill-on-bad-exit=1 --export=ALL {each} {command}"
    spread = '--map-by "ppr:$slots:node${SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}"'
    start = f'env SLURM_EXPORT_ENV=ALL mpirun -np "$ranks" --hostfile hostfile {spread} {exports}'
    return f"{start} {rank('mpirun', command)}"
