"""The program of a job: the bundled job, script or module that `submit JOB` names."""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.spec.names import PROJECT_FILES, did_you_mean
from clusterctl.spec.units import shown
from clusterctl.util.confine import reject_read

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
# Before the name of a module, as in `-m pkg.train`.
MODULE_FLAG: Final = "-m "
# Suffix of a script without a first line such as #!/usr/bin/perl -> the program that runs it.
INTERPRETERS: Final = {
    ".R": "Rscript",
    ".r": "Rscript",
    ".pl": "perl",
    ".jl": "julia",
    ".rb": "ruby",
    ".lua": "lua",
}
_SHEBANG: Final = re.compile(rb"#!\s*(?:/\S*/)?(?:env\s+(?:-S\s+)?)?(?:/\S*/)?([A-Za-z]+)[0-9.]*\b")
# The #SBATCH lines of a script are in its first bytes.
_HEAD_BYTES: Final = 64 << 10
_NO_TARGET: Final = f"no such file exists, and the bundled jobs are {', '.join(BUNDLED_JOBS)}"
_JOB_FILES: Final = frozenset({".yaml", ".yml"})
_SHELL_ENDINGS: Final = frozenset({".sh", ".bash"})
# `uv run` and `pipx run` install the packages that a script names, and run it with Python.
_BY_UV: Final = re.compile(rb"#!.*\b(?:uv|pipx)\b.*\brun\b")
_MAKEFILES: Final = frozenset({"makefile", "gnumakefile"})
_SOURCES: Final = frozenset(".c .cc .cpp .cxx .cu .f .f90 .f95 .for .rs .go .java .hs".split())
_IMAGES: Final = frozenset({".sif", ".simg"})
# The comment of a program that lists its packages (PEP 723). It ends at the last line `# ///`.
_SCRIPT_BLOCK: Final = re.compile(
    r"^# /// script[ \t]*\n((?:#(?: .*)?\n)+)# ///[ \t]*$", re.MULTILINE
)
_SHELLS: Final = frozenset({b"sh", b"bash", b"dash", b"ksh", b"zsh"})


class Weights(StrEnum):
    """The weights of a trained model: from the best evaluation, or from the end of training."""

    BEST = "best"
    FINAL = "final"


def is_job_file(target: str) -> bool:
    return not target.startswith(MODULE_FLAG) and Path(target).suffix.lower() in _JOB_FILES


class Language(StrEnum):
    """The language of a script. Python programs are started for each rank, other scripts once."""

    PYTHON = "Python"
    SHELL = "shell"
    OTHER = "other"


def language_of(script: Path) -> Language:
    """Return the language of a script, judged by its suffix, then by its first line.

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
        code="file-invalid",
        about="script",
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


def script_block(path: Path, lines: Iterable[str]) -> str | None:
    """Return the TOML text in a program's comment ``# /// script`` (PEP 723). None: it has no such
    comment.

    lines: of the program. Raise a UsageError if the program has several such comments.
    """
    text = "".join(f"{line.removesuffix(chr(13))}\n" for line in lines)
    blocks = list(_SCRIPT_BLOCK.finditer(text.removeprefix("\ufeff")))
    if not blocks:
        return None
    if len(blocks) > 1:
        places = [text.count("\n", 0, block.start()) + 1 for block in blocks]
        raise UsageError(
            f"{path.name} has several comments `# /// script`",
            code="file-invalid",
            about="script-blocks",
            where=str(path),
            why=f"lines {' and '.join(map(str, places))} each begin a block, and PEP 723 allows only one",
            fix="join them in one comment",
        )
    comment = blocks[0][1].splitlines(keepends=True)
    return "".join(line.removeprefix("#").removeprefix(" ") for line in comment)


def is_file(path: Path) -> bool:
    """Return whether a path is a file. False if a folder above can't be searched, unlike
    Path.is_file.
    """
    return os.path.isfile(path)


def repository_of(folder: Path) -> Path | None:
    """Return the root of the git repository that contains ``folder``; None if there is no
    repository.
    """
    return next(
        (path for path in (folder, *folder.parents) if os.path.lexists(path / ".git")), None
    )


def is_project(folder: Path) -> bool:
    """Return whether a folder is the root of a project: it has one of ``PROJECT_FILES``."""
    return any(os.path.lexists(folder / name) for name in PROJECT_FILES)


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
        code="not-found",
        about="module",
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
        file = module_file(target.removeprefix(MODULE_FLAG).strip(), folder)
        reject_read(file)
        return None, file
    reject_read(folder / target)
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
            code="not-found",
            about="bundled-job",
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


def head_of(script: Path) -> list[str]:
    """Return the first lines of a script, which have its #SBATCH lines."""
    with suppress(OSError), script.open("rb") as file:
        return file.read(_HEAD_BYTES).decode(errors="surrogateescape").split("\n")
    return []


def reads_words(script: Path) -> bool:
    """Return whether a script is a shell script that reads its own arguments word by word.

    Such scripts rarely know ``--key=value``. A script that passes its arguments on does not count.
    """
    if language_of(script) is not Language.SHELL:
        return False
    text = "\n".join(head_of(script))
    return re.search(r"\bshift\b", text) is not None and not re.search(r"\$\{?[@*]", text)
