"""The script of a job: what the scripts of all schedulers have in common, and Slurm's, for sbatch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import UsageError
from clusterctl.spec.job import JOB_FIELDS, ONE_RANK_JOBS, JobSpec, is_python
from clusterctl.spec.names import ROOT, Launcher
from clusterctl.spec.units import format_duration
from clusterctl.state.submissions import ADDED_FILES, SENT_FILES, SWEEP_FILE, WRITTEN_FILES
from clusterctl.transport.base import BOOT, module_texts
from clusterctl.transport.put import ARCHIVES
from clusterctl.util.assets import asset, render

if TYPE_CHECKING:
    from clusterctl.packages.wheelhouse import Lock
    from clusterctl.spec.job_options import JobOptions
    from clusterctl.state.facts import ClusterFacts, PartitionFacts

ENVIRONMENTS: Final = "clusterctl/environments"  # in the job user's home
PAYLOADS: Final = f"$HOME/{ARCHIVES}"  # by hash
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
_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")
_ON_THE_CPU: Final = ("probe", "export")  # it proves the way between ranks; it only copies

_SIGNAL = "USR1@60"  # Slurm keeps time by the minute: less would come too late


@dataclass(frozen=True, slots=True)
class Environment:
    """The Python of a job's program; without a lock it is the one that every node has below ``root``."""

    lock: Lock | None = None
    root: str = ROOT

    @property
    def base(self) -> str:
        """The folder of the Python that every node has."""
        return f"{self.root}/env"

    @property
    def profile(self) -> str:
        """What jobs source first on a host where Open MPI is an environment module."""
        return f"{self.root}/job-profile.sh"

    @property
    def bin(self) -> str:
        """Its folder of programs, as the shell on a node reads it."""
        return f"{self.base}/bin" if self.lock is None else f'"$HOME"/{ENVIRONMENTS}/{self.lock.key}/bin'

    @property
    def python(self) -> str:
        """Its interpreter, as a job's script reads it."""
        return '"$python"' if self.lock is None else f"{self.bin}/python"

    @property
    def path(self) -> str:
        """What PATH begins with."""
        return self.bin if self.lock is None else f"{self.bin}:{self.base}/bin"


PLAIN: Final = Environment()


def partition_name(facts: ClusterFacts, job: JobSpec) -> str | None:
    """The partition that a job goes to; None where its script may name another."""
    if job.partition is None and job.script is not None and UserScript.read(job.script).directives:
        return None
    return partition_of(facts, job).name


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a script has for a value, quoted for bash.

    folder: the job's folder. slots: the number of ranks on a node. launcher: what starts the ranks.
    started_by: the options by which task.py knows the launcher.
    """

    folder: str
    nodes: str
    slots: str
    job_id: str
    launcher: tuple[str, ...]
    started_by: str


def program(job: JobSpec, own: UserScript | None, environment: Environment, words: Words) -> list[str]:
    """Return the parts of the command line that job.py starts, quoted for bash.

    Raises:
        UsageError: torchrun can't start the program.
    """
    torchrun = job.launcher is Launcher.TORCHRUN
    if torchrun and (own is None or not own.is_python):
        raise UsageError(
            "torchrun starts Python programs",
            code="torchrun-needs-python",
            why="a shell script starts its ranks itself" if own else "the bundled jobs are MPI programs",
            fix="leave --launcher out",
        )
    is_rank = is_launched(job, own)
    runner = ' "$node"/rank.py' if is_rank and own is not None and not torchrun else ""
    alone = _ALONE if own is not None and own.is_python and not is_rank else {}
    env = {name: shlex.quote(value) for name, value in {**alone, **job.env}.items()}
    if job.bundled:  # it finds itself first
        env["PYTHONPATH"] = '"$payload"' + (f":{env['PYTHONPATH']}" if job.env.get("PYTHONPATH") else "")
    python = "python3" if job.container else environment.python
    # `env` rather than `export`: --env wins over what job.py sets.
    parts = ["env " + " ".join(f"{name}={value}" for name, value in env.items())] if env else []
    if is_rank:
        parts += words.launcher
    if is_rank and not torchrun:
        parts.append(f'"$python" -IS "$node"/task.py{words.started_by}')
    if job.container is not None:
        folders = f'{words.folder},"$payload"' if job.bundled or runner or torchrun else words.folder
        parts.append(
            f'"$python" -IS "$node"/job.py container --image={_image(job.container)} --bind={folders}'
        )
        parts[-1] += f" --env={','.join(env)}"
    if torchrun:
        given = f"--nnodes={words.nodes} --nproc-per-node={words.slots} --rdzv-id={words.job_id}"
        parts += [f'{python} -IS "$node"/job.py torchrun {python}', given]
        parts.append(f'{python} -IS "$node"/task.py --of=torchrun')
    return [*parts, _command(job, own, f"{python}{runner}", words.folder)]


def _image(path: str) -> str:
    """Return the path of an image for bash; ``~/`` is the job user's home."""
    below_home = path.removeprefix("~/")
    return shlex.quote(path) if below_home == path else f'"$HOME"/{shlex.quote(below_home)}'


def _command(job: JobSpec, own: UserScript | None, python: str, folder: str) -> str:
    """Return the program of a rank, or of the job; ``python`` runs it if it is a Python program."""
    if own is None:
        if job.bundled is None:
            raise UsageError("a job needs a bundled program or a script", code="nothing-to-run")
        return f"{python} -m payload {shlex.join([job.bundled, *job.args])}"
    interpreter = python if own.is_python else shlex.join(own.interpreter)
    return " ".join([interpreter, f"{folder}/{shlex.quote(own.name)}", *map(shlex.quote, job.args)])


def exports(job: JobSpec) -> str:
    """Return the options of mpirun that pass variables on to the ranks."""
    swept = map(sweep_variable, job.sweep.keys) if job.sweep is not None else ()
    bundled = ("PYTHONPATH",) if job.bundled else ()
    return " ".join(f"-x {name}" for name in dict.fromkeys((*_EXPORTED, *job.env, *bundled, *swept)))


def sweep_variable(key: str) -> str:
    """The environment variable that tells a task of a sweep the value of this key."""
    return "SWEEP_" + re.sub(r"\W", "_", key).upper()


def is_launched(job: JobSpec, own: UserScript | None) -> bool:
    """Whether a launcher starts the ranks: a Python program alone needs none, a shell script has its own."""
    if own is None or not own.is_python:
        return own is None
    return job.tasks > 1 or bool(own.directives) or job.launcher is Launcher.TORCHRUN


def partition_of(facts: ClusterFacts, job: JobSpec) -> PartitionFacts:
    """The partition that a job names; the first one if it names none.

    Raises:
        UsageError: there is no such partition, or it has less than the job asks for.
    """
    by_name = {one.name: one for one in facts.partitions}
    partition = facts.partitions[0] if job.partition is None else by_name.get(job.partition)
    if partition is None:
        raise UsageError(
            f"there is no partition {job.partition!r}",
            code="unknown-partition",
            fix=f"--partition can be: {', '.join(by_name)}",
        )
    count = len(partition.nodes)
    if job.nodes > count:
        raise UsageError(
            f"a job can't have {job.nodes} nodes",
            code="too-many-nodes",
            why=f"partition {partition.name} has {count}",
            fix=f"say --nodes {count} or less, or name another partition",
        )
    longest = partition.max_time
    unit = 60 if facts.has_slurm else 1  # in slurm.conf 90s are 2 minutes
    if job.time is not None and longest is not None and -(-job.time // unit) > -(-longest // unit):
        raise UsageError(
            f"a job can't have {format_duration(job.time)}",
            code="time-above-limit",
            why=f"max_time of partition {partition.name} is {format_duration(longest)}",
            fix="ask for less with --time",
        )
    return partition


def with_gpus(facts: ClusterFacts, job: JobSpec) -> JobSpec:
    """The job with what it did not say of GPUs and ranks, from its partition's ``gpus``.

    All GPUs of a node and one rank on each; as many ranks as GPUs where one of both was given; one of each
    where the job runs on one rank. Scripts of the user's, jobs with ``--device cpu`` and partitions without
    GPUs stay as they are.
    """
    chosen = {one.name: one for one in facts.partitions}.get(job.partition or facts.partitions[0].name)
    on_cpu = "--device=cpu" in job.args or ("--device", "cpu") in pairwise(job.args)
    if chosen is None or chosen.gpus is None or job.bundled in (None, *_ON_THE_CPU) or on_cpu:
        return job
    if job.bundled in ONE_RANK_JOBS:
        said_or_all = "gpus" in job.model_fields_set or not facts.has_slurm
        return job if said_or_all else job.model_copy(update={"gpus": 1})
    said: dict[str, Any] = {}
    if "gpus" not in job.model_fields_set and facts.has_slurm:  # without it, a job has all there are
        ranks = job.tasks_per_node if "tasks_per_node" in job.model_fields_set else chosen.gpus
        said["gpus"] = min(ranks, chosen.gpus)
    if "tasks_per_node" not in job.model_fields_set:
        said["tasks_per_node"] = max(said.get("gpus", job.gpus if facts.has_slurm else chosen.gpus), 1)
    return job.model_copy(update=said)


def with_launcher(job: JobSpec, *, has_pmix: bool) -> JobSpec:
    """The job, by mpirun where srun would start its ranks and has no PMIx for that."""
    by_srun = job.launcher is Launcher.SRUN and not has_pmix
    return job.model_copy(update={"launcher": Launcher.MPIRUN}) if by_srun else job


_BY_PMIX: Final = re.compile(r"^[^#\n]*(?:--mpi[= ]pmix|SLURM_MPI_TYPE=pmix)", re.MULTILINE)


def reject_pmix(job: JobSpec) -> None:
    """Reject a shell script that asks for PMIx, on a cluster whose Slurm has no plugin for it.

    Raises:
        UsageError: it does.
    """
    if job.script is None or is_python(job.script):
        return
    if _BY_PMIX.search(job.script.read_text(errors="replace")):
        raise UsageError(
            f"{job.script.name} starts ranks by PMIx",
            code="no-pmix",
            where=str(job.script),
            why="this cluster's Slurm has no plugin for PMIx, so the step would fail",
            fix="write `mpirun PROGRAM` instead of `srun --mpi=pmix PROGRAM`",
        )


def render_script(
    job: JobSpec, *, payload_hash: str, interval_s: float, environment: Environment = PLAIN
) -> str:
    """The sbatch script of a job; ``interval_s`` is the time between two samples of telemetry."""
    own = UserScript.read(job.script) if job.script is not None else None
    is_array = _is_array(job, own)
    job_options = [
        f"--telemetry={interval_s:g}",
        *(["--requeue"] if job.requeue else []),
        *(["--array"] if is_array else []),
        *(["--sweep"] if job.sweep is not None else []),
    ]
    words = Words(
        folder='"$SLURM_SUBMIT_DIR"',
        nodes='"$nodes"',
        slots='"$slots"',
        job_id='"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        launcher=_launcher(job),
        started_by=' --of=mpirun --per-node="$slots"' if job.launcher is Launcher.MPIRUN else "",
    )
    return render(
        "job.sbatch.j2",
        **common_words(job, own, environment, payload_hash),
        shell_script=own is not None and not own.is_python,
        own_directives=own.directives if own else (),
        options=_options(job, own),
        array=is_array,
        launcher=job.launcher,
        job_options=" ".join(job_options),
        program=program(job, own, environment, words),
    )


def common_words(
    job: JobSpec, own: UserScript | None, environment: Environment, payload_hash: str
) -> dict[str, str]:
    """Return what the templates of all schedulers' scripts are filled with.

    needs: what has to lie in the folder that a script is started in by hand.
    """
    others = [*([own.name] if own else []), *([SWEEP_FILE] if job.sweep is not None else [])]
    return {
        "title": job.name,
        "needs": " and ".join(["this file", *others]),
        "profile": environment.profile,
        "path": environment.path,
        "python": f"{environment.base}/bin/python",
        "payload": f"{PAYLOADS}/{payload_hash}",
    }


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


def _launcher(job: JobSpec) -> tuple[str, ...]:
    # A script's own `#SBATCH --export` is about the batch script; what that sets reaches all ranks.
    if job.launcher is Launcher.SRUN:
        return ("srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL",)
    if job.launcher is Launcher.TORCHRUN:
        cpus = '--cpus-per-task="$((slots * ${SLURM_CPUS_PER_TASK:-1}))"'
        each = f'--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 {cpus}'
        return "srun --mpi=none --kill-on-bad-exit=1 --export=ALL", each
    spread = '--map-by "ppr:$slots:node${SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}"'
    return f'env SLURM_EXPORT_ENV=ALL mpirun -np "$ranks" --hostfile hostfile {spread}', exports(job)


# The time limit of the verification job grows by this for each node: many local nodes start their ranks on
# few cores.
VERIFICATION_PER_NODE_S = 3


def verification_argv(root: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """The command of one rank of the payload's probe, which travels with it: nodes need only mpi4py."""
    texts = module_texts("payload.commands.probe", asset("payload").parent)
    return (f"{root}/env/bin/python", "-c", BOOT, texts, json.dumps([",".join(hosts)]))
