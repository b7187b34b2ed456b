"""What the word JOB of `submit` names: a bundled job, or a script of the user's."""

from __future__ import annotations

import os
import re
import stat
from enum import StrEnum
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.spec.job import BUNDLED_JOBS
from clusterctl.spec.words import did_you_mean, shown

_SHEBANG: Final = re.compile(rb"#!\s*(?:/\S*/)?(?:env\s+(?:-S\s+)?)?(?:/\S*/)?([A-Za-z]+)[0-9.]*\b")
_NO_TARGET: Final = f"no file has this name, and the bundled jobs are {', '.join(BUNDLED_JOBS)}"
_JOB_FILES: Final = frozenset({".yaml", ".yml"})
_SHELLS: Final = frozenset({b"sh", b"bash", b"dash", b"ksh", b"zsh"})


class ScriptKind(StrEnum):
    """What a user's script is written in."""

    SHELL = "shell"
    PYTHON = "python"


def is_job_file(target: str) -> bool:
    """Whether the word JOB names a job file."""
    return Path(target).suffix.lower() in _JOB_FILES


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
    script_kind(path)
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
