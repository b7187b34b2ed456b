"""Jobs: what is known of one, and the program that JOB names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from clusterctl.errors import BadValueError, UsageError
from clusterctl.spec.names import MAX_COUNT, Launcher, did_you_mean
from clusterctl.spec.units import (
    format_duration,
    format_size,
    parse_slurm_memory_mib,
    parse_slurm_time_s,
    shown,
)

if TYPE_CHECKING:
    from clusterctl.spec.sweep import Sweep

BUNDLED_JOBS = ("train", "eval", "sample", "predict", "export", "bench", "gemm", "allreduce", "probe")
MODEL_JOBS = ("eval", "sample", "predict", "export")  # they use a trained model
ONE_RANK_JOBS = ("sample", "predict", "export")


def sweep_arguments(values: Mapping[str, str]) -> list[str]:
    """The words that give values of a sweep to a program: ``--lr 0.1``; true is ``--flag``, false nothing."""
    words = []
    for key, value in values.items():
        if value != "false":
            words += [f"--{key}"] if value == "true" else [f"--{key}", value]
    return words


class Weights(StrEnum):
    """Which of a model's weights: at its best evaluation, or at the end of the training."""

    BEST = "best"
    FINAL = "final"


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


@dataclass(frozen=True, kw_only=True, init=False)
class JobSpec:
    """One job. Exactly one of ``bundled`` and ``script`` is set. ``mem`` is in MiB, ``time`` in seconds.

    The other fields are those of the model JobOptions, which says what each may be; ``model_fields_set``
    names those that were said. This is no model itself: most jobs say only what needs none.
    """

    name: str
    args: tuple[str, ...] = ()
    nodes: int = 1
    tasks_per_node: int = 1
    cpus: int | None = None
    gpus: int = 0
    mem: int | None = None
    time: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array: str | None = None
    sweep: Sweep | None = None
    signal: str | None = None
    requeue: bool = False
    launcher: Launcher = Launcher.SRUN
    folder: bool = True
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    requirements: Path | None = None
    tag: tuple[str, ...] = ()
    note: str | None = None
    bundled: str | None = None
    script: Path | None = None
    model_fields_set: frozenset[str] = field(default=frozenset(), compare=False)

    def __init__(
        self, *, name: str, bundled: str | None = None, script: Path | None = None, **said: Any
    ) -> None:
        """Raises ValueError where it is not one program, UsageError where what is ``said`` is wrong."""
        if (bundled is None) == (script is None):
            raise BadValueError("job-or-script", "a job is either a bundled one or a script")
        if bundled is not None and bundled not in BUNDLED_JOBS:
            raise BadValueError("unknown-job-type", f"{bundled!r} is not a bundled job")
        target = {"name": name, "bundled": bundled, "script": script}
        vars(self).update({**_DEFAULTS, "env": {}, **target, **valid_options(said)})
        vars(self)["model_fields_set"] = frozenset(target) | said.keys()

    def model_copy(self, *, update: Mapping[str, Any]) -> JobSpec:
        """The same with other values, which are valid."""
        copy = object.__new__(JobSpec)
        said = self.model_fields_set | update.keys()
        vars(copy).update({**vars(self), **update, "model_fields_set": said})
        return copy

    @property
    def record(self) -> dict[str, Any]:
        """All fields as environment.client.json has them: sizes and times as a job file says them."""
        said = {name: getattr(self, name) for name in JOB_FIELDS}
        said["mem"] = format_size(self.mem) if self.mem is not None else None
        said["time"] = format_duration(self.time) if self.time is not None else None
        return said | ({"sweep": self.sweep.model_dump()} if self.sweep is not None else {})

    @property
    def tasks(self) -> int:
        """Ranks in all."""
        return self.nodes * self.tasks_per_node


_DEFAULTS: Final = {one.name: one.default for one in fields(JobSpec) if one.default is not MISSING}
JOB_FIELDS: Final = tuple(one.name for one in fields(JobSpec) if one.name != "model_fields_set")
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
        raise UsageError(
            "the script can't be read",
            code="file-unreadable",
            where=str(script),
            why=exc.strerror or str(exc),
        ) from exc
    shebang = _SHEBANG.match(begins)
    program = shebang[1] if shebang else b""
    if script.suffix == ".py" or (program == b"python" and script.suffix not in _SHELL_ENDINGS):
        return True
    if script.suffix in _SHELL_ENDINGS or program in _SHELLS:
        return False
    raise UsageError(
        "this is neither a shell script nor a Python program",
        code="not-a-script",
        where=str(script),
        why="its name does not end in .sh, .bash or .py, and its first line names no shell or Python",
        fix="give it such an ending, or a first line such as #!/bin/bash; a compiled program needs a script "
        f"with the line: srun ./{script.name}",
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
        if not stat.S_ISREG(mode):
            raise ValueError("it is a folder" if stat.S_ISDIR(mode) else "it is no ordinary file")
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no job {shown(target)}",
            code="unknown-job-type",
            why=_NO_TARGET,
            fix=_near(target, folder),
        ) from exc
    except (OSError, ValueError) as exc:  # ValueError: also a null byte, or no UTF-8
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"{shown(target)} can't be submitted",
            code="file-unreadable",
            why=why,
            fix="name a script of yours, or a bundled job",
        ) from exc
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
    return job_of(target, valid_options(flags), folder=Path())


# Flags that are counts, with their least values; and those that are names of some kind.
_COUNTS: Final = {"nodes": 1, "tasks_per_node": 1, "cpus": 1, "gpus": 0}
_UNITS: Final = {"mem": parse_slurm_memory_mib, "time": parse_slurm_time_s}
_NAMES: Final = frozenset({"name", "partition", "account", "qos"})
_PLAIN_NAME: Final = re.compile(r"[a-z][a-z0-9]{0,19}", re.ASCII)  # any of them can be that


def valid_options(flags: Mapping[str, object]) -> Mapping[str, Any]:
    """What flags say of a job, as JobOptions has it; see ``job_options``.

    Values that are plainly right need no model, whose import takes longer than all else of `submit`.
    """
    plain = {name: _plain(name, value) for name, value in flags.items()}
    if None not in plain.values():
        return plain
    from clusterctl.spec.job_options import job_options  # noqa: PLC0415 - as above

    return job_options(flags).given


def _plain(name: str, value: object) -> object:
    """A value that JobOptions would take, as it would have it; None where that is its to say."""
    if name in _COUNTS:
        return value if type(value) is int and _COUNTS[name] <= value <= MAX_COUNT else None
    if name in {"folder", "requeue"}:
        return value if isinstance(value, bool) else None
    if name == "args" and isinstance(value, list | tuple):
        return tuple(value) if all(isinstance(one, str) and one.isprintable() for one in value) else None
    if isinstance(value, str) and name in _UNITS:
        with suppress(ValueError):
            return _UNITS[name](value)
    is_name = name in _NAMES and isinstance(value, str) and _PLAIN_NAME.fullmatch(value)
    return value if is_name else None


def job_of(target: str, said: Mapping[str, Any], *, folder: Path) -> JobSpec:
    """The job of what was ``said`` and is valid; paths are relative to ``folder``."""
    bundled, script = named_job(target, folder)
    job = JobSpec(name=bundled or safe_name(target), bundled=bundled, script=script)
    given = {field: value for field, value in said.items() if field != "name" or value is not None}
    job = job.model_copy(update=given)
    if job.sweep is not None:
        if job.array is not None:
            raise UsageError(
                "a sweep is an array of its own", code="sweep-with-array", fix="leave out --array, or --sweep"
            )
        job = job.model_copy(update={"array": job.sweep.array})
    if bundled in ONE_RANK_JOBS and job.tasks > 1:
        raise UsageError(
            f"{bundled} runs on one rank, and these are {job.tasks}",
            code="one-rank-job",
            fix="leave out --nodes and --tasks-per-node",
        )
    return job
