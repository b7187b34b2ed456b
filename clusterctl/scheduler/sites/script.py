"""Job scripts: the parts common to all schedulers, and Slurm's script for sbatch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from clusterctl.errors import UsageError
from clusterctl.scheduler.request.arrays import fold_tasks, tasks_of
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.request.user_script import UserScript
from clusterctl.scheduler.sites.folders import folders_of
from clusterctl.spec import remote_folders
from clusterctl.spec.alarms import alarm_options
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS, Resubmission, quantities_of
from clusterctl.spec.names import AFTER, FOLDER, FROM_RUN, ROOT, Launcher
from clusterctl.spec.program import ONE_RANK_JOBS
from clusterctl.spec.sbatch import directives_of, quoted
from clusterctl.state.ledger import IMAGE_FILE, PROGRAM_FOLDER, SWEEP_FILE
from clusterctl.transport.base import BOOT, module_texts
from clusterctl.transport.put import archives_of
from clusterctl.util.assets import data_folder, render

if TYPE_CHECKING:
    from clusterctl.packages.wheelhouse import WheelLock
    from clusterctl.scheduler.sites.site import Site
    from clusterctl.state.inventory import Inventory

# Variables that mpirun passes to the ranks.
_EXPORTED: Final = (
    "PATH",
    "PYTHONUNBUFFERED",
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CLUSTERCTL_HEARTBEAT",
    "TORCH_FR_DUMP_TEMP_FILE",
)
# PyTorch's variables for a single rank that no launcher starts.
_ALONE: Final = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
}
# Bundled jobs without GPUs: the probe tests the network between ranks, and export copies files.
_ON_THE_CPU: Final = ("probe", "export")

# A job without progress for this long hangs, unless the user gives another time. Work in silence looks
# the same.
_SILENCE_S: Final = 600
# The variable of the job's script with the folder of the program's files.
FILES: Final = '"$files"'
# The option of job.py and task.py with the folder of the job's secrets (scheduler/request/job_secrets.py),
# as the script's variable has it.
SECRETS: Final = '--secrets="$secrets"'
# The option of job.py with the ID of an array's task.
_ARRAY: Final = '--array="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'


@dataclass(frozen=True, slots=True)
class Environment:
    """A job's Python environment: packages of ``lock``; if None, only the packages that all jobs
    have.

    prefix: the folder of an environment on the cluster that clusterctl did not make, which the job
        uses instead. "": the job uses ``lock``.
    """

    lock: WheelLock | None = None
    root: str = ROOT
    folder: str = FOLDER
    prefix: str = ""

    @classmethod
    def of(cls, inventory: Inventory, lock: WheelLock | None = None) -> Environment:
        return cls(lock, inventory.root, inventory.folder)

    @property
    def base(self) -> str:
        """Folder of the Python environment that `up` installs on each node."""
        return f"{self.root}/env"

    @property
    def profile(self) -> str:
        """Path of a script that jobs source first, on hosts where Open MPI is an environment
        module.
        """
        return f"{self.root}/job-profile.sh"

    @property
    def environments(self) -> str:
        """Folder of the environments with the packages of jobs."""
        return f"{self.folder}/{remote_folders.ENVIRONMENTS}"

    @property
    def payloads(self) -> str:
        """Folder of clusterctl's bundled programs, by their hash, as a value of a variable in a
        script.
        """
        return _in_shell(archives_of(self.folder), home="$HOME")

    @property
    def images(self) -> str:
        """Folder of the container images made on the cluster, quoted for a node's shell."""
        return f"{_in_shell(self.folder)}/{remote_folders.IMAGES}"

    @property
    def bin(self) -> str:
        """Folder of the environment's programs, quoted for a node's shell."""
        if self.prefix:
            return f"{shlex.quote(self.prefix)}/bin"
        base = self.base if self.lock is None else f"{_in_shell(self.environments)}/{self.lock.key}"
        return f"{base}/bin"

    @property
    def python(self) -> str:
        """The environment's Python, quoted for a job's script."""
        is_plain = self.lock is None and not self.prefix
        return '"$python"' if is_plain else f"{self.bin}/python"

    @property
    def path(self) -> str:
        """Folders, joined by colons, that are put at the start of a job's PATH."""
        is_plain = self.lock is None and not self.prefix
        return self.bin if is_plain else f"{self.bin}:{self.base}/bin"


PLAIN: Final = Environment()


def _in_shell(path: str, home: str = '"$HOME"') -> str:
    """Return a path on the cluster, quoted for a node's shell. A relative path starts at the home
    folder.
    """
    return shlex.quote(path) if path.startswith("/") else f"{home}/{shlex.quote(path)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTexts:
    """Texts for a job's script, quoted for bash. They depend on the scheduler.

    folder: the job's folder. start: command that starts the program in its own folder.
    nodes: number of nodes. slots: ranks per node. launcher: command that starts the ranks.
    started_by: options that tell task.py, the wrapper of each rank, which launcher started it.
    """

    folder: str
    start: str
    nodes: str
    slots: str
    job_id: str
    launcher: tuple[str, ...]
    started_by: str


def program(
    request: Request, environment: Environment, words: ScriptTexts, *, cluster: str
) -> list[str]:
    """Return the parts of a job's command line, for bash.

    cluster: the cluster's name, which the command that continues a training contains.
    """
    job = request.job
    script = request.script
    torchrun = job.launcher is Launcher.TORCHRUN
    is_rank = is_launched(job, script)
    runner = ' "$node"/rank.py' if is_rank and script is not None and not torchrun else ""
    is_python = script is None or script.is_python
    env = program_variables(job, cluster, is_alone=is_python and not is_rank)
    python = "python3" if job.container else environment.python
    # `env` rather than `export`, because --env wins over the variables that job.py sets.
    parts = ["env " + " ".join(f"{name}={value}" for name, value in env.items())] if env else []
    if is_rank:
        parts += [*words.launcher, *([] if torchrun else rank_starter(job, python, words))]
    if job.pack:
        parts.append(f'"$python" -IS "$node"/pack.py run {" ".join(_pack_options(request))}')
    elif not torchrun:
        parts.append(words.start)
    if job.container is not None:
        needs_programs = bool(job.bundled or runner or torchrun)
        parts.append(container_command(job, environment, words, env, needs_programs=needs_programs))
    if torchrun:
        # Inside an image, the ranks do not see the file with the secrets.
        ranked = job.model_copy(update={"secret": {}}) if job.container else job
        parts += [*rank_starter(ranked, python, words), words.start]
    return [*parts, _command(job, script, f"{python}{runner}")]


def container_command(
    job: JobSpec,
    environment: Environment,
    words: ScriptTexts,
    names: Iterable[str],
    *,
    needs_programs: bool,
    converts: bool = False,
) -> str:
    """Return the command that starts a program in the job's container image.

    names: variables that override the image's, beside the secrets. needs_programs: whether the
        program is part of clusterctl, or is started by a program of clusterctl. converts: whether
        the command also converts the image for the node's engine, which otherwise was done before.
    """
    earlier = [value for name, value in job.env.items() if is_earlier(name) and value]
    folders = (
        words.folder,
        *(['"$payload"'] if needs_programs else []),
        *map(shlex.quote, dict.fromkeys(earlier)),
    )
    options = (
        *_image_options(environment),
        f"--bind={','.join(folders)}",
        *([f"--mounts={shlex.quote(json.dumps(job.mount))}"] if job.mount else []),
        *([SECRETS] if job.secret and job.launcher is Launcher.TORCHRUN else []),
        f"--env={','.join((*names, *job.secret))}",
        *(["--convert=yes"] if converts else []),
    )
    return f'"$python" -IS "$node"/job.py container {" ".join(options)}'


def _pack_options(request: Request) -> Iterator[str]:
    """Yield the options of pack.py."""
    job = request.job
    if job.secret:
        yield SECRETS
    numbers, _, most = str(job.array).partition("%")
    yield f"--tasks={fold_tasks(tasks_of(numbers))}"
    if most:
        yield f"--most={most}"
    if request.fills_nodes:
        yield "--fit"
    yield f"--files={FILES}"
    if job.place.start != ".":
        yield f"--start={shlex.quote(job.place.start)}"
    if job.sweep is not None:
        yield "--sweep"


def program_variables(job: JobSpec, cluster: str = "", *, is_alone: bool) -> dict[str, str]:
    """Return variable -> value, quoted for bash, for a job's program. is_alone: no launcher starts
    it.
    """
    env = {
        name: shlex.quote(value)
        for name, value in {**(_ALONE if is_alone else {}), **job.env}.items()
    }
    own_path = [env["PYTHONPATH"]] if job.env.get("PYTHONPATH") else []
    if job.bundled == "train":
        options = (f"--cluster={cluster}", *submit_options(job))
        env["CLUSTERCTL_SUBMITTED_WITH"] = shlex.quote(shlex.join(options))
    # So that Python finds the package `payload` first.
    first = ['"$payload"'] if job.bundled else []
    roots = [_in_program_folder(root) for root in job.place.roots]
    if first or roots:
        env["PYTHONPATH"] = ":".join((*first, *own_path, *roots))
    return env


def is_earlier(variable: str) -> bool:
    """Return whether a variable has the path of the files of an earlier job."""
    return variable == FROM_RUN or variable.startswith(AFTER)


def submit_options(job: JobSpec) -> Iterator[str]:
    """Yield the options of `clusterctl submit` that submit a job like this again, without its
    program's.

    Variables are named without their values, which may be secret. sbatch's option --export is left
    out.
    """
    hidden = (
        *filter(is_earlier, job.env),
        *(word for word in job.slurm if word.startswith("--export=")),
    )
    record = job.record
    for name in (name for name in OPTIONS if name in job.model_fields_set):
        value = record[name]
        option = OPTIONS[name]
        if option.again is Resubmission.CHOSEN or value is None:
            continue
        if isinstance(value, bool) and option.in_submit:
            yield option.flag if value else option.flag.replace("--", "--no-", 1)
            continue
        # Such as --nodes=2 or --set=ranks=2.
        prefix = f"{option.flag}=" if option.in_submit else option.flag.replace(" ", "=")
        words = value if isinstance(value, tuple | Mapping) else [value]
        shown = (str(word).lower() if isinstance(word, bool) else word for word in words)
        yield from (f"{prefix}{word}" for word in shown if word not in hidden)


def rank_starter(job: JobSpec, python: str, words: ScriptTexts) -> list[str]:
    """Return the parts of a command that the launcher starts for each rank or, for torchrun, on
    each node.
    """
    secrets = f" {SECRETS}" if job.secret else ""
    if job.launcher is not Launcher.TORCHRUN:
        return [f'"$python" -IS "$node"/task.py{words.started_by}{secrets}']
    options = f"--nnodes={words.nodes} --nproc-per-node={words.slots} --rdzv-id={words.job_id}"
    task = f'{python} -IS "$node"/task.py --of=torchrun{secrets}'
    return [f'{python} -IS "$node"/job.py torchrun {python}', options, task]


def _in_program_folder(path: str) -> str:
    """Return a path below the folder of the program's files, quoted for bash. "." is the folder
    itself.
    """
    return FILES if path == "." else f"{FILES}/{shlex.quote(path)}"


def _image_options(environment: Environment) -> Sequence[str]:
    """Return the options of job.py for a container image and the folder of images made on the
    cluster.
    """
    return ('--image="$image"', f"--kept={environment.images}")


def _image(image: str) -> str:
    """Return the path of a container image, quoted for bash. ``~/`` is the job user's home.

    An image from a registry is described by a file in the job's folder.
    """
    if "://" in image:
        return f"$PWD/{IMAGE_FILE}"
    below_home = image.removeprefix("~/")
    return shlex.quote(image) if below_home == image else f'"$HOME"/{shlex.quote(below_home)}'


def _command(job: JobSpec, script: UserScript | None, python: str) -> str:
    if script is None:
        if job.bundled is None:
            raise UsageError(
                "a job needs a bundled program or a script",
                about="nothing-to-run",
            )
        return f"{python} -m payload {shlex.join([job.bundled, *job.args])}"
    interpreter = python if script.is_python else shlex.join(script.interpreter)
    file = (
        f"-m {job.run_module}"
        if job.run_module is not None
        else _in_program_folder(job.place.script)
    )
    return " ".join([interpreter, file, *map(shlex.quote, job.args)])


def mpirun_exports(job: JobSpec) -> str:
    """Return the options of mpirun that pass environment variables to the ranks."""
    swept = map(sweep_variable, job.sweep.keys) if job.sweep is not None else ()
    path = ["PYTHONPATH"] if job.bundled or job.place.roots else []
    path += ["LD_LIBRARY_PATH"] if job.module else []
    return " ".join(f"-x {name}" for name in dict.fromkeys((*_EXPORTED, *job.env, *path, *swept)))


def sweep_variable(key: str) -> str:
    """Return the name of the environment variable for a parameter of a sweep, such as SWEEP_LR for
    lr.
    """
    return "SWEEP_" + re.sub(r"\W", "_", key.lstrip("+")).upper()


def is_launched(job: JobSpec, script: UserScript | None) -> bool:
    """Return whether srun, mpirun or torchrun starts the ranks: not for shell scripts, single ranks
    and packed tasks.
    """
    if job.pack:
        return False
    if script is None or not script.is_python:
        return script is None
    return job.tasks > 1 or bool(script.directives.lines) or job.launcher is Launcher.TORCHRUN


def with_gpus(site: Site, job: JobSpec) -> JobSpec:
    """Return the job with defaults for its GPUs and ranks, from its partition's number of GPUs per
    node.

    Default: all GPUs of a node, and a rank for each. If only GPUs or only ranks are given, the
    other number is the same. Jobs of a single rank get a single GPU. Users' scripts, jobs with
    ``--device cpu``, and jobs in partitions without GPUs are unchanged.
    """
    facts_by_name = {partition.name: partition for partition in site.inventory.partitions}
    partition = facts_by_name.get(job.partition or site.inventory.partitions[0].name)
    on_cpu = "--device=cpu" in job.args or ("--device", "cpu") in pairwise(job.args)
    if partition is None or partition.gpus is None or job.bundled in (None, *_ON_THE_CPU) or on_cpu:
        return job
    if job.bundled in ONE_RANK_JOBS:
        keeps_gpus = "gpus" in job.model_fields_set or not site.shares_gpus
        return job if keeps_gpus else job.model_copy(update={"gpus": 1})
    changes: dict[str, Any] = {}
    # Without Slurm a job has all GPUs of its nodes.
    if "gpus" not in job.model_fields_set and site.shares_gpus:
        ranks = job.tasks_per_node if "tasks_per_node" in job.model_fields_set else partition.gpus
        changes["gpus"] = min(ranks, partition.gpus)
    if "tasks_per_node" not in job.model_fields_set:
        changes["tasks_per_node"] = max(
            changes.get("gpus", job.gpus if site.shares_gpus else partition.gpus), 1
        )
    return job.model_copy(update=changes)


def with_account(site: Site, request: Request) -> Request:
    """Return the request with the cluster's account, QOS and options of sbatch, unless the job or its
    script sets the same quantities.

    It also names the site's default partition, if the site has a default.
    """
    defaults = {
        "account": site.inventory.account,
        "qos": site.inventory.qos,
        "partition": site.default_partition,
    }
    job = request.job
    changes: dict[str, Any] = {
        name: value
        for name, value in defaults.items()
        if value and request.last(OPTIONS[name].sbatch) is None
    }
    asked = {*quantities_of(job.model_fields_set)}
    asked |= {quantity for one in request.options for quantity in one.quantities}
    # Of two options with the same name, Slurm would take only the last.
    more = [
        str(remaining)
        for one in directives_of(site.inventory.slurm_options)
        if request.last(one.own_name) is None and (remaining := one.without(asked))
    ]
    if more:
        changes["slurm"] = (*more, *job.slurm)
    places = dict.fromkeys(changes, f"the default of cluster {site.inventory.cluster}")
    if not changes:
        return request
    return request.of(job.model_copy(update={**changes, "places": {**job.places, **places}}))


def with_launcher(job: JobSpec, *, has_pmix: bool) -> JobSpec:
    """Return the job; if Slurm lacks the PMIx plugin, replace the launcher srun by mpirun."""
    by_srun = job.launcher is Launcher.SRUN and not has_pmix
    return job.model_copy(update={"launcher": Launcher.MPIRUN}) if by_srun else job


def fitted_to(site: Site, request: Request) -> Request:
    """Return the request with the site's defaults for GPUs, ranks, launcher, account and partition,
    and with the tasks that its job packs.
    """
    job = request.job
    packed = job.model_copy(update={"array": request.indices})
    job = packed if job.pack else with_gpus(site, job)
    return with_account(site, request.of(with_launcher(job, has_pmix=site.inventory.pmix)))


def render_script(
    inventory: Inventory, request: Request, *, payload_hash: str, environment: Environment = PLAIN
) -> str:
    """Return the sbatch script of a job."""
    job = request.job
    script = request.script
    has_tasks = bool(request.array)
    task = "-%a" if has_tasks else ""
    job_options = [
        *watch_options(job, inventory, environment),
        *(["--requeue"] if job.requeue else []),
        *([f"--chain={job.chain}"] if job.chain is not None else []),
        *([_ARRAY] if has_tasks else []),
        *(["--sweep"] if job.sweep is not None and not job.pack else []),
    ]
    return render(
        "job.sbatch.j2",
        **common_words(job, environment, payload_hash, array=f" {_ARRAY}" if has_tasks else ""),
        shell_script=script is not None and not script.is_python,
        own_directives=request.lines,
        options=(
            f"--job-name={job.name}",
            f"--output=stdout{task}.log",
            f"--error=stderr{task}.log",
            *(quoted(str(option)) for option in (*request.flags, *request.slurm)),
        ),
        array=has_tasks,
        launcher=job.launcher,
        starter=(),
        job_options=" ".join(job_options),
        program=program(request, environment, slurm_words(job), cluster=inventory.cluster),
    )


def slurm_words(job: JobSpec) -> ScriptTexts:
    """Return the texts for a script of Slurm."""
    return ScriptTexts(
        folder='"$SLURM_SUBMIT_DIR"',
        # Scripts often begin with `cd $SLURM_SUBMIT_DIR`.
        start=f'env -C "$start" SLURM_SUBMIT_DIR={FILES}',
        nodes='"$nodes"',
        slots='"$slots"',
        job_id='"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        launcher=_launcher(job),
        started_by=' --of=mpirun --per-node="$slots"' if job.launcher is Launcher.MPIRUN else "",
    )


def watch_options(job: JobSpec, inventory: Inventory, environment: Environment) -> list[str]:
    """Return the options of job.py for telemetry, the watch for hangs, the alarms, the program's
    folder, secrets, the container image, and files to stage.
    """
    mode, _, given_s = (job.hang or ("end" if job.bundled == "train" else "warn")).partition("@")
    hang = [] if mode == "off" else [f"--hang={mode}@{given_s or _SILENCE_S}"]
    start = [] if job.place.start == "." else [f"--start={shlex.quote(job.place.start)}"]
    alarms = alarm_options(job.alarm)
    secrets = [SECRETS, *folders_of(inventory).secret_options] if job.secret else []
    build = [f"--build={shlex.quote(job.build)}"] if job.build else []
    pairs = [text.split(":") for text in job.stage]
    staged = [f"--stage={shlex.quote(json.dumps(pairs))}"] if pairs else []
    image = _image_options(environment) if job.container else []
    files = ['--files="$program"', *start, *build, *secrets, *image, *staged]
    return [f"--telemetry={inventory.interval_s:g}", *hang, *alarms, *files]


def common_words(
    job: JobSpec, environment: Environment, payload_hash: str, *, array: str = ""
) -> dict[str, str]:
    """Return placeholder -> text for the templates of job scripts, the same for Slurm and for
    mpirun.

    array: the option of job.py with the ID of an array's task.

    ``needs`` lists the files that must be in the current folder to start the script by hand.
    """
    # The script of an interactive session is a folder.
    has_script = job.script is not None and not job.script.is_dir()
    python = f"{environment.base}/bin/python"
    payload = f"{environment.payloads}/{payload_hash}"
    files = [
        *([f"{PROGRAM_FOLDER}/{job.place.script}"] if has_script else []),
        *([SWEEP_FILE] if job.sweep is not None else []),
    ]
    return {
        "title": job.name,
        "needs": " and ".join(["this file", *files]),
        "modules": _load_modules(job, python, payload, array),
        "secrets": f"${{PWD%/*/*}}/{remote_folders.SECRETS}/${{PWD##*/}}" if job.secret else "",
        "image": _image(job.container) if job.container else "",
        "files": PROGRAM_FOLDER,
        "script": shlex.quote(job.place.script) if has_script else "",
        "start": "" if job.place.start == "." else f"/{shlex.quote(job.place.start)}",
        "profile": environment.profile,
        "path": environment.path,
        "prefix": shlex.quote(environment.prefix) if environment.prefix else "",
        "python": python,
        "payload": payload,
    }


def _load_modules(job: JobSpec, python: str, payload: str, array: str) -> str:
    """Return lines of a job's script that load its environment modules. Empty: the job has no
    modules.

    python, payload: paths on the node, quoted: what is sourced before may set any variable.
    array: the option of job.py with the ID of an array's task.
    """
    if not job.module:
        return ""
    failed = f'exec {python} -IS {payload}/payload/node/job.py module-not-loaded{array} "$module"'
    return "\n".join(
        (
            "# /etc/profile may replace PATH.",
            "type module &>/dev/null || { path=$PATH && . /etc/profile &>/dev/null; PATH=$path:$PATH; }",
            f"for module in {shlex.join(job.module)}; do",
            f'    module load "$module" || {failed}',
            "done",
        )
    )


def _launcher(job: JobSpec) -> tuple[str, ...]:
    if job.launcher is Launcher.SRUN:
        return ("srun --mpi=pmix --kill-on-bad-exit=1",)
    if job.launcher is Launcher.TORCHRUN:
        cpus = '--cpus-per-task="$((slots * ${SLURM_CPUS_PER_TASK:-1}))"'
        tasks = f'--nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 {cpus}'
        return "srun --mpi=none --kill-on-bad-exit=1", tasks
    spread = (
        f'--map-by "{mapping(job, "$slots")}${{SLURM_CPUS_PER_TASK:+:PE=$SLURM_CPUS_PER_TASK}}"'
    )
    ranks = job.ranks or '"$ranks"'
    return f"mpirun -np {ranks} --hostfile job.hosts {spread}", mpirun_exports(job)


def mapping(job: JobSpec, slots: str) -> str:
    """Return the value of mpirun's --map-by. slots: ranks per node. Spawned ranks may inherit the
    mapping.
    """
    return "slot" if job.ranks else f"ppr:{slots}:node"


# Seconds per node in the time limit of the verification job: many local nodes start their ranks on
# few cores.
VERIFICATION_PER_NODE_S = 3


def verification_argv(root: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the command that each rank of an MPI test (probe) runs. It contains the test's Python
    code.
    """
    texts = module_texts("payload.commands.probe", data_folder("payload").parent)
    python = f"{Environment(root=root).base}/bin/python"
    return (python, "-c", BOOT, texts, json.dumps([",".join(hosts)]))
