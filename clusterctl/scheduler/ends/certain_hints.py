"""Hints that rest on more than a message: the user's files on this machine, the job's script, the
names of packages, the frames of a traceback.

Each function gets a line or other evidence, and yields certain hints.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from clusterctl.scheduler.ends.diagnosis import Hint
from clusterctl.scheduler.ends.excerpt import Excerpt
from clusterctl.scheduler.ends.facts import Evidence, LocalMatch
from clusterctl.scheduler.ends.hints import way_to_packages
from clusterctl.scheduler.ends.log_text import compiled, short
from clusterctl.spec.sbatch import values_in
from clusterctl.util.assets import read_table

_PACKAGES: Final = Path(__file__).with_name("data") / "packages.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packages:
    """The content of data/packages.yaml."""

    modules: Mapping[str, str]
    same_name: str


def _table() -> _Packages:
    return read_table(_PACKAGES, _Packages)


def _certain(name: str, says: str, fix: str, line: str = "") -> Hint:
    return Hint(name=name, says=says, fix=fix, line=line, is_certain=True)


def certain_hints(lines: Iterable[str], evidence: Evidence) -> Iterator[Hint]:
    """Yield the hints about the lines."""
    for line in lines:
        for function in (_module, _file, _own_log, _step_without_path):
            yield from function(line, evidence)


# --- Files of the user ---------------------------------------------------------------------------
# How the C library, Node.js and Java say that a path does not exist (ENOENT), and dash about a command.
_NO_FILE: Final = (
    r"\b[Nn]o such file(?: or directory)?\b(?! ?(?!at )\w)|\bENOENT\b|\bNoSuchFileException\b"
    r"|(?<=/)[^\s/]+: not found$"
)
# Of a path that a program creates, the folder is missing.
_CREATES: Final = r"\bcannot (?:create|touch)\b"
# What a shell writes first, and Perl last.
_AROUND: Final = r"^\S+: (?:line )?\d+: | at \S+ line \d+\.?$"
# A quoted name, or a path.
_WORD: Final = (
    r"['\"`\u2018]([^'\"`\u2018\u2019\n]+)['\"\u2019]|([^\s'\"`\u2018\u2019<>|,;:()\[\]{}]+)"
)


def _file(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at a file of this machine that was not sent, and that the line names as missing. Other
    words, such as ``data is empty``, do not say that a path is missing.
    """
    said = compiled(_AROUND).sub("", line)
    missing = compiled(_NO_FILE).search(said)
    if missing is None or compiled(_CREATES).search(said):
        return
    # The path stands after the words, or else right before them.
    names = [*_paths(said[missing.end() :])][:1] or [*_paths(said[: missing.end()])][-1:]
    for name in names:
        hint = _of_file(name, line, evidence.left_here(name, is_module=False), evidence)
        yield from (hint,) if hint else ()


def _paths(text: str) -> Iterator[str]:
    for quoted, word in compiled(_WORD).findall(text):
        name = (quoted or word.rstrip(".!")).rstrip("/")
        if name.strip("./") and (quoted or re.search(r"[/.]", name)):
            yield name


def _of_file(name: str, line: str, here: LocalMatch, evidence: Evidence) -> Hint | None:
    unsent = "it exists on your machine, but was not sent with the job"
    if here.inside:
        return _certain(
            "file-in-program-folder",
            f"{name} was sent, and is {here.inside} in the folder of the program",
            'find the script\'s folder with `dirname "$0"` or $SLURM_SUBMIT_DIR: the script that '
            "Slurm knows (`scontrol show job`) is clusterctl's",
            line,
        )
    if here.venv:
        return _certain(
            "virtual-environment-not-sent",
            f"{name}: virtual environments are not sent with jobs",
            f"remove the line with {here.venv} from the script; {way_to_packages(evidence)}",
            line,
        )
    if here.home:
        fix = f"submit with --include {here.home}{_excluded(evidence)}"
        return _certain("file-stayed-at-home", f"{name}: {unsent}", fix, line)
    if here.above:
        return _certain(
            "file-stayed-at-home",
            f"{name}: it exists in {here.above} on your machine, and that folder was not sent",
            f"submit with --folder {here.above}",
            line,
        )
    return None


def _excluded(evidence: Evidence) -> str:
    """Return `` and without --exclude data``, if that was used."""
    excluded = evidence.excluded
    return f" and without --exclude {shlex.join(excluded)}" if excluded else ""


# The text that sbatch writes for a letter after % in the name of a log. For other letters: a word.
_LOG_NAMES: Final = {"x": r"[^/]*", "N": r"[^/]*", "n": r"\d+", "%": "%"}


def _own_log(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at a script that reads its own log: the missing file fits the path in its #SBATCH line."""
    if "o such file" not in line:
        return
    for option, log in values_in(evidence.script.split("\n"), "--output", "--error").items():
        if re.search(rf"(?<![\w/.]){_log_pattern(log)}(?![\w/])", line):
            yield _certain(
                "log-has-another-path",
                "clusterctl writes the job's log to a file of its own, so that the script's "
                f"{option} has no effect",
                "`clusterctl logs ID` shows the log; if the script needs the file, redirect into it, as "
                "in `PROGRAM > FILE`",
                line,
            )


def _log_pattern(log: str) -> str:
    """Return a regular expression for the paths that sbatch makes of a value of --output."""
    parts = re.split(r"%\d*([A-Za-z%])", log)
    fields = (_LOG_NAMES.get(letter, r"\w+") for letter in parts[1::2])
    texts = map(re.escape, parts[::2])
    pattern = "".join(text + field for text, field in zip(texts, (*fields, ""), strict=True))
    return rf"(?:\./)?{pattern.removeprefix(re.escape('./'))}"


# --- Modules of Python ---------------------------------------------------------------------------
_NO_MODULE: Final = r"(?:^|\wError: .*|python[\d.]*: )No module named '?(?P<module>[\w.]+)"


def _module(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at a module that Python did not find. This machine may have it, or list its package."""
    if match := compiled(_NO_MODULE).search(line):
        module = short(match["module"])
        here = evidence.left_here(module.replace(".", "/"), is_module=True)
        yield _own_module(module, line, here, evidence) or _not_installed(module, line, evidence)


def _own_module(module: str, line: str, here: LocalMatch, evidence: Evidence) -> Hint | None:
    """Explain why the job does not find a module of the user."""
    unsent = f"module {module} exists on your machine, but was not sent with the job"
    stayed = "module-stayed-at-home"
    if here.home:
        fix = f"submit with --include {here.home}{_excluded(evidence)}"
        return _certain(stayed, unsent, fix, line)
    if here.above:
        says = (
            f"module {module} exists in {here.above} on your machine, and that folder was not sent"
        )
        return _certain(stayed, says, f"submit with --folder {here.above}", line)
    if here.elsewhere:
        fix = (
            f"submit with --folder and the folder of your project that contains {here.elsewhere}; set "
            f"--env PYTHONPATH to the path of {here.root} below it"
        )
        return _certain(stayed, f"{unsent} ({here.elsewhere})", fix, line)
    if here.beside:
        says = f"module {module} was sent with the job, in a folder that Python does not search"
        fix = (
            f"submit with --env PYTHONPATH={here.beside}, or run the program as a module: "
            "`clusterctl submit -m MODULE`"
        )
        return _certain("own-module-not-found", says, fix, line)
    if here.own:
        says = f"your package {here.own} was sent with the job, and does not contain {module}"
        fix = f"correct the import, or add the module to {here.own}"
        return _certain("own-module-not-found", says, fix, line)
    return None


def _not_installed(module: str, line: str, evidence: Evidence) -> Hint:
    modules = _table().modules
    top = module.partition(".")[0]
    package = modules.get(module) or modules.get(top) or top
    # Another name may be that of another package on PyPI.
    is_sure = package != top or top in _table().same_name.split()
    what = package if is_sure else f"the package that has {top}"
    packages = evidence.packages()
    if packages.image:
        fix = (
            f"add {what} to the image, or use another: with --container, --requirements has no "
            "effect"
        )
    elif packages.environment:
        fix = (
            f"install {what} in the environment {packages.environment} on the cluster, or use "
            "--requirements in place of --env-path"
        )
    elif choice := packages.choices.get(canonicalize_name(package)):
        fix = f"submit with --requirements {choice}"
    elif packages.way:
        fix = packages.way
    elif packages.listed:
        fix = (
            f"submit with --requirements {packages.listed}; if the file does not list {what}, "
            "add it"
        )
    else:
        fix = f"add {what} to a requirements file, and submit with --requirements requirements.txt"
    return _certain("missing-module", f"Python has no module {module}", fix, line)


def hints_of_frames(excerpt: Excerpt) -> Iterator[Hint]:
    """Hint at a file of the user that a library has imported in place of a package."""
    about = r"partially initialized module|cannot import name|has no attribute|^ModuleNotFoundError"
    if excerpt.shadow and compiled(about).search(excerpt.exception):
        yield _certain(
            "own-file-hides-package",
            f"your file {excerpt.shadow} hides a package of the same name: a library imported it",
            f"rename {excerpt.shadow}",
        )


# --- The script and its steps --------------------------------------------------------------------
# srun starts a program for which a step has no PATH.
_NOT_STARTED: Final = r"execve\(\): (?P<what>[\w.+-]+): No such file or directory"
_STEP_EXPORT: Final = r"^[^#\n]*\bsrun\b[^\n]*--export[= ](?P<value>(?!ALL\b)\S+)"
_OTHERS: Final = r"^#(?P<name>PBS|BSUB|PJM) +-"


def _step_without_path(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at `srun --export=NAME=VALUE`, which passes no other variable, and so no PATH, if srun cannot
    find a command without a path.
    """
    match = compiled(_NOT_STARTED).search(line)
    export = compiled(_STEP_EXPORT).search(evidence.script)
    if match and export:
        value = export["value"].strip("\"'")
        more = "" if value == "NONE" else f",{value}"
        yield _certain(
            "step-without-path",
            f"srun cannot find {match['what']}: with --export={value}, the step has no PATH",
            f"use srun --export=ALL{more}, or the full path of the command",
            line,
        )


def hints_of_script(evidence: Evidence) -> Iterator[Hint]:
    """Hint at lines of the script for another scheduler."""
    if match := compiled(_OTHERS).search(evidence.script):
        mark = match["name"]
        yield _certain(
            "other-scheduler",
            f"clusterctl passes none of the script's #{mark} lines to Slurm, and the job has no "
            f"{mark} variables",
            "write the lines as #SBATCH; SLURM_SUBMIT_DIR is the folder in which the job starts",
        )
