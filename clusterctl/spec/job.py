"""JobSpec, the description of a job, and the search for the script or bundled program of `submit
JOB`.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from clusterctl.errors import BadValueError, UsageError, excluded
from clusterctl.spec.names import MAX_COUNT, Launcher, did_you_mean
from clusterctl.spec.sbatch import requests_of, values_in
from clusterctl.spec.units import (
    format_duration,
    format_size,
    parse_slurm_memory_mib,
    parse_slurm_time_s,
    shown,
)

if TYPE_CHECKING:
    from clusterctl.spec.sweep import Scaling, Sweep

BUNDLED_JOBS = (
    "train",
    "eval",
    "sample",
    "predict",
    "export",
    "bench",
    "gemm",
    "allreduce",
    "probe",
)
# The bundled jobs that read a trained model.
MODEL_JOBS = ("eval", "sample", "predict", "export")
ONE_RANK_JOBS = ("sample", "predict", "export")


# argparse takes these for negative numbers, and other words that begin with - for options.
_NEGATIVE: Final = re.compile(r"-(?:[0-9]+|[0-9]*\.[0-9]+)?")


def sweep_arguments(values: Mapping[str, str], form: object = None) -> list[str]:
    """Return a sweep task's values as arguments: ``--lr 0.1``, ``--flag`` for true, nothing for
    false.

    form: that of the sweep. With ``key=value`` and ``--key=value``, true and false are also values.
        ``--key value``: each value is an argument of its own. Default: as ``--key value``, but
        ``--lr=-1e-3`` for a value that a program could take for an option.
    """
    if form in {"key=value", "--key=value"}:
        dashes = "--" if form == "--key=value" else ""
        return [f"{dashes}{key}={value}" for key, value in values.items()]
    words = []
    for key, value in values.items():
        looks_like_option = value.startswith("-") and not _NEGATIVE.fullmatch(value)
        if value == "true":
            words.append(f"--{key}")
        elif looks_like_option and form is None:
            words.append(f"--{key}={value}")
        elif value != "false":
            words += [f"--{key}", value]
    return words


class Weights(StrEnum):
    """The weights of a trained model: from the best evaluation, or from the end of training."""

    BEST = "best"
    FINAL = "final"


class ReplayKeywords(TypedDict, total=False):
    """The options of a job that `replay` may change, because they do not affect the results."""

    mem: int | str
    time: int | str
    partition: str
    account: str
    qos: str
    constraint: str
    tag: Sequence[str]
    note: str


class JobKeywords(ReplayKeywords, total=False):
    """The keyword arguments of functions that submit a job: the fields of JobOptions except
    ``args``.
    """

    name: str
    nodes: int
    tasks_per_node: int
    ranks: int
    cpus: int
    gpus: int
    array: str
    sweep: Mapping[str, Any] | Sequence[str]
    scaling: Mapping[str, Any]
    after: Sequence[str]
    slurm: Sequence[str]
    from_run: str
    signal: str
    requeue: bool
    chain: int | str
    launcher: str
    hang: str
    folder: bool | str | Path
    include: Sequence[str]
    exclude: Sequence[str]
    outputs: Sequence[str]
    env: Mapping[str, str] | Sequence[str]
    container: str
    requirements: str | Path


@dataclass(frozen=True, slots=True)
class Project:
    """The folder that is sent with a script, and the paths in it that start the program.

    script: path of the script below ``folder``.
    start: path of the folder in which the program starts, below ``folder``.
    roots: paths of folders below ``folder`` that contain imported packages.
    """

    folder: Path
    script: str
    start: str = "."
    roots: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, init=False)
class JobSpec:
    """A job: ``bundled`` (a program of clusterctl) or ``script`` is set. ``mem``: MiB. Times:
    seconds.

    module: name of the module to run, as `python -m` does; ``script`` is its file. None: run
        ``script``.
    project: None: the project is the script's folder.
    JobOptions documents the other fields. ``model_fields_set``: names of the fields that the caller
    set. JobSpec is not a pydantic model, because the import of pydantic is slow and most jobs do
    not need it.
    """

    name: str
    args: tuple[str, ...] = ()
    nodes: int = 1
    tasks_per_node: int = 1
    ranks: int | None = None
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
    scaling: Scaling | None = None
    after: tuple[str, ...] = ()
    slurm: tuple[str, ...] = ()
    from_run: str | None = None
    signal: str | None = None
    requeue: bool = False
    chain: int | None = None
    launcher: Launcher = Launcher.SRUN
    hang: str | None = None
    folder: bool | Path = True
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
    module: str | None = None
    project: Project | None = None
    model_fields_set: frozenset[str] = field(default=frozenset(), compare=False)

    def __init__(
        self, *, name: str, bundled: str | None = None, script: Path | None = None, **options: Any
    ) -> None:
        """Create a job. Validate ``options``, the values of the other fields.

        Raises:
            ValueError: ``bundled`` and ``script`` are both given, or both missing.
            UsageError: options are wrong.
        """
        if (bundled is None) == (script is None):
            raise BadValueError("job-or-script", "give either a bundled job or a script, not both")
        if bundled is not None and bundled not in BUNDLED_JOBS:
            raise BadValueError("unknown-job-type", f"{bundled!r} is not a bundled job")
        target = {"name": name, "bundled": bundled, "script": script}
        vars(self).update({**_DEFAULTS, "env": {}, **target, **valid_options(options)})
        vars(self)["model_fields_set"] = frozenset(target) | options.keys()

    def model_copy(self, *, update: Mapping[str, Any]) -> JobSpec:
        """Return a copy with the values in ``update``, without validating them."""
        copy = object.__new__(JobSpec)
        names = self.model_fields_set | update.keys()
        vars(copy).update({**vars(self), **update, "model_fields_set": names})
        return copy

    @property
    def record(self) -> dict[str, Any]:
        """The fields, as environment.client.json has them: ``mem`` and ``time`` as text: ``4GiB``,
        ``1h``.
        """
        values = {name: getattr(self, name) for name in JOB_FIELDS}
        values["mem"] = format_size(self.mem) if self.mem is not None else None
        values |= {
            name: format_duration(values[name])
            for name in ("time", "chain")
            if values[name] is not None
        }
        if self.project is not None:
            paths = asdict(self.project)
            values["project"] = {name: path for name, path in paths.items() if name != "folder"}
        models = {"sweep": self.sweep, "scaling": self.scaling}
        return values | {
            name: model.model_dump() for name, model in models.items() if model is not None
        }

    @property
    def place(self) -> Project:
        """The script's place in the files that are sent. Only a job with a script has it."""
        if self.project is not None:
            return self.project
        path = self.script or Path()
        return Project(path.parent, path.name)

    @property
    def tasks(self) -> int:
        """The number of ranks on all nodes together."""
        return self.nodes * self.tasks_per_node


_DEFAULTS: Final = {
    item.name: item.default for item in fields(JobSpec) if item.default is not MISSING
}
JOB_FIELDS: Final = tuple(item.name for item in fields(JobSpec) if item.name != "model_fields_set")
# Fields that a command to resume a job leaves out: its program, and the choice of a task or a run.
NOT_RESUMED: Final = frozenset("bundled args array sweep scaling after from_run".split())
# A replay also leaves these out: clusterctl computes them again, or the user gives them.
NOT_REPLAYED: Final = NOT_RESUMED.union("container env folder requirements tag note".split())
_SHEBANG: Final = re.compile(rb"#!\s*(?:/\S*/)?(?:env\s+(?:-S\s+)?)?(?:/\S*/)?([A-Za-z]+)[0-9.]*\b")
# The #SBATCH lines of a script are in its first bytes.
_HEAD_BYTES: Final = 64 << 10
# Before the name of a module, as in `-m pkg.train`.
MODULE_FLAG: Final = "-m "
_NO_TARGET: Final = f"no such file exists, and the bundled jobs are {', '.join(BUNDLED_JOBS)}"
_JOB_FILES: Final = frozenset({".yaml", ".yml"})
_SHELL_ENDINGS: Final = frozenset({".sh", ".bash"})
# `uv run` and `pipx run` install the packages that a script names, and run it with Python.
_BY_UV: Final = re.compile(rb"#!.*\b(?:uv|pipx)\b.*\brun\b")
# Suffix of a script without a first line such as #!/usr/bin/perl -> the program that runs it.
INTERPRETERS: Final = {
    ".R": "Rscript",
    ".r": "Rscript",
    ".pl": "perl",
    ".jl": "julia",
    ".rb": "ruby",
    ".lua": "lua",
}
_MAKEFILES: Final = frozenset({"makefile", "gnumakefile"})
_SOURCES: Final = frozenset(".c .cc .cpp .cxx .cu .f .f90 .f95 .for .rs .go .java .hs".split())
_IMAGES: Final = frozenset({".sif", ".simg"})
_SHELLS: Final = frozenset({b"sh", b"bash", b"dash", b"ksh", b"zsh"})


def is_job_file(target: str) -> bool:
    return not target.startswith(MODULE_FLAG) and Path(target).suffix.lower() in _JOB_FILES


class Language(StrEnum):
    """What a script is written in. Python programs are started for each rank, other scripts
    once.
    """

    PYTHON = "Python"
    SHELL = "shell"
    OTHER = "other"


def is_python(script: Path) -> bool:
    """Return whether a script is a Python program. Raises the errors of ``language_of``."""
    return language_of(script) is Language.PYTHON


def language_of(script: Path) -> Language:
    """Return what a script is written in, judged by its suffix, then by its first line.

    Raises:
        UsageError: the script can't be read, or nothing tells which program runs the script.
    """
    try:
        with script.open("rb") as file:
            head = file.read(256)
    except OSError as exc:
        raise UsageError(
            "the script can't be read",
            code="file-unreadable",
            where=str(script),
            why=exc.strerror or str(exc),
            fix="correct its permissions",
        ) from exc
    shebang = _SHEBANG.match(head)
    program = shebang[1] if shebang else b""
    is_program_of_python = program == b"python" or _BY_UV.match(head)
    if script.suffix == ".py" or (is_program_of_python and script.suffix not in _SHELL_ENDINGS):
        return Language.PYTHON
    if script.suffix in _SHELL_ENDINGS or program in _SHELLS:
        return Language.SHELL
    if head.startswith(b"#!") or script.suffix in INTERPRETERS:
        return Language.OTHER
    why, fix = _not_a_script(script, head)
    raise UsageError(
        "the file is not a script that a job can run",
        code="not-a-script",
        where=str(script),
        why=why,
        fix=fix,
    )


def _not_a_script(script: Path, head: bytes) -> tuple[str, str]:
    """Return the reason why a file can't be submitted, and the fix."""
    name = shlex.quote(script.name)
    suffix = script.suffix.lower()
    if suffix == ".ipynb":
        by_hand = f"jupyter nbconvert --to notebook --execute {name}"
        return (
            "it is a notebook",
            f"submit the program that `jupyter nbconvert --to script {name}` writes; to keep the "
            f"outputs, submit a script with the line: {by_hand}, and --requirements with "
            "nbconvert and ipykernel",
        )
    if script.name.lower() in _MAKEFILES:
        return "it is a makefile", f"submit a script, such as run.sh, with the line: make -f {name}"
    if head.startswith(b"\x7fELF"):
        return "it is a compiled program", f"submit a script with the line: srun ./{name}"
    if suffix in _SOURCES:
        return "it is source code", "compile it, and submit a script with the line: srun ./PROGRAM"
    if suffix in _IMAGES:
        return "it is a container image", f"submit a script that runs in it: --container {name}"
    return (
        "its name does not end in .sh, .bash or .py, and it has no first line such as #!/bin/bash",
        "add the first line, or rename the file",
    )


def import_roots(folder: Path) -> tuple[Path, Path]:
    """Return the folders in which a project's packages lie: the project's folder or its folder
    src.
    """
    return folder, folder / "src"


def holds_package(root: Path, name: str) -> bool:
    """Return whether ``import NAME`` finds a module, or a folder with modules, in the folder
    ``root``.
    """
    folder = root / name
    if is_file(root / f"{name}.py") or is_file(folder / "__init__.py"):
        return True
    with suppress(OSError):
        return folder.is_dir() and any(
            next(folder.glob(names), None) for names in ("*.py", "*/__init__.py")
        )
    return False


def is_file(path: Path) -> bool:
    """Return whether a path is a file. False if a folder above can't be searched, unlike
    Path.is_file.
    """
    return os.path.isfile(path)  # noqa: PTH113


def repository_of(folder: Path) -> Path | None:
    """Return the root of the git repository that contains ``folder``; None if there is no
    repository.
    """
    return next(
        (path for path in (folder, *folder.parents) if os.path.lexists(path / ".git")), None
    )


def absolute_path(path: Path) -> Path:
    """Return the absolute path. Behind a symbolic link, ".." is the parent of the link's target."""
    return Path(os.path.realpath(path)) if ".." in path.parts else path.absolute()


def is_module(text: str) -> bool:
    """Return whether a text can be the name of a module, such as ``pkg.train``."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", text) is not None


def module_file(module: str, folder: Path) -> Path:
    """Return the file that `python -m MODULE` would run, from ``folder`` or a folder above in its
    repository.

    Raises UsageError if no such file exists.
    """
    here = absolute_path(folder)
    top = repository_of(here) or here
    name = module.replace(".", "/")
    folders = [path for path in (here, *here.parents) if path.is_relative_to(top)]
    for root in (root for path in folders for root in import_roots(path)):
        for file in (root / f"{name}.py", root / name / "__main__.py"):
            if is_module(module) and is_file(file):
                return file
    raise UsageError(
        f"there is no module {shown(module)}",
        code="unknown-module",
        why=f"neither {here} nor its folder src has {name}.py or {name}/__main__.py",
        fix="run the command in the project's folder; a shell script can run an installed "
        "module: python -m",
    )


def module_root(module: str, file: Path) -> Path:
    """Return the folder from which a module is imported, given the file that `python -m MODULE`
    runs.
    """
    is_package = file.stem != module.rpartition(".")[2]
    return file.parents[module.count(".") + is_package]


def named_job(target: str, folder: Path) -> tuple[str | None, Path | None]:
    """Return (name of a bundled job, None) or (None, absolute path of a script).

    target: name or path. ``train`` is the bundled job even if there is a file train; ``./train`` is
        the file. ``-m MODULE`` is the file of a module.
    folder: the folder that paths are relative to.

    Raises:
        UsageError: there is no such job or script.
    """
    if target in BUNDLED_JOBS:
        return target, None
    if target.startswith(MODULE_FLAG):
        return None, module_file(target.removeprefix(MODULE_FLAG).strip(), folder)
    try:
        # The batch script, which is UTF-8, contains the name.
        target.encode()
        path = (folder / target).absolute()
        # Behind a symbolic link, ".." is the parent of the link's target.
        if ".." in path.parts:
            path = Path(os.path.realpath(path.parent, strict=True)) / path.name
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError("it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file")
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no bundled job or script {shown(target)}",
            code="unknown-job-type",
            why=_NO_TARGET,
            fix=_suggestion(target, folder),
        ) from exc
    except (OSError, ValueError) as exc:
        # A ValueError may also come from a null byte, or from a name that is not UTF-8.
        reason = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"{shown(target)} can't be submitted",
            code="file-unreadable",
            why=reason,
            fix="name a script or a bundled job",
        ) from exc
    # This rejects files that are no scripts.
    language_of(path)
    return None, path


def _suggestion(target: str, folder: Path) -> str:
    """Return the fix for a missing script: a bundled job, or a file in its folder, with a similar
    name.
    """
    path = folder / target
    try:
        files = [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        # The folder does not exist.
        files = []
    if target == Path(target).name and (near := did_you_mean(target, BUNDLED_JOBS)):
        return near
    # An equal ending makes no file similar.
    similar = [name for name in files if did_you_mean(path.stem, [Path(name).stem])]
    return did_you_mean(path.name, similar) or "name a bundled job, or the path of a script"


def safe_name(text: str) -> str:
    """Turn a text into the name of a job: ``my job`` into ``my-job``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64] or "job"


def _head(script: Path) -> list[str]:
    """Return the first lines of a script, which have its #SBATCH lines."""
    with suppress(OSError), script.open("rb") as file:
        return file.read(_HEAD_BYTES).decode(errors="surrogateescape").split("\n")
    return []


def _reads_words(script: Path) -> bool:
    """Return whether a script is a shell script that reads its own arguments word by word.

    Such scripts rarely know ``--key=value``. A script that passes its arguments on does not count.
    """
    if language_of(script) is not Language.SHELL:
        return False
    text = "\n".join(_head(script))
    return re.search(r"\bshift\b", text) is not None and not re.search(r"\$\{?[@*]", text)


def job_spec(target: str, flags: Mapping[str, object]) -> JobSpec:
    """Return the job that a command line of `submit` requests.

    target: the name of a bundled job, or the path of a script relative to the current folder.
    flags: field of JobOptions -> value that the user gave.

    Raises:
        UsageError: there is no such job or script, or flags are wrong; ``failures`` has an entry
            for each flag.
    """
    return job_of(target, valid_options(flags), folder=Path())


# Count options -> minimum; options with units -> parser; options that are names.
_COUNTS: Final = {"nodes": 1, "tasks_per_node": 1, "ranks": 1, "cpus": 1, "gpus": 0}
_UNITS: Final = {
    "mem": parse_slurm_memory_mib,
    "time": parse_slurm_time_s,
    "chain": parse_slurm_time_s,
}
_NAMES: Final = frozenset({"name", "partition", "account", "qos"})
# Every option in _NAMES accepts a text of this form.
_PLAIN_NAME: Final = re.compile(r"[a-z][a-z0-9]{0,19}", re.ASCII)


def valid_options(flags: Mapping[str, object]) -> Mapping[str, Any]:
    """Validate the flags of a job. Return field -> value. Raise the same errors as ``job_options``.

    Common values are validated without pydantic, because its import would take most of the time of
    `submit`.
    """
    plain = {name: _plain(name, value) for name, value in flags.items()}
    if None not in plain.values():
        return plain
    from clusterctl.spec.job_options import job_options  # noqa: PLC0415 - slow import

    return job_options(flags).given


def _plain(name: str, value: object) -> object:
    """Convert the value of an option as JobOptions would, but without pydantic. None: this needs
    pydantic.
    """
    if name in _COUNTS:
        return value if type(value) is int and _COUNTS[name] <= value <= MAX_COUNT else None
    if name in {"folder", "requeue"} and isinstance(value, bool):
        return value
    if name == "folder" and isinstance(value, str | Path) and str(value):
        return Path.cwd() / value
    if name == "args" and isinstance(value, list | tuple):
        return (
            tuple(value)
            if all(isinstance(word, str) and word.isprintable() for word in value)
            else None
        )
    if isinstance(value, str) and name in _UNITS:
        with suppress(ValueError):
            return _UNITS[name](value)
    is_name = name in _NAMES and isinstance(value, str) and _PLAIN_NAME.fullmatch(value)
    return value if is_name else None


def job_of(target: str, options: Mapping[str, Any], *, folder: Path) -> JobSpec:
    """Return a job. ``options``: already valid.

    target: a bundled job, a path relative to ``folder``, or ``-m MODULE``.

    Raises:
        UsageError: there is no such job or script, or options exclude each other.
    """
    reject_quantities_twice(options)
    bundled, script = named_job(target, folder)
    module = target.removeprefix(MODULE_FLAG).strip() if target.startswith(MODULE_FLAG) else None
    name = safe_name(module.rpartition(".")[2] if module else Path(target).stem)
    if script is not None and (
        own_name := values_in(_head(script), "--job-name").get("--job-name")
    ):
        name = safe_name(own_name)
    job = JobSpec(name=bundled or name, bundled=bundled, script=script)
    job = job.model_copy(update={"module": module}) if module else job
    chosen = {
        field: value for field, value in options.items() if field != "name" or value is not None
    }
    job = job.model_copy(update=chosen)
    if job.sweep is not None:
        if job.array is not None:
            raise UsageError(
                "a job can't have both a sweep and an array, because a sweep is a job array",
                code="sweep-with-array",
                fix="remove --array or --sweep",
            )
        reads_words = script is not None and _reads_words(script)
        sweep = job.sweep.for_arguments(job.args, reads_words=reads_words)
        job = job.model_copy(update={"array": sweep.array, "sweep": sweep})
    if bundled in ONE_RANK_JOBS and job.tasks > 1:
        raise UsageError(
            f"the bundled job {bundled} runs on a single rank, but {job.tasks} ranks were "
            "requested",
            code="one-rank-job",
            fix="remove --nodes and --tasks-per-node",
        )
    return job


def reject_quantities_twice(options: Mapping[str, Any]) -> None:
    """Raise UsageError if a flag and an option of --slurm set the same quantity."""
    for request in requests_of(options.get("slurm", ())):
        for name in request.quantities & options.keys():
            # The shortest time limit makes sense only beside the limit.
            if request.own_name != "--time-min":
                raise excluded(f"--{name.replace('_', '-')}", f"--slurm {request.own_name}")
