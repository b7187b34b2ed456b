"""JobOptions, the only place where an option of a job is declared.

Everything else about an option follows from its field: its flag of `submit`, `rehearse`, `shell`
and `replay`, its key in job files, its line in batch scripts, the advice if Slurm rejects it, and
its part in replays and comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from clusterctl.errors import Failure, Notice, UsageError, excluded, raise_together
from clusterctl.spec.base import (
    HERE,
    JobMemoryMib,
    JobTimeS,
    SlurmName,
    SpecModel,
    TimeLimitS,
    Toggle,
    explain,
)
from clusterctl.spec.job_values import (
    Alarm,
    Argument,
    Array,
    Command,
    Count,
    Dependency,
    EnvironmentModule,
    EnvironmentThere,
    Features,
    FilePattern,
    Folder,
    Gpus,
    Hang,
    Image,
    JobName,
    Licenses,
    Mount,
    PackageFile,
    Run,
    Secrets,
    Signal,
    Stages,
    Tag,
    Text,
    Variables,
)
from clusterctl.spec.names import Launcher, LocalValue, Topic, did_you_mean
from clusterctl.spec.sbatch import (
    SINGLETON,
    Directive,
    directives_of,
    option_of_clusterctl,
    sbatch_options,
)
from clusterctl.spec.sweep import Scaling, Sweep, as_scaling, as_sweep
from clusterctl.spec.units import shown


class Resubmission(StrEnum):
    """The treatment of an option when the job is submitted again.

    REPEATED: by `replay`, and by the command that continues a training. CONTINUED: only by the
    latter; a replay computes the option again, or the user gives it. CHOSEN: by neither, because
    the option chooses a task, a run or another job.
    """

    REPEATED = "repeated"
    CONTINUED = "continued"
    CHOSEN = "chosen"


class InVariants(StrEnum):
    """The treatment of an option of a job file that a variant also has.

    APPENDED: the key with a + at its end appends to the file's list; the plain key is rejected.
    """

    REPLACED = "replaced"
    APPENDED = "appended"
    MERGED = "merged"


@dataclass(frozen=True, slots=True)
class Refusal:
    """How Slurm rejects a value of an option.

    pattern: a regular expression for Slurm's message. lists: the command that lists valid values.
        Empty: the value itself is to be corrected.
    also: more quantities, as in ``Directive.quantities``, that the message may be about.
    is_conflict: whether the message is about another option that can't be used beside this one.
    is_vague: whether messages about other options may have the pattern, so that it is tried last.
    """

    pattern: str
    lists: str = ""
    also: tuple[str, ...] = ()
    is_conflict: bool = False
    is_vague: bool = False


@dataclass(frozen=True, slots=True)
class JobOption:
    """The declaration of an option of a job, in the option's field of JobOptions.

    help: one or more sentences, for the help of the flag and for the schema of job files.
    in_file: a sentence that holds only in job files.
    metavar: the placeholder for the value in the help. Default: the type.
    examples: for the schema.
    flag_type: the type of the flag. Default: that of the field; text if clusterctl parses it.
    topic: its heading in the help. is_usual: whether the short help has it.
    in_submit: whether `submit` has the flag. False: the option is a key of job files, which
        `--set KEY=VALUE` sets.
    is_argument: whether the values are the arguments of the program, and have no flag.
    tab: completes a value: words, or "partitions" or "runs".
    local: the part of a value that is a path or a name on the user's machine. None: no part.

    sbatch: the option of sbatch and salloc that sets the quantity, such as ``--mem``. Empty: Slurm
        does not know the option.
    text: the value of the option of sbatch, given that of the field. Empty: it is not passed.
    in_script: whether a line of the job's script passes it, as for most options. False: the script
        uses it in another way.
    writes_default: whether its default is also passed, unless the user's script has own #SBATCH
        lines.
    has_own_values: whether its values are written otherwise than those of sbatch, so that the
        option of sbatch is no synonym of the flag.
    is_only_flag: whether --slurm can't set the quantity, because clusterctl must know its value.
    needs_slurm: whether only Slurm supports it. Default: whether it is an option of sbatch.
    refusal: how Slurm rejects a value.

    in_shell: whether `shell` has the flag; a text: the help of the flag there. Default: whether it
        is an option of salloc.
    in_replay: whether `replay` has the flag, because the option does not affect the results.
        Default: whether it is an option of sbatch.
    in_rehearse: whether `rehearse` has the flag. False: a rehearsal sets it, or it has several
        tasks.
    again: its treatment when the job is submitted again.
    compared: whether `runs diff` compares it among the options of the job. Default: whether
        `replay` does not have the flag.
    variants: its treatment when a variant of a job file also has it.

    name, type: those of the field. letter: the short form of the option of sbatch. ``OPTIONS``
        sets them, and the defaults above.
    """

    help: str
    _: KW_ONLY
    in_file: str = ""
    metavar: str | None = None
    examples: tuple[object, ...] = ()
    flag_type: Any = None
    topic: Topic = Topic.MORE
    is_usual: bool = False
    in_submit: bool = True
    is_argument: bool = False
    tab: str | tuple[str, ...] = ()
    local: LocalValue | None = None
    sbatch: str = ""
    text: Callable[[Any], str] = str
    in_script: bool = True
    writes_default: bool = False
    has_own_values: bool = False
    is_only_flag: bool = False
    needs_slurm: bool | None = None
    refusal: Refusal | None = None
    in_shell: bool | str | None = None
    in_replay: bool | None = None
    in_rehearse: bool = True
    again: Resubmission = Resubmission.REPEATED
    compared: bool | None = None
    variants: InVariants = InVariants.REPLACED
    name: str = ""
    type: Any = None
    letter: str = ""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        description = " ".join(filter(None, (self.help, self.in_file)))
        more = {"examples": list(self.examples)} if self.examples else {}
        return {**handler(schema), "description": description, **more}

    @property
    def flag(self) -> str:
        """How `submit` gets it: ``--nodes``, or ``--set chain=``."""
        return f"--{self.name.replace('_', '-')}" if self.in_submit else f"--set {self.name}="

    @property
    def kind(self) -> Any:
        """The type of the flag: int, bool, str, Path, or list[str] for a flag that is repeated."""
        if self.flag_type is not None:
            return self.flag_type
        plain, is_parsed = plain_type(self.type)
        if self.is_list:
            return list[str]
        return plain if plain in {bool, Path} or (plain is int and not is_parsed) else str

    @property
    def is_list(self) -> bool:
        """Whether the field is a list or a mapping, to which each use of the flag adds."""
        return plain_type(self.type)[0] in {tuple, Mapping}

    @property
    def usage(self) -> str:
        """The flag with a placeholder for its value, for messages: ``--nodes NODES``."""
        if self.kind is bool:
            return self.flag
        placeholder = (self.metavar or self.name).partition("[")[0].upper()
        return f"{self.flag} {placeholder}" if self.in_submit else f"{self.flag}{placeholder}"

    def words(self, value: Any) -> Iterator[str]:
        """Yield the option of sbatch and salloc for a value of the field, if there is such an
        option.
        """
        if not self.sbatch or not self.in_script or value is None:
            return
        if isinstance(value, bool):
            yield self.sbatch if value else self.sbatch.replace("--", "--no-", 1)
        elif text := self.text(value):
            yield f"{self.sbatch}={text}"


def plain_type(annotation: Any) -> tuple[Any, bool]:
    """Return a field's type without its parameters, and whether a function parses its values."""
    origin = get_origin(annotation)
    if origin is Annotated:
        plain, is_parsed = plain_type(get_args(annotation)[0])
        parsers = (isinstance(part, BeforeValidator) for part in get_args(annotation)[1:])
        return plain, is_parsed or any(parsers)
    if origin in {Union, UnionType}:
        return plain_type(next(kind for kind in get_args(annotation) if kind is not NoneType))
    return origin or annotation, False


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _dependencies(after: tuple[str, ...]) -> str:
    """Return values of --after, such as ``12:any``, as dependencies of Slurm: ``afterany:12``."""
    parts = (entry.partition(":") for entry in after)
    return ",".join(
        job_id if job_id == SINGLETON else f"after{end or 'ok'}:{job_id}"
        for job_id, _, end in parts
    )


def _sbatch_text(value: str) -> str:
    """Return a text of --slurm. Reject options for quantities that only a flag can set."""
    for request in directives_of([value]):
        names = [name for name in _set_by(request) if OPTIONS[name].is_only_flag]
        if names and not (request.option and request.option.beside):
            raise option_of_clusterctl(request, flags_for(request))
    return value


SbatchText = Annotated[Text, AfterValidator(_sbatch_text)]


class JobOptions(SpecModel):
    """The options of a job. Each field has the name of its flag. ``None``: Slurm's default
    applies.
    """

    name: Annotated[
        JobName | None,
        JobOption(
            "Job name. Default: the name in the script's #SBATCH lines, or else that of the script or "
            "bundled job.",
            sbatch="--job-name",
            in_script=False,
            is_only_flag=True,
            needs_slurm=False,
            compared=False,
            in_shell=False,
            in_replay=False,
            topic=Topic.PROGRAM,
        ),
    ] = None
    args: Annotated[
        tuple[Argument, ...],
        JobOption(
            "Arguments of the program.",
            is_argument=True,
            again=Resubmission.CHOSEN,
            compared=False,
            variants=InVariants.APPENDED,
            topic=Topic.PROGRAM,
        ),
    ] = ()
    nodes: Annotated[
        Count,
        JobOption(
            "Number of nodes. Default: 1.",
            sbatch="--nodes",
            writes_default=True,
            is_only_flag=True,
            needs_slurm=False,
            in_replay=False,
            topic=Topic.SIZE,
            is_usual=True,
        ),
    ] = 1
    tasks_per_node: Annotated[
        Count,
        JobOption(
            "Tasks (ranks) per node. Default: 1; for bundled jobs: number of GPUs.",
            metavar="TASKS",
            sbatch="--ntasks-per-node",
            writes_default=True,
            is_only_flag=True,
            needs_slurm=False,
            in_replay=False,
            topic=Topic.SIZE,
            is_usual=True,
        ),
    ] = 1
    ranks: Annotated[
        Count | None,
        JobOption(
            "Ranks that mpirun starts; the other tasks are for MPI_Comm_spawn. Default: all.",
            topic=Topic.SIZE,
            in_submit=False,
        ),
    ] = None
    cpus: Annotated[
        Count | None,
        JobOption(
            "CPU cores per task.",
            sbatch="--cpus-per-task",
            needs_slurm=False,
            in_replay=False,
            topic=Topic.SIZE,
            is_usual=True,
        ),
    ] = None
    gpus: Annotated[
        Gpus,
        JobOption(
            "GPUs per node. Default: 0; for bundled jobs except probe and export: all.",
            metavar="GPUS_PER_NODE",
            sbatch="--gpus-per-node",
            text=lambda gpus: str(gpus or ""),
            is_only_flag=True,
            refusal=Refusal(
                r"generic resource|\bgres\b|\bgpus?\b(?!-)",
                "sinfo --format=%G",
                also=("--gres",),
                is_vague=True,
            ),
            in_replay=False,
            topic=Topic.SIZE,
            is_usual=True,
        ),
    ] = 0
    mem: Annotated[
        JobMemoryMib | None,
        JobOption(
            "Memory per node, such as 4GiB.",
            metavar="MEMORY_PER_NODE",
            sbatch="--mem",
            text=lambda mib: f"{mib}M",
            refusal=Refusal("mutually exclusive", is_conflict=True),
            compared=True,
            topic=Topic.SIZE,
            is_usual=True,
        ),
    ] = None
    time: Annotated[
        TimeLimitS | None,
        JobOption(
            "Time limit, such as 30m or 1:30:00. A bare number is minutes.",
            sbatch="--time",
            text=_clock,
            is_only_flag=True,
            needs_slurm=False,
            refusal=Refusal(
                r"time.?limit|wall.?time|--time\b", "sinfo --format=%R,%l", is_vague=True
            ),
            topic=Topic.SIZE,
            is_usual=True,
        ),
    ] = None
    partition: Annotated[
        SlurmName | None,
        JobOption(
            "Partition. Default: the first.",
            tab="partitions",
            sbatch="--partition",
            is_only_flag=True,
            needs_slurm=False,
            refusal=Refusal("invalid partition|partition name", "sinfo --format=%R"),
            compared=True,
            topic=Topic.PLACE,
            is_usual=True,
        ),
    ] = None
    account: Annotated[
        SlurmName | None,
        JobOption("Slurm account.", sbatch="--account", topic=Topic.PLACE, is_usual=True),
    ] = None
    qos: Annotated[
        SlurmName | None,
        JobOption(
            "Quality of service.",
            sbatch="--qos",
            refusal=Refusal("invalid qos", "sacctmgr show qos format=name"),
            topic=Topic.PLACE,
        ),
    ] = None
    constraint: Annotated[
        Features | None,
        JobOption(
            "Required node features.",
            metavar="FEATURES",
            sbatch="--constraint",
            refusal=Refusal("feature", "sinfo --format=%f", also=("--prefer",)),
            compared=True,
            topic=Topic.PLACE,
        ),
    ] = None
    reservation: Annotated[
        SlurmName | None,
        JobOption(
            "Slurm reservation.",
            sbatch="--reservation",
            refusal=Refusal("reservation", "scontrol show reservation"),
            topic=Topic.PLACE,
        ),
    ] = None
    licenses: Annotated[
        Licenses | None,
        JobOption(
            "Licenses that Slurm counts, such as matlab:2.",
            sbatch="--licenses",
            refusal=Refusal("license", "scontrol show licenses"),
            topic=Topic.PLACE,
        ),
    ] = None
    array: Annotated[
        Array | None,
        JobOption(
            "Submit a job array, such as 1-10%2.",
            metavar="INDICES",
            sbatch="--array",
            is_only_flag=True,
            refusal=Refusal("job array spec"),
            in_rehearse=False,
            again=Resubmission.CHOSEN,
            in_replay=False,
            topic=Topic.MANY,
            is_usual=True,
        ),
    ] = None
    sweep: Annotated[
        Annotated[Sweep, BeforeValidator(as_sweep)] | None,
        JobOption(
            "Run one task per value of an option. KEY=V,V, KEY=A..B, or FILE.csv, a table with a task "
            "per line. Repeat it for all combinations.",
            metavar="KEY=VALUES",
            flag_type=list[str],
            needs_slurm=True,
            in_rehearse=False,
            again=Resubmission.CHOSEN,
            local=LocalValue.TABLE,
            topic=Topic.MANY,
            is_usual=True,
        ),
    ] = None
    pack: Annotated[
        Toggle,
        JobOption(
            "Run the tasks of the array or sweep inside a single job, as many at a time as fit: for "
            "many short tasks.",
            needs_slurm=True,
            in_rehearse=False,
            compared=False,
            topic=Topic.MANY,
        ),
    ] = False
    scaling: Annotated[
        Annotated[Scaling, BeforeValidator(as_scaling)] | None,
        JobOption(
            "Run the job on each of these numbers of nodes. KIND: nodes, tasks or gpus (per node). For a "
            "table of speed-up and efficiency.",
            metavar="[KIND=]N,N...",
            needs_slurm=True,
            in_rehearse=False,
            again=Resubmission.CHOSEN,
            topic=Topic.MANY,
        ),
    ] = None
    after: Annotated[
        tuple[Dependency, ...],
        JobOption(
            "Start after this job has ended. END: ok (successfully, the default), any or notok. Or "
            "singleton: after your earlier jobs with the same name. The files of the jobs are in "
            "$CLUSTERCTL_AFTER_1, _2, ...",
            metavar="JOB_ID[:END]|singleton",
            examples=("12:ok", SINGLETON),
            sbatch="--dependency",
            text=_dependencies,
            has_own_values=True,
            refusal=Refusal("dependency", "squeue --format=%i"),
            again=Resubmission.CHOSEN,
            in_shell=False,
            in_replay=False,
            topic=Topic.MANY,
            is_usual=True,
        ),
    ] = ()
    slurm: Annotated[
        tuple[SbatchText, ...],
        JobOption(
            "Another option of sbatch. Such as '--exclude=NODE'.",
            metavar="OPTION",
            examples=("--exclude=demo-train-1",),
            needs_slurm=True,
            in_shell="Another option of salloc, such as '--exclude=NODE'.",
            variants=InVariants.APPENDED,
            topic=Topic.MORE,
            is_usual=True,
        ),
    ] = ()
    from_run: Annotated[
        Run | None,
        JobOption(
            "Continue an earlier run. RUN: its folder, its name in ./runs, or its job ID; its files are "
            "in $CLUSTERCTL_FROM_RUN.",
            metavar="RUN",
            tab="runs",
            examples=("12",),
            again=Resubmission.CHOSEN,
            local=LocalValue.NAME,
            topic=Topic.RESTARTS,
            is_usual=True,
        ),
    ] = None
    requeue: Annotated[
        Toggle,
        JobOption(
            "Also requeue after failures and the time limit, not only after the loss of a node. "
            "Default for train: with --save-interval.",
            sbatch="--requeue",
            is_only_flag=True,
            in_rehearse=False,
            in_replay=False,
            topic=Topic.RESTARTS,
            is_usual=True,
        ),
    ] = False
    signal: Annotated[
        Signal | None,
        JobOption(
            "Signal for the program before the time limit, such as USR1@120 (seconds).",
            metavar="SIGNAL@SECONDS",
            examples=("USR1@120",),
            sbatch="--signal",
            # With B, only the batch script gets the signal, not its steps.
            text=lambda signal: f"B:{signal}",
            is_only_flag=True,
            compared=False,
            in_shell=False,
            in_replay=False,
            topic=Topic.RESTARTS,
        ),
    ] = None
    chain: Annotated[
        JobTimeS | None,
        JobOption(
            "Requeue the job at its time limits, such as --time 4h, until it has run 7d in total.",
            needs_slurm=True,
            in_rehearse=False,
            topic=Topic.RESTARTS,
            in_submit=False,
        ),
    ] = None
    launcher: Annotated[
        Launcher,
        JobOption(
            "Launcher of the ranks: srun (PMIx, the default), mpirun or torchrun.",
            tab=tuple(Launcher),
            in_shell=True,
            topic=Topic.PROGRAM,
        ),
    ] = Launcher.SRUN
    hang: Annotated[
        Hang | None,
        JobOption(
            "If the job makes no progress for SECONDS: warn, end the program, or off. Default: "
            "warn@600; for train: end@600.",
            metavar="MODE[@SECONDS]",
            tab=("warn", "end", "off"),
            examples=("end@300",),
            in_rehearse=False,
            topic=Topic.RESTARTS,
        ),
    ] = None
    alarm: Annotated[
        tuple[Alarm, ...],
        JobOption(
            "What to do if GPUs are idle, steps wait for data, GPUs are slowed down, or memory or a "
            "disk is nearly full. Default: warn.",
            metavar="KIND=ACTION[@TIME]",
            tab=("idle=", "data=", "throttled=", "memory=", "disk="),
            examples=("idle=end@1h",),
            in_rehearse=False,
            topic=Topic.RESTARTS,
            in_submit=False,
        ),
    ] = ()
    include: Annotated[
        tuple[FilePattern, ...],
        JobOption(
            "Send files that git ignores. PATTERN is as in .gitignore.",
            metavar="PATTERN",
            in_shell=True,
            compared=False,
            variants=InVariants.APPENDED,
            topic=Topic.PROGRAM,
            is_usual=True,
        ),
    ] = ()
    exclude: Annotated[
        tuple[FilePattern, ...],
        JobOption(
            "Do not send files matching PATTERN.",
            metavar="PATTERN",
            in_shell=True,
            compared=False,
            variants=InVariants.APPENDED,
            topic=Topic.PROGRAM,
        ),
    ] = ()
    folder: Annotated[
        Folder,
        JobOption(
            "Send this folder with the script; none: only the script. Default: the nearest folder with "
            "a project file, such as pyproject.toml or .git, or else the script's folder.",
            metavar="DIR",
            flag_type=Path,
            examples=(".",),
            in_shell="Send this folder, and start in it. Default: start in your home.",
            again=Resubmission.CONTINUED,
            compared=False,
            local=LocalValue.PATH,
            topic=Topic.PROGRAM,
        ),
    ] = True
    outputs: Annotated[
        tuple[FilePattern, ...],
        JobOption(
            "Pattern of files to collect, such as 'results/**'.",
            examples=("results/**",),
            compared=False,
            variants=InVariants.APPENDED,
            topic=Topic.PROGRAM,
            in_submit=False,
        ),
    ] = ()
    stage: Annotated[
        Stages,
        JobOption(
            "Copy files to a disk of each node before the start, unless they are there from an "
            "earlier job. SOURCE:TARGET:by-node shares a folder's files out among the nodes.",
            metavar="SOURCE:TARGET",
            examples=("/shared/data/x:/scratch/x",),
            needs_slurm=True,
            in_rehearse=False,
            variants=InVariants.MERGED,
            topic=Topic.PROGRAM,
            in_submit=False,
        ),
    ] = ()
    env: Annotated[
        Variables,
        JobOption(
            "Environment variable K=V. K alone passes your current value of K.",
            in_shell=True,
            again=Resubmission.CONTINUED,
            variants=InVariants.MERGED,
            local=LocalValue.VARIABLE,
            topic=Topic.PROGRAM,
            is_usual=True,
        ),
    ] = Field({})
    secret: Annotated[
        Secrets,
        JobOption(
            "Environment variable that only the ranks get, with the content of FILE. NAME alone "
            "passes your current value. Nothing records the value.",
            metavar="NAME[=FILE]",
            examples=(["HF_TOKEN"],),
            in_shell="Environment variable of the shell, with the content of FILE. NAME alone passes "
            "your current value. Nothing records the value.",
            in_replay=True,
            variants=InVariants.MERGED,
            local=LocalValue.SECRET,
            topic=Topic.PROGRAM,
        ),
    ] = Field({})
    requirements: Annotated[
        PackageFile | None,
        JobOption(
            "File that lists the Python packages. A requirements.txt, pyproject.toml, uv.lock, "
            "pylock.toml or a script; none: no packages. Default: such a file beside a Python program.",
            flag_type=Path,
            metavar="FILE[EXTRA]",
            examples=("pyproject.toml[train]",),
            in_shell=True,
            again=Resubmission.CONTINUED,
            compared=False,
            local=LocalValue.PACKAGES,
            topic=Topic.PROGRAM,
            is_usual=True,
        ),
    ] = None
    env_path: Annotated[
        EnvironmentThere | None,
        JobOption(
            "Run with the conda or virtual environment in this folder of the cluster, or with conda's "
            "environment of this name there. It is not changed.",
            metavar="DIR|NAME",
            examples=("/shared/envs/torch",),
            in_shell=True,
            again=Resubmission.CONTINUED,
            compared=False,
            topic=Topic.PROGRAM,
        ),
    ] = None
    module: Annotated[
        tuple[EnvironmentModule, ...],
        JobOption(
            "Environment module to load on the nodes before the program, after the cluster's.",
            metavar="NAME",
            examples=(["gcc/12"],),
            in_shell=True,
            variants=InVariants.MERGED,
            topic=Topic.PROGRAM,
        ),
    ] = ()
    build: Annotated[
        Command | None,
        JobOption(
            "Shell command that builds the program on the job's first node before it starts, such "
            "as 'make -j4'. Jobs with the same files take the result.",
            metavar="COMMAND",
            examples=("make -j4",),
            topic=Topic.PROGRAM,
        ),
    ] = None
    container: Annotated[
        Image | None,
        JobOption(
            "Run in this container image. docker://NAME:TAG, or a file, here or on the cluster.",
            metavar="IMAGE",
            examples=("docker://python:3.12-slim", "/shared/images/torch.sif"),
            in_shell="Run the shell, or what `launch` starts, in this container image: "
            "docker://NAME:TAG, or a file, here or on the cluster.",
            again=Resubmission.CONTINUED,
            local=LocalValue.IMAGE,
            topic=Topic.PROGRAM,
            is_usual=True,
        ),
    ] = None
    mount: Annotated[
        tuple[Mount, ...],
        JobOption(
            "With --container: the path SOURCE of the nodes is TARGET in the container; without "
            "TARGET, it has the same path there.",
            metavar="SOURCE[:TARGET[:ro]]",
            examples=(["/shared/data:/data:ro"],),
            in_shell=True,
            variants=InVariants.MERGED,
            topic=Topic.PROGRAM,
        ),
    ] = ()
    tag: Annotated[
        tuple[Tag, ...],
        JobOption(
            "Tag for finding the run with `clusterctl runs`.",
            in_replay=True,
            again=Resubmission.CONTINUED,
            variants=InVariants.MERGED,
            topic=Topic.MORE,
        ),
    ] = ()
    note: Annotated[
        Text | None,
        JobOption(
            "A remark about the run.",
            in_replay=True,
            again=Resubmission.CONTINUED,
            topic=Topic.MORE,
        ),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """Field -> validated value of each option that the user gave. Defaults are left out."""
        return {field: getattr(self, field) for field in self.model_fields_set}


def _declared(name: str, field: FieldInfo) -> JobOption:
    """Return the option that a field declares, with its name, its type and its defaults."""
    option = next(part for part in field.metadata if isinstance(part, JobOption))
    own = sbatch_options()[option.sbatch.removeprefix("--")] if option.sbatch else None
    parts = [part for part in field.metadata if part is not option]
    in_shell = own is not None and own.salloc
    in_replay = own is not None if option.in_replay is None else option.in_replay
    return replace(
        option,
        name=name,
        type=Annotated[field.annotation, *parts] if parts else field.annotation,
        letter=own.letter if own is not None else "",
        needs_slurm=own is not None if option.needs_slurm is None else option.needs_slurm,
        in_shell=in_shell if option.in_shell is None else option.in_shell,
        in_replay=in_replay,
        compared=not in_replay if option.compared is None else option.compared,
    )


# Name of a field -> its option.
OPTIONS: Final[Mapping[str, JobOption]] = {
    name: _declared(name, field) for name, field in JobOptions.model_fields.items()
}
# An option of sbatch that sets the product of several quantities -> the fields of these.
_PRODUCTS: Final = {"--ntasks": ("nodes", "tasks_per_node")}


def options_with(**traits: object) -> tuple[str, ...]:
    """Return the names of the options whose fields of JobOption have these values."""
    return tuple(
        name
        for name, option in OPTIONS.items()
        if all(getattr(option, trait) == value for trait, value in traits.items())
    )


def quantities_of(names: Iterable[str]) -> frozenset[str]:
    """Return the quantities, as in ``Directive.quantities``, that options set. names: of fields."""
    return frozenset(OPTIONS[name].sbatch for name in names if name in OPTIONS) - {""}


def _set_by(request: Directive) -> list[str]:
    """Return the names of the options for the quantities of an option of sbatch."""
    names = [name for name, option in OPTIONS.items() if option.sbatch in request.quantities]
    return names or [name for one in request.quantities for name in _PRODUCTS.get(one, ())]


def flags_for(request: Directive) -> str:
    """Return the flags of `submit` to use in place of an option of sbatch.

    Empty: --slurm must pass the option.
    """
    option = request.option
    if option is None or option.beside:
        return ""
    if option.use:
        return option.use
    flags = []
    for name in _set_by(request):
        own = OPTIONS[name]
        if own.is_only_flag or own.sbatch == request.own_name:
            no = own.kind is bool and option.name.startswith("no-")
            flags.append(own.usage.replace("--", "--no-", 1) if no else own.usage)
    return " ".join(flags)


def flag_of(quantity: str) -> str:
    """Return the flag that sets a quantity. Empty: there is no flag."""
    return next((one.flag for one in OPTIONS.values() if one.sbatch == quantity), "")


# Keys of a job file that have keys of their own -> the key for the value of the flag.
_NESTED: Final = {"scaling": "sizes", "sweep": "grid"}


def options_set(entries: Iterable[str], flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of a job together with the values of --set: field of JobOptions -> value.

    entries: KEY=VALUE, with a key of job files. SCALING.KEY and SWEEP.KEY are keys in theirs. A list
        gets the value as one more entry.

    Raises: UsageError: there is no such key, or a flag or another entry has set it. A single error
        has all problems.
    """
    options = dict(flags)
    faults = []
    for entry in entries:
        try:
            _set(options, entry)
        except UsageError as exc:
            faults.append(exc)
    raise_together(faults)
    return options


def _set(options: dict[str, object], entry: str) -> None:
    key, equals, text = entry.partition("=")
    name, _, inner = key.partition(".")
    option = OPTIONS.get(name)
    if option is None or option.is_argument or not equals or (inner and name not in _NESTED):
        raise UsageError(
            f"--set {entry} does not set a key of job files",
            about="job-key",
            fix=(did_you_mean(name, OPTIONS) if option is None else "")
            or "use --set KEY=VALUE; docs/jobs.md lists the keys",
        )
    if inner or (name in _NESTED and isinstance(options.get(name), Mapping)):
        whole = _nested(name, options.get(name))
        keys: tuple[str, object] = (inner or _NESTED[name], _scalar(text))
        if keys[0] in whole:
            raise excluded(f"--set {key}", f"another --set {key} or {option.flag}")
        options[name] = {**whole, keys[0]: keys[1]}
    elif option.is_list or option.kind == list[str]:
        options[name] = [*_entries(options.get(name)), text]
    elif name in options:
        raise excluded(f"--set {key}", f"another --set {key} or {option.flag}")
    else:
        options[name] = _scalar(text) if option.kind in {bool, int} else text


def _nested(name: str, value: object) -> dict[str, object]:
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None else {_NESTED[name]: value}


def _entries(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _scalar(text: str) -> bool | int | str:
    """Return a text as YAML would read it, if it is true, false or a whole number."""
    words = {"true": True, "false": False}
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else words.get(text, text)


_SPELLED: Final = {"args": "the arguments after --"}


def job_options(flags: Mapping[str, object]) -> JobOptions:
    """Validate the flags of a job or an allocation. ``flags``: field of JobOptions -> value.

    Raises:
        UsageError: flags are wrong; ``failures`` has an entry for each wrong flag.
    """
    try:
        return JobOptions.model_validate(flags, context={HERE: Path.cwd()})
    except ValidationError as exc:
        raise wrong_flags(exc, flags) from exc


def wrong_flags(
    exc: ValidationError, flags: Mapping[str, object], spelled: Mapping[str, str] = _SPELLED
) -> UsageError:
    """Return the error for wrong flags; ``failures`` has an entry for each.

    flags: field -> value. spelled: field -> its flag, for fields whose flag has another name.
    """
    messages = tuple(_explained(exc, flags, spelled).values())
    failures = tuple(Failure("option-invalid", message, about=message.code) for message in messages)
    if len(messages) == 1:
        return UsageError(messages[0], about=messages[0].code, failures=failures)
    summary = f"{len(messages)} flags are wrong"
    return UsageError(summary, about="flags", why="\n".join(messages), failures=failures)


def _explained(
    error: ValidationError, flags: Mapping[str, object], spelled: Mapping[str, str]
) -> dict[str, Notice]:
    wrong: dict[str, Notice] = {}
    for entry in error.errors(include_url=False, include_input=False):
        field = str(entry["loc"][0])
        kind = entry["type"]
        option = OPTIONS.get(field)
        own = option.flag.removesuffix("=") if option else f"--{field.replace('_', '-')}"
        flag = spelled.get(field, own)
        value = flags[field]
        index = entry["loc"][1] if len(entry["loc"]) > 1 else None
        if isinstance(value, list | tuple) and isinstance(index, int):
            value = value[index]
        elif isinstance(value, Mapping) and index in value:
            is_key = entry["loc"][-1] == "[key]"
            if not is_key:
                flag = f"--set {field}.{index}" if field in _NESTED else f"{flag} {index}"
            value = index if is_key else value[index]
        message = explain(kind, entry.get("ctx", {}), flag, shown(value))
        wrong.setdefault(
            flag, Notice(message.code, f"{flag}: {message}") if kind == "value_error" else message
        )
    return wrong
