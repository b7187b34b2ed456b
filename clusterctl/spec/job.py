"""Jobs: the options that flags and job files share, and the program that JOB names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypedDict

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from clusterctl.errors import Failure, UsageError
from clusterctl.spec.base import (
    HERE,
    PATTERNS,
    FileName,
    JobMemoryMib,
    JobTimeS,
    Model,
    Toggle,
    did_you_mean,
    explain,
    folder_of,
)
from clusterctl.spec.common import AccountName, PartitionName
from clusterctl.spec.sweep import Sweep, as_grid
from clusterctl.spec.units import shown

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_SLURMS: Final = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX)_")


def can_travel(value: str) -> str:
    """Text that can be written into a script and passed to a process."""
    if "\0" in value:
        raise ValueError(f"{shown(value)} has a null byte, which no process can get")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"{shown(value)} is not UTF-8 text") from exc
    return value


def _as_mapping(value: object) -> object:
    """``["A=1", "B"]``, as flags say it, as a mapping; a name alone takes the caller's value."""
    if isinstance(value, list | tuple):
        pairs = [entry.partition("=") for entry in value if isinstance(entry, str)]
        if len(pairs) < len(value):
            raise ValueError("each entry must be text such as NAME=value")
        value = {name: text if given else None for name, given, text in pairs}
    if not isinstance(value, Mapping):
        return value
    for name, text in value.items():
        if text is None and name not in os.environ:
            raise ValueError(f"{shown(name)} has no value, nor one here to take; write one")
    return {name: os.environ[name] if text is None else text for name, text in value.items()}


def _variable(name: str) -> str:
    if not re.fullmatch(_VARIABLE, name):
        raise ValueError(f"{shown(name)} is no name of a variable: letters, digits and underscores")
    if _SLURMS.match(name):
        raise ValueError(f"{name} is Slurm's to set; a value from outside would mislead its steps")
    if name == "PATH":
        raise ValueError("PATH is clusterctl's: the job's Python comes first; change it in your script")
    return name


def _image(value: str, info: ValidationInfo) -> str:
    """An image file that is here, as an absolute path; or a path on the cluster as it was written."""
    if "://" in value:
        raise ValueError(f"{shown(value)} is no file: make one of it with `apptainer pull image.sif ...`")
    try:
        local = (folder_of(info) / value).expanduser().absolute()
        if local.is_file():
            return str(local)
    except (OSError, ValueError, RuntimeError):  # a name that no file here can have, or no such user
        pass
    if value.startswith(("/", "~/")):
        return value
    raise ValueError(f"there is no file {shown(value)} here; a path on the cluster begins with / or ~/")


def _pattern(value: str) -> str:
    names = [name for name in value.removeprefix("!").strip().split("/") if name]
    if not names or value.startswith("#") or not {".", ".."}.isdisjoint(names):
        raise ValueError(
            f"{shown(value)} can match nothing: write a path from the folder on, without . and .., such as "
            "'results/**'; a # at its beginning as \\#"
        )
    return value


Text = Annotated[str, AfterValidator(can_travel)]
Argument = Annotated[Text, WithJsonSchema({"type": ["string", "number", "boolean"]})]
Variables = Annotated[
    Mapping[Annotated[str, AfterValidator(_variable)], Text],
    BeforeValidator(_as_mapping),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{_VARIABLE}$"},
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        }
    ),
]
Image = Annotated[Text, AfterValidator(_image)]
FilePattern = Annotated[Text, AfterValidator(_pattern)]  # as in a .gitignore file


BUNDLED_JOBS = ("train", "eval", "sample", "predict", "export", "bench", "gemm", "allreduce", "probe")
MODEL_JOBS = ("eval", "sample", "predict", "export")  # they use a trained model
ONE_RANK_JOBS = ("sample", "predict", "export")
REQUEUE_EXIT_CODE: Final = 75  # EX_TEMPFAIL of sysexits.h: the program saved its work, and goes on with it

_MAX_SIGNAL_S = 65_535
_MAX_COUNT = 65_533  # Slurm counts nodes, tasks and CPUs of a node in 16 bits
_ARRAY_RANGE = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")


class Launcher(StrEnum):
    """How ranks are started: ``srun`` speaks PMIx, ``mpirun`` gets a hostfile; ``torchrun`` is PyTorch's."""

    SRUN = "srun"
    MPIRUN = "mpirun"
    TORCHRUN = "torchrun"


def _runnable_array(value: str) -> str:
    indices, _, limit = value.partition("%")
    if limit and int(limit) == 0:
        raise ValueError(f"{shown(value)} lets none of the array's jobs run")
    for first, last, stride in _ARRAY_RANGE.findall(indices):
        if int(last) < int(first):
            raise ValueError(f"{first}-{last} ends before it starts")
        if stride and int(stride) == 0:
            raise ValueError(f"{first}-{last}:{stride} has a stride of 0")
    return value


def _timely_signal(value: str) -> str:
    if int(value.partition("@")[2]) > _MAX_SIGNAL_S:
        raise ValueError(f"{shown(value)} is more than {_MAX_SIGNAL_S} seconds before the time limit")
    return value


Count = Annotated[int, Field(ge=1, le=_MAX_COUNT, strict=True)]
JobName = Annotated[str, PATTERNS["job_name"]]
Tag = Annotated[str, PATTERNS["job_name"]]
Signal = Annotated[str, PATTERNS["signal"], AfterValidator(_timely_signal)]
Array = Annotated[str, PATTERNS["array"], AfterValidator(_runnable_array)]


class JobOptions(Model):
    """What can be said of a job. Each field is called as its flag is; None leaves the choice to Slurm."""

    name: JobName | None = Field(None, description="the job's name; default: the program's or the script's")
    args: tuple[Argument, ...] = Field((), description="arguments of the program")
    nodes: Count = Field(1, description="nodes")
    tasks_per_node: Count = Field(1, description="ranks on each node")
    cpus: Count | None = Field(None, description="cores of each rank")
    gpus: Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)] = Field(0, description="GPUs on each node")
    mem: JobMemoryMib | None = Field(None, description="memory on each node")
    time: JobTimeS | None = Field(None, description="time limit; a bare number is minutes")
    partition: PartitionName | None = Field(None, description="Slurm partition; default: the first")
    account: AccountName | None = Field(None, description="Slurm account")
    qos: AccountName | None = Field(None, description="quality of service")
    constraint: Annotated[str, PATTERNS["constraint"]] | None = Field(
        None, description="features that the nodes must have"
    )
    array: Array | None = Field(None, description="indices of a job array")
    sweep: Annotated[Sweep, BeforeValidator(as_grid)] | None = Field(
        None, description="a job array whose tasks differ in options of the program"
    )
    signal: Signal | None = Field(
        None,
        description="a signal for the program, and how many seconds before the time limit it is sent",
        examples=["USR1@120"],
    )
    requeue: Toggle = Field(
        False, description=f"requeue the job, in its folder, when it exits with {REQUEUE_EXIT_CODE}"
    )
    launcher: Launcher = Field(Launcher.SRUN, description="how ranks are started")
    folder: Toggle = Field(True, description="send the script's folder with the job")
    include: tuple[FilePattern, ...] = Field(
        (), description="patterns of files to send although .gitignore lists them"
    )
    exclude: tuple[FilePattern, ...] = Field((), description="patterns of files not to send")
    outputs: tuple[FilePattern, ...] = Field(
        (),
        description="patterns of files to collect, as in a .gitignore file; default: all but old checkpoints",
        examples=["results/**"],
    )
    env: Variables = Field({}, description="environment variables of the program")
    container: Image | None = Field(
        None, description="an Apptainer image that the program runs in: a file, or a path on the cluster"
    )
    requirements: FileName | None = Field(
        None, description="a requirements file, as pip reads it: packages for the program's Python"
    )
    tag: tuple[Tag, ...] = Field((), description="words to find the run by")
    note: Text | None = Field(None, description="a remark about the run")

    @property
    def given(self) -> dict[str, Any]:
        """What was said, validated: all that is not merely a default."""
        return {field: getattr(self, field) for field in self.model_fields_set}


class JobKeywords(TypedDict, total=False):
    """JobOptions but for ``args``, as keyword arguments say them."""

    name: str
    nodes: int
    tasks_per_node: int
    cpus: int
    gpus: int
    mem: int | str
    time: int | str
    partition: str
    account: str
    qos: str
    constraint: str
    array: str
    sweep: Mapping[str, Any] | Sequence[str]
    signal: str
    requeue: bool
    launcher: str
    folder: bool
    include: Sequence[str]
    exclude: Sequence[str]
    outputs: Sequence[str]
    env: Mapping[str, str] | Sequence[str]
    container: str
    requirements: str | Path
    tag: Sequence[str]
    note: str


class JobSpec(JobOptions):
    """One job. Exactly one of ``bundled`` and ``script`` is set. ``mem`` is in MiB, ``time`` in seconds."""

    name: JobName
    bundled: str | None = None
    script: Path | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.bundled is None) == (self.script is None):
            raise ValueError("a job is either a bundled one or a script")
        if self.bundled is not None and self.bundled not in BUNDLED_JOBS:
            raise ValueError(f"{self.bundled!r} is not a bundled job")
        return self

    @property
    def tasks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.tasks_per_node


_SHEBANG: Final = re.compile(rb"#!\s*(?:/\S*/)?(?:env\s+(?:-S\s+)?)?(?:/\S*/)?([A-Za-z]+)[0-9.]*\b")
_NO_TARGET: Final = f"no file has this name, and the bundled jobs are {', '.join(BUNDLED_JOBS)}"
_JOB_FILES: Final = frozenset({".yaml", ".yml"})
_SHELL_ENDINGS: Final = frozenset({".sh", ".bash"})
_SHELLS: Final = frozenset({b"sh", b"bash", b"dash", b"ksh", b"zsh"})


def is_job_file(target: str) -> bool:
    return Path(target).suffix.lower() in _JOB_FILES


def is_python(script: Path) -> bool:
    """Whether a script is Python, by its ending or else its first line; the others are shell.

    Raises:
        UsageError: it can't be read, or is neither.
    """
    try:
        with script.open("rb") as file:
            begins = file.read(256)
    except OSError as exc:
        raise UsageError("the script can't be read", where=str(script), why=exc.strerror or str(exc)) from exc
    shebang = _SHEBANG.match(begins)
    program = shebang[1] if shebang else b""
    if begins.startswith(b"\x7fELF"):
        raise UsageError(
            "this is a compiled program, not a script",
            where=str(script),
            fix=f"submit a shell script beside it that has the line: srun ./{script.name}",
        )
    if script.suffix == ".py" or (program == b"python" and script.suffix not in _SHELL_ENDINGS):
        return True
    if script.suffix in _SHELL_ENDINGS or program in _SHELLS:
        return False
    raise UsageError(
        "this is neither a shell script nor a Python program",
        where=str(script),
        why="its name does not end in .sh, .bash or .py, and its first line names no shell or Python",
        fix="give it such an ending, or a first line such as #!/bin/bash",
    )


def named_job(target: str, folder: Path) -> tuple[str | None, Path | None]:
    """The bundled job or the script that ``target`` names; the other is None.

    A bundled name wins over a file of that name: ``./train`` is the file. Paths are relative to ``folder``.

    Raises:
        UsageError: it names neither.
    """
    if target in BUNDLED_JOBS:
        return target, None
    try:
        target.encode()  # its name stands in the batch script, which is UTF-8
        path = (folder / target).absolute()
        if ".." in path.parts:  # what is above it must be where it lies, also behind a link
            path = Path(os.path.realpath(path.parent, strict=True)) / path.name
        mode = path.stat().st_mode
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no job {shown(target)}", why=_NO_TARGET, fix=_near(target, folder)
        ) from exc
    except UnicodeEncodeError as exc:
        why = "its name is not UTF-8 text"
        raise UsageError(f"{shown(target)} can't be submitted", why=why, fix="give it another name") from exc
    except (OSError, ValueError) as exc:  # ValueError: a null byte
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(f"{shown(target)} can't be read", why=why, fix="name a script of yours") from exc
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise UsageError(f"{shown(target)} is {what}", fix="name a script of yours, or a bundled job")
    is_python(path)  # or it is shell, else no job
    return None, path


def _near(target: str, folder: Path) -> str:
    """A bundled job, or a file beside the missing one, whose name is near."""
    path = folder / target
    try:
        files = [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        files = []  # no such folder either: nothing to compare with
    if target == Path(target).name and (near := did_you_mean(target, BUNDLED_JOBS)):
        return near
    return did_you_mean(path.name, files) or "name a bundled job, or the path of a script"


def safe_name(script: str) -> str:
    """A job name out of a file's: ``my job.sh`` is ``my-job``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._")[:64] or "job"


def job_spec(target: str, flags: Mapping[str, object]) -> JobSpec:
    """The job that a `submit` asks for. ``target`` is a bundled job's name, or the path of a script.

    ``flags`` holds what was given, by the names of JobOptions' fields; ``model_fields_set`` of the job tells
    that from defaults.

    Raises:
        UsageError: the target is neither, or flags are wrong; ``failures`` has one entry a flag.
    """
    return job_of(target, job_options(flags).given, folder=Path())


def job_of(target: str, said: Mapping[str, Any], *, folder: Path) -> JobSpec:
    """The job of what was ``said`` and is valid; paths are relative to ``folder``."""
    bundled, script = named_job(target, folder)
    job = JobSpec(name=bundled or safe_name(target), bundled=bundled, script=script)
    given = {field: value for field, value in said.items() if field != "name" or value is not None}
    job = job.model_copy(update=given)
    if job.sweep is not None:
        if job.array is not None:
            raise UsageError("a sweep is an array of its own", fix="leave out --array, or --sweep")
        job = job.model_copy(update={"array": job.sweep.array})
    if bundled in ONE_RANK_JOBS and job.tasks > 1:
        raise UsageError(
            f"{bundled} runs on one rank, and these are {job.tasks}",
            fix="leave out --nodes and --tasks-per-node",
        )
    return job


def job_options(flags: Mapping[str, object]) -> JobOptions:
    """What flags say of a job, or of an allocation.

    Raises:
        UsageError: flags are wrong; ``failures`` has one entry a flag.
    """
    try:
        return JobOptions.model_validate(flags, context={HERE: Path.cwd()})
    except ValidationError as exc:
        messages = tuple(_explained(exc, flags).values())
        failures = tuple(Failure(UsageError.code, message) for message in messages)
        is_one = len(messages) == 1
        what = messages[0] if is_one else f"{len(messages)} flags are wrong"
        why = "" if is_one else "\n".join(messages)
        raise UsageError(what, why=why, failures=failures) from exc


def _explained(error: ValidationError, flags: Mapping[str, object]) -> dict[str, str]:
    """Flag -> what is wrong with it, in plain words."""
    wrong: dict[str, str] = {}
    for entry in error.errors(include_url=False, include_input=False):
        field, kind = str(entry["loc"][0]), entry["type"]
        flag = "the arguments after --" if field == "args" else f"--{field.replace('_', '-')}"
        value, (at, *_) = flags[field], (*entry["loc"][1:], None)
        if isinstance(value, list | tuple) and isinstance(at, int):
            value = value[at]
        message = explain(kind, entry.get("ctx", {}), flag, shown(value))
        wrong.setdefault(flag, f"{flag}: {message}" if kind == "value_error" else message)
    return wrong
