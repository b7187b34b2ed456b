"""Hints that rest on more than a message: the user's files on this machine, the job's script, the
names of packages, MASTER_PORT, the frames of a traceback.

Each function gets a line or other evidence, and yields certain hints.
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from clusterctl.scheduler.ends.excerpt import Excerpt
from clusterctl.scheduler.ends.facts import Evidence, LocalMatch
from clusterctl.scheduler.ends.hints import ADD_TO_IMAGE, Hint, way_to_packages
from clusterctl.scheduler.ends.log_text import compiled, short
from clusterctl.spec.sbatch import values_in
from clusterctl.util.assets import read_table

_PACKAGES: Final = Path(__file__).with_name("data") / "packages.yaml"
# Names so similar differ in a letter or two.
_SIMILAR: Final = 0.8
_MOST_WORDS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Language:
    """How a language says that a package is missing: see data/packages.yaml."""

    name: str
    match: str
    debian: str
    red_hat: str
    otherwise: str
    ending: str = ""
    variable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    """The packages of a library or a tool: see data/packages.yaml."""

    names: str
    debian: str
    red_hat: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packages:
    """The content of data/packages.yaml."""

    modules: Mapping[str, str]
    same_name: str
    languages: tuple[_Language, ...]
    libraries: tuple[_Library, ...]
    tools: tuple[_Library, ...]


def _table() -> _Packages:
    return read_table(_PACKAGES, _Packages)


def _certain(name: str, says: str, fix: str, line: str = "") -> Hint:
    return Hint(name=name, says=says, fix=fix, line=line, is_certain=True)


def certain_hints(lines: Iterable[str], evidence: Evidence) -> Iterator[Hint]:
    """Yield the hints about the lines."""
    for line in lines:
        for function in (_module, _file, _own_log, _package, _library, _step_without_path, _port):
            yield from function(line, evidence)


# --- Files of the user ---------------------------------------------------------------------------
# How the C library, dash, Node.js and Java say that a path does not exist (ENOENT).
_NO_FILE: Final = r"(?i)\bno such file\b|\bENOENT\b|\bNoSuchFileException\b"
_OF_SHELL: Final = r"^\S+: (?:line )?\d+: "
# A quoted name, or a path.
_WORD: Final = (
    r"['\"`\u2018]([^'\"`\u2018\u2019\n]+)['\"\u2019]|([^\s'\"`\u2018\u2019<>|,;:()\[\]{}]+)"
)


def _file(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at a file of this machine that was not sent, and that the line names as missing. Other
    words, such as ``data is empty``, do not say that a path is missing.
    """
    if not compiled(_NO_FILE).search(line):
        return
    # A shell names the script first.
    said = compiled(_OF_SHELL).sub("", line)
    for quoted, word in compiled(_WORD).findall(said)[:_MOST_WORDS]:
        name = (quoted or word.rstrip(".!")).rstrip("/")
        if not name.strip("./") or not (quoted or re.search(r"[/.]", name)):
            continue
        hint = _of_file(name, line, evidence.left_here(name, is_module=False), evidence)
        if hint is not None:
            yield hint
            return


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
    same_name = _table().same_name.split()
    top = module.partition(".")[0]
    package = modules.get(module) or modules.get(top) or top
    # Another name may be misspelt, or be that of another package on PyPI.
    is_sure = package != top or top in same_name
    what = package if is_sure else f"the package that has {top}"
    meant = "" if is_sure else _similar_to(top, [*same_name, *modules])
    first = f"correct the import if {meant} is meant, or " if meant else ""
    packages = evidence.packages()
    if packages.image:
        fix = (
            f"{first}add {what} to the image, or use another: with --container, --requirements has no "
            "effect"
        )
    elif packages.environment:
        fix = (
            f"{first}install {what} in the environment {packages.environment} on the cluster, or use "
            "--requirements in place of --env-path"
        )
    elif choice := packages.choices.get(canonicalize_name(package)):
        fix = f"submit with --requirements {choice}"
    elif packages.way:
        fix = packages.way
    elif packages.listed:
        fix = (
            f"{first}submit with --requirements {packages.listed}; if the file does not list {what}, "
            "add it"
        )
    else:
        fix = (
            f"{first}add {what} to a requirements file, and submit with --requirements "
            "requirements.txt"
        )
    is_meant = f" (is {meant} meant?)" if meant else ""
    return _certain("missing-module", f"Python has no module {module}{is_meant}", fix, line)


def _similar_to(module: str, known: Iterable[str]) -> str:
    """Return a module of which a name may be a misspelling, or ""."""
    near: list[str] = []
    for names in (known, sys.stdlib_module_names):
        near += difflib.get_close_matches(module, sorted(names), 1, _SIMILAR)
    # Names such as torchx are extended on purpose.
    return "" if not near or module.startswith(near[0]) else near[0]


def hints_of_frames(excerpt: Excerpt) -> Iterator[Hint]:
    """Hint at a file of the user that a library has imported in place of a package."""
    about = r"partially initialized module|cannot import name|has no attribute|^ModuleNotFoundError"
    if excerpt.shadow and compiled(about).search(excerpt.exception):
        yield _certain(
            "own-file-hides-package",
            f"your file {excerpt.shadow} hides a package of the same name: a library imported it",
            f"rename {excerpt.shadow}",
        )


# --- Packages of distributions -------------------------------------------------------------------
# {name}: of the library. gcc and nvcc, clang, gfortran, ld
_LACKS_HEADER: Final = (
    r"fatal error: {name}: No such file or directory",
    r"fatal error: '{name}' file not found",
    r"Fatal Error: Cannot open module file '{name}' for reading",
    r"\bld: cannot find -l{name}(?:: No such file or directory)?$",
)
# {name}: of the tool. bash, sh, make, env, srun
_LACKS_TOOL: Final = (
    r"(?:^|[\s:]){name}: command not found$",
    r"^\S+: (?:line )?\d+: {name}: not found$",
    r"^\S*make(?:\[\d+\])?: {name}: No such file or directory$",
    r"^(?:\S*/)?env: ['\u2018]?{name}['\u2019]?: No such file or directory",
    r"execve\(\): {name}: No such file or directory",
)


def _library(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at a header, library, compiler or interpreter that distributions have."""
    for name, libraries, words, kind in (
        ("missing-header", _table().libraries, _LACKS_HEADER, "the compiler does not find"),
        ("command-not-found", _table().tools, _LACKS_TOOL, "command not found:"),
    ):
        for library in libraries:
            patterns = "|".join(words).replace("{name}", f"({library.names})")
            if match := compiled(patterns).search(line):
                what = next(filter(None, match.groups()))
                yield _certain(name, f"{kind} {what}", _fix_for_library(library, evidence), line)
                break


def _fix_for_library(library: _Library, evidence: Evidence) -> str:
    if evidence.packages().image:
        return ADD_TO_IMAGE
    if evidence.advice.is_operator:
        return (
            f"add it to the nodes: `software: {{packages: [{library.debian}]}}` in the spec (Rocky "
            f"Linux: {library.red_hat}), then `clusterctl up`; or use a --container"
        )
    module = f"--module {library.module} or another module of the site"
    return f"load it with {module}, or use a --container"


def _package(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at a package that a program in R, Perl or the like lacks."""
    for language in _table().languages:
        if match := compiled(language.match).search(line):
            name = match["name"].replace("/", "::" if language.name == "Perl" else "/")
            yield _own_package(language, name, match["name"], line, evidence) or _certain(
                "missing-package",
                f"there is no package {name} of {language.name}",
                _fix_for_package(language, match["name"], evidence),
                line,
            )


def _own_package(
    language: _Language, name: str, path: str, line: str, evidence: Evidence
) -> Hint | None:
    """Explain why the job does not find a module of the user."""
    if not language.ending:
        return None
    file = path.replace(".", "/") + language.ending
    here = evidence.left_here(file, is_module=False)
    if here.beside:
        return _certain(
            "own-module-not-found",
            f"module {name} was sent with the job, in a folder that {language.name} does not search",
            f"submit with --env {language.variable.format(folder=here.beside)}",
            line,
        )
    if place := here.home or here.above:
        flag = "--include" if here.home else "--folder"
        return _certain(
            "module-stayed-at-home",
            f"module {name} exists on your machine, but was not sent with the job",
            f"submit with {flag} {place}{_excluded(evidence)}",
            line,
        )
    return None


def _fix_for_package(language: _Language, name: str, evidence: Evidence) -> str:
    hyphened = name.replace("/", "-").replace(".", "-")
    if evidence.packages().image:
        return "add the package to the image, or use another image with --container"
    own = f"install it in the job user's home, such as with {language.otherwise}"
    if not evidence.advice.is_operator or not language.debian:
        return f"{own}; or use a --module, an --env-path or a --container that has it"
    return (
        f"add it to the nodes: `software: {{packages: [{language.debian.format(name=hyphened.lower())}]}}` "
        f"in the spec (Rocky Linux: {language.red_hat.format(name=hyphened)}), then `clusterctl up`; or "
        f"{own}"
    )


# --- The script and its steps --------------------------------------------------------------------
# srun starts a program for which a step has no PATH.
_NOT_STARTED: Final = r"execve\(\): (?P<what>[\w.+-]+): No such file or directory"
_STEP_EXPORT: Final = r"^[^#\n]*\bsrun\b[^\n]*--export[= ](?P<value>(?!ALL\b)\S+)"
_OTHERS: Final = r"^#(?P<name>PBS|BSUB|PJM) +-"
_PORT_IN_USE: Final = r"(?i)address already in use|EADDRINUSE|errno: 98\b"


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


def _port(line: str, evidence: Evidence) -> Iterator[Hint]:
    """Hint at MASTER_PORT, if the message names this port as taken."""
    port = evidence.attempt.port
    named = rf"\bMASTER_PORT\b|(?<![\d.]){port}(?![\d.]*\d)"
    if port and compiled(_PORT_IN_USE).search(line) and compiled(named).search(line):
        yield _certain(
            "port-in-use",
            f"MASTER_PORT ({port}) is already in use: a process on the node has it",
            "if two parts of the program listen on MASTER_PORT, give one of them another port; "
            "otherwise submit again: the job then gets another port",
            line,
        )
