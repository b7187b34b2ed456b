"""JobOptions, the model that validates the options of a job from flags and job files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from clusterctl.errors import BadValueError, Failure, Notice, UsageError
from clusterctl.spec.base import (
    HERE,
    PATTERNS,
    FileName,
    JobMemoryMib,
    JobTimeS,
    Model,
    Toggle,
    explain,
    folder_of,
)
from clusterctl.spec.common import SlurmName
from clusterctl.spec.names import MAX_COUNT, Launcher
from clusterctl.spec.sbatch import plain_array, requests_of
from clusterctl.spec.sweep import Scaling, Sweep, as_sweep
from clusterctl.spec.units import shown

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_SLURMS: Final = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|PMI|PMIX)_")


def _can_travel(value: str) -> str:
    """Return the text. Reject null bytes and text that is not UTF-8, which no process can
    receive.
    """
    if "\0" in value:
        raise BadValueError(
            "null-byte", f"{shown(value)} contains a null byte, which no process can receive"
        )
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise BadValueError("not-utf8", f"{shown(value)} is not UTF-8 text") from exc
    return value


def _as_mapping(value: object) -> object:
    """Turn ``["A=1", "B"]`` into a mapping. The value of ``B`` is taken from clusterctl's
    environment.
    """
    if isinstance(value, list | tuple):
        pairs = [entry.partition("=") for entry in value if isinstance(entry, str)]
        if len(pairs) < len(value):
            raise BadValueError("not-text", "each entry must be text of the form NAME=value")
        value = {name: text if given else None for name, given, text in pairs}
    if not isinstance(value, Mapping):
        return value
    for name, text in value.items():
        if text is None and name not in os.environ:
            raise BadValueError(
                "variable-without-value",
                f"{shown(name)} is not set in your environment; write NAME=value",
            )
    return {name: os.environ[name] if text is None else text for name, text in value.items()}


def _variable(name: str) -> str:
    if not re.fullmatch(_VARIABLE, name):
        raise BadValueError(
            "not-a-variable-name",
            f"{shown(name)} is not a variable name: use letters, digits and underscores",
        )
    if _SLURMS.match(name):
        raise BadValueError("variable-reserved", f"{name} can't be set, because Slurm sets {name}")
    if name == "PATH":
        raise BadValueError(
            "variable-reserved",
            "PATH can't be set: clusterctl puts the job's Python first; change PATH in your script",
        )
    return name


def _image(value: str, info: ValidationInfo) -> str:
    """Return an absolute path if the container image is a file on this machine, or else the cluster
    path.
    """
    if "://" in value:
        raise BadValueError(
            "not-an-image", f"{shown(value)} is a URL, not a file: run `apptainer pull`"
        )
    try:
        local = (folder_of(info) / value).expanduser().absolute()
        if local.is_file():
            return str(local)
    except (OSError, ValueError, RuntimeError):
        # No file can have this name, or the user of ~user does not exist.
        pass
    if value.startswith(("/", "~/")):
        return value
    raise BadValueError(
        "no-such-file",
        f"this machine has no file {shown(value)}; a path on the cluster begins with / or ~/",
    )


def _pattern(value: str) -> str:
    names = [name for name in value.removeprefix("!").strip().split("/") if name]
    if not names or value.startswith("#") or not {".", ".."}.isdisjoint(names):
        raise BadValueError(
            "pattern-matches-nothing",
            f"{shown(value)} can't match any file: write a path relative to the folder, without "
            ". and .., such as 'results/**'; write \\# for a leading #",
        )
    return value


def _folder(value: object, info: ValidationInfo) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | Path) and str(value):
        return folder_of(info) / value
    raise BadValueError(
        "wrong-type", f"must be true, false or the path of a folder, not {shown(value)}"
    )


def _run(value: str, info: ValidationInfo) -> str:
    """Return the absolute path of a folder. Other texts, such as a job's id, stay."""
    folder = folder_of(info) / value
    return str(folder.absolute()) if os.path.isdir(folder) else value  # noqa: PTH112 - any name


def _sbatch_options(value: str) -> str:
    requests_of([value])
    return value


Text = Annotated[str, AfterValidator(_can_travel)]
# The folder to send with a script.
Folder = Annotated[
    bool | Path,
    BeforeValidator(_folder),
    WithJsonSchema({"type": ["boolean", "string"], "minLength": 1}),
]
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
# A pattern as in a .gitignore file.
FilePattern = Annotated[Text, AfterValidator(_pattern)]
Dependency = Annotated[
    str,
    PATTERNS["after"],
    WithJsonSchema({"type": ["string", "integer"], "pattern": PATTERNS["after"].regex}),
]
SbatchText = Annotated[Text, AfterValidator(_sbatch_options)]

_MAX_SIGNAL_S = 65_535
_ARRAY_RANGE = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")


def _runnable_array(value: str) -> str:
    indices, _, limit = value.partition("%")
    if limit and int(limit) == 0:
        raise BadValueError(
            "array-runs-nothing", f"{shown(value)} allows no task to run: use %1 or more"
        )
    for first, last, stride in _ARRAY_RANGE.findall(indices):
        if int(last) < int(first):
            raise BadValueError("array-range", f"{first}-{last} is not an ascending range")
        if stride and int(stride) == 0:
            raise BadValueError("array-range", f"{first}-{last}:{stride} has a stride of 0")
    return value


def _timely_signal(value: str) -> str:
    if int(value.partition("@")[2]) > _MAX_SIGNAL_S:
        raise BadValueError(
            "signal-too-early",
            f"{shown(value)} is earlier than {_MAX_SIGNAL_S} s before the time limit",
        )
    return value


Count = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)]
JobName = Annotated[str, PATTERNS["job_name"]]
Tag = Annotated[str, PATTERNS["job_name"]]
Signal = Annotated[str, PATTERNS["signal"], AfterValidator(_timely_signal)]
Array = Annotated[
    str, BeforeValidator(plain_array), PATTERNS["array"], AfterValidator(_runnable_array)
]
Hang = Annotated[str, PATTERNS["hang"]]


class JobOptions(Model):
    """The options of a job. Each field has the name of its flag. ``None``: Slurm's default
    applies.
    """

    name: JobName | None = Field(
        None,
        description="the job's name; default: that in the script's #SBATCH lines, or of its program",
    )
    args: tuple[Argument, ...] = Field((), description="arguments of the program")
    nodes: Count = Field(1, description="number of nodes")
    tasks_per_node: Count = Field(1, description="ranks on each node")
    ranks: Count | None = Field(
        None, description="number of ranks that mpirun starts; default: as many as there are tasks"
    )
    cpus: Count | None = Field(None, description="cores of each rank")
    gpus: Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)] = Field(
        0, description="GPUs on each node"
    )
    mem: JobMemoryMib | None = Field(None, description="memory on each node")
    time: JobTimeS | None = Field(None, description="time limit; a bare number is minutes")
    partition: SlurmName | None = Field(None, description="Slurm partition; default: the first")
    account: SlurmName | None = Field(None, description="Slurm account")
    qos: SlurmName | None = Field(None, description="quality of service")
    constraint: Annotated[str, PATTERNS["constraint"]] | None = Field(
        None, description="features that the nodes must have"
    )
    array: Array | None = Field(None, description="indices of a job array")
    sweep: Annotated[Sweep, BeforeValidator(as_sweep)] | None = Field(
        None, description="a job array whose tasks differ in options of the program"
    )
    scaling: Scaling | None = Field(
        None, description="jobs on several numbers of nodes, for a table of speed-up and efficiency"
    )
    after: tuple[Dependency, ...] = Field(
        (),
        description="jobs that must end before the job starts; with :ok (default) successfully, with "
        ":notok not successfully, with :any in any way",
        examples=["12:ok"],
    )
    slurm: tuple[SbatchText, ...] = Field(
        (),
        description="more options of sbatch, which clusterctl does not set itself",
        examples=["--exclude=demo-train-1"],
    )
    from_run: Annotated[Text, Field(min_length=1), AfterValidator(_run)] | None = Field(
        None,
        description="an earlier run that the program continues: its folder, or a job's id; the variable "
        "CLUSTERCTL_FROM_RUN has the path of its files on the cluster",
        examples=["12"],
    )
    signal: Signal | None = Field(
        None,
        description="a signal for the program, and its time in seconds before the time limit",
        examples=["USR1@120"],
    )
    requeue: Toggle = Field(
        False,
        description="requeue the job, in its folder, after a failure or its time limit; "
        "default: true for `train` with --save-interval",
    )
    chain: JobTimeS | None = Field(
        None, description="requeue the job at its time limits until it has run this long in total"
    )
    launcher: Launcher = Field(Launcher.SRUN, description="the program that starts the ranks")
    hang: Hang | None = Field(
        None,
        description="if all ranks wait and nothing makes progress: end the program (default of train), "
        "warn (default of other jobs), or off; and the shortest silence in seconds "
        "(default: 60)",
        examples=["end@300"],
    )
    folder: Folder = Field(
        True,
        description="the folder to send with the script; default: the script's folder, or the project "
        "if the script uses more of it; false: only the script",
        examples=["."],
    )
    include: tuple[FilePattern, ...] = Field(
        (), description="patterns of files to send even if .gitignore excludes them"
    )
    exclude: tuple[FilePattern, ...] = Field((), description="patterns of files not to send")
    outputs: tuple[FilePattern, ...] = Field(
        (),
        description="patterns of files to collect, as in .gitignore; default: all but old checkpoints",
        examples=["results/**"],
    )
    env: Variables = Field({}, description="environment variables of the program")
    container: Image | None = Field(
        None,
        description="an Apptainer image to run the program in: a file here, or a path on the cluster",
    )
    requirements: FileName | None = Field(
        None, description="a pip requirements file for the program"
    )
    tag: tuple[Tag, ...] = Field((), description="tags to find the run with")
    note: Text | None = Field(None, description="a remark about the run")

    @property
    def given(self) -> dict[str, Any]:
        """Field -> validated value of each option that the user gave. Defaults are left out."""
        return {field: getattr(self, field) for field in self.model_fields_set}


def job_options(flags: Mapping[str, object]) -> JobOptions:
    """Validate the flags of a job or an allocation. ``flags``: field of JobOptions -> value.

    Raises:
        UsageError: flags are wrong; ``failures`` has an entry for each wrong flag.
    """
    try:
        return JobOptions.model_validate(flags, context={HERE: Path.cwd()})
    except ValidationError as exc:
        raise wrong_flags(exc, flags) from exc


def wrong_flags(exc: ValidationError, flags: Mapping[str, object]) -> UsageError:
    """Return the error for wrong flags; ``failures`` has an entry for each. ``flags``: field ->
    value.
    """
    messages = tuple(_explained(exc, flags).values())
    failures = tuple(Failure(message.code, message) for message in messages)
    if len(messages) == 1:
        return UsageError(messages[0], code=messages[0].code, failures=failures)
    summary = f"{len(messages)} flags are wrong"
    return UsageError(summary, code="bad-flags", why="\n".join(messages), failures=failures)


_FLAGS: Final = {"args": "the arguments after --", "modules": "--module"}


def _explained(error: ValidationError, flags: Mapping[str, object]) -> dict[str, Notice]:
    wrong: dict[str, Notice] = {}
    for entry in error.errors(include_url=False, include_input=False):
        field = str(entry["loc"][0])
        kind = entry["type"]
        flag = _FLAGS.get(field, f"--{field.replace('_', '-')}")
        value, (at, *_) = flags[field], (*entry["loc"][1:], None)
        if isinstance(value, list | tuple) and isinstance(at, int):
            value = value[at]
        message = explain(kind, entry.get("ctx", {}), flag, shown(value))
        wrong.setdefault(
            flag, Notice(message.code, f"{flag}: {message}") if kind == "value_error" else message
        )
    return wrong
