"""From the flags of `submit` to a JobSpec. All wrong flags come out in one UsageError that names each."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from clusterctl.errors import Failure, UsageError
from clusterctl.spec.job import ARRAY, BUNDLED_JOBS, CONSTRAINT, JOB_NAME, JobSpec, Launcher
from clusterctl.spec.models import PATTERN_WORDS
from clusterctl.spec.units import parse_slurm_memory_mib, parse_slurm_time_s
from clusterctl.spec.words import did_you_mean, explain, shown

_FLAGS: Final[Mapping[str, str]] = {
    "name": "--name",
    "args": "the arguments after --",
    "nodes": "--nodes",
    "tasks_per_node": "--tasks-per-node",
    "cpus_per_task": "--cpus-per-task",
    "gpus_per_node": "--gpus",
    "memory_mib": "--mem",
    "time_s": "--time",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "array": "--array",
    "launcher": "--launcher",
}
_WORDS: Final[Mapping[str, str]] = {
    **PATTERN_WORDS,
    JOB_NAME: "at most 64 letters, digits, dots, dashes or underscores, the first a letter or digit",
    CONSTRAINT: "features of nodes, joined by & or |",
    ARRAY: "indices such as 0-15, 1,3,5 or 0-15%4",
}
_SHEBANG: Final = re.compile(rb"#!\s*(?:/\S*/)?(?:env\s+(?:-S\s+)?)?(?:/\S*/)?([A-Za-z]+)[0-9.]*\b")
_NO_TARGET: Final = f"no file has this name, and the bundled jobs are {', '.join(BUNDLED_JOBS)}"
_SHELLS: Final = frozenset({b"sh", b"bash", b"dash", b"ksh", b"zsh"})


class ScriptKind(StrEnum):
    """What a user's script is written in."""

    SHELL = "shell"
    PYTHON = "python"


def job_spec(
    target: str,
    *,
    args: Sequence[str] = (),
    name: str | None = None,
    nodes: int | None = None,
    tasks_per_node: int | None = None,
    cpus_per_task: int | None = None,
    gpus: int | None = None,
    mem: str | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    array: str | None = None,
    launcher: str | None = None,
) -> JobSpec:
    """The job that a `submit` asks for. ``target`` is a bundled job's name, or the path of a script.

    None is a flag that was not given; ``model_fields_set`` of the job tells it from one that was.

    A bundled name wins over a file of that name in the current folder: ``./train`` is the file.

    Raises:
        UsageError: the target is neither, or flags are wrong; ``failures`` has one entry a flag.
    """
    bundled, script = _target(target)
    default_name = bundled or _safe_name(target)
    wrong: dict[str, str] = {}
    return _validated(
        wrong,
        bundled=bundled,
        script=script,
        name=default_name if name is None else name,
        args=tuple(args),
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task,
        gpus_per_node=gpus,
        memory_mib=_parsed("--mem", mem, parse_slurm_memory_mib, wrong),
        time_s=_parsed("--time", time, parse_slurm_time_s, wrong),
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        array=array,
        launcher=launcher,
    )


def script_kind(script: Path) -> ScriptKind:
    """What a script is written in, by its ending or else its first line.

    Raises:
        UsageError: it can't be read, or is neither shell nor Python.
    """
    try:
        with script.open("rb") as file:
            head = file.read(256)
    except OSError as exc:
        raise UsageError("the script can't be read", where=str(script), why=exc.strerror or str(exc)) from exc
    if script.suffix in {".sh", ".bash"}:
        return ScriptKind.SHELL
    if script.suffix == ".py":
        return ScriptKind.PYTHON
    shebang = _SHEBANG.match(head)
    if shebang and shebang.group(1) in _SHELLS:
        return ScriptKind.SHELL
    if shebang and shebang.group(1) == b"python":
        return ScriptKind.PYTHON
    raise UsageError(
        "this is neither a shell script nor a Python program",
        where=str(script),
        why="its name does not end in .sh, .bash or .py, and its first line names no shell or Python",
        fix="give it such an ending, or a first line such as #!/bin/bash",
    )


def _target(target: str) -> tuple[str | None, Path | None]:
    """The bundled job or the script that ``target`` names; the other is None."""
    if target in BUNDLED_JOBS:
        return target, None
    try:
        target.encode()  # its name stands in the batch script, which is UTF-8
        path = Path(target).absolute()
        mode = path.stat().st_mode
    except FileNotFoundError as exc:
        raise UsageError(f"there is no job {shown(target)}", why=_NO_TARGET, fix=_near(target)) from exc
    except (OSError, ValueError) as exc:  # ValueError: a null byte, or no UTF-8
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(f"{shown(target)} can't be read", why=why, fix="name a script of yours") from exc
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise UsageError(f"{shown(target)} is {what}", fix="name a script of yours, or a bundled job")
    script_kind(path)
    return None, path


def _near(target: str) -> str:
    """A bundled job, or a file beside the missing one, whose name is near."""
    path = Path(target)
    try:
        files = [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        files = []  # no such folder either: nothing to compare with
    if target == path.name and (near := did_you_mean(target, BUNDLED_JOBS)):
        return near
    return did_you_mean(path.name, files) or "name a bundled job, or the path of a script"


def _safe_name(script: str) -> str:
    """A job name out of a file's: ``my job.sh`` is ``my-job``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("-._")[:64] or "job"


def _parsed(flag: str, value: str | None, parse: Callable[[str], int], wrong: dict[str, str]) -> int | None:
    """The flag's value parsed; where that fails, None, and the reason goes into ``wrong``."""
    if value is None:
        return None
    try:
        return parse(value)
    except ValueError as exc:
        wrong[flag] = f"{flag}: {exc}"
        return None


def _validated(wrong: Mapping[str, str], **values: Any) -> JobSpec:
    """The job of these values, unless flags are ``wrong`` (flag -> message) already or prove to be."""
    try:
        job = JobSpec(**{field: value for field, value in values.items() if value is not None})
    except ValidationError as exc:
        raise _flags_error({**wrong, **_explained(exc, values)}) from exc
    if wrong:
        raise _flags_error(wrong)
    return job


def _explained(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Flag -> what is wrong with it, in plain words."""
    wrong: dict[str, str] = {}
    for entry in error.errors(include_url=False, include_input=False):
        field, kind = str(entry["loc"][0]), entry["type"]
        flag = _FLAGS[field]
        context: dict[str, Any] = dict(entry.get("ctx", {}))
        context["words"] = _WORDS.get(context.get("pattern", ""), "")
        if field == "launcher":
            context["expected"] = " or ".join(Launcher)
        message = explain(kind, context, flag, shown(values[field]))
        wrong.setdefault(flag, f"{flag}: {message}" if kind == "value_error" else message)
    return wrong


def _flags_error(wrong: Mapping[str, str]) -> UsageError:
    messages = tuple(wrong.values())
    failures = tuple(Failure(UsageError.code, message) for message in messages)
    if len(messages) == 1:
        return UsageError(messages[0], failures=failures)
    return UsageError(f"{len(messages)} flags are wrong", why="\n       ".join(messages), failures=failures)
