"""The #SBATCH lines of a user's script, and the options in them that flags of `submit` replace."""

from __future__ import annotations

import posixpath
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.scheduler.slurm_values import expand_nodes
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS, flag_of, quantities_of
from clusterctl.spec.program import safe_name
from clusterctl.spec.sbatch import (
    MARK,
    Directive,
    directive_lines,
    quoted,
    directives_in,
    directives_of,
    split_words,
)
from clusterctl.state.ledger import PROGRAM_FOLDER

_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")
# The product of these options is the number of tasks.
_SHAPE: Final = frozenset({"--nodes", "--ntasks-per-node"})
_SETS_SHAPE: Final = frozenset({"nodes", "ntasks-per-node", "tasks-per-node"})
# What matters for finding comments in a shell script: escapes, quotes, here-documents, comments.
_SHELL_PART: Final = re.compile(
    r"""\\.|'|"|(?<!<)<<-?[ \t]*(?P<end>\\?\w+|'[^']*'|"[^"]*")|(?<![^\s;&|(])\#.*"""
)
_NAMES: Final = "a name has letters, digits, dots, dashes and underscores"
_QUOTED: Final = {"'": re.compile("'"), '"': re.compile(r"""\\.|\"""")}
# Options without an effect on jobs without GPUs.
_OF_GPUS: Final = frozenset({"--gpu-bind", "--gpu-freq"})


@dataclass(frozen=True, slots=True)
class Directives:
    """The #SBATCH lines of a script.

    script: the file's name. lines: the lines, verbatim. options: the options in them.
    late: numbers of the #SBATCH lines after the first command, which sbatch ignores.
    """

    script: str
    lines: tuple[str, ...] = ()
    options: tuple[Directive, ...] = ()
    late: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path, lines: Sequence[str], *, is_python: bool = False) -> Directives:
        """Read the #SBATCH lines before a script's first command, as sbatch does.

        is_python: whether the script is a Python program rather than a shell script.

        Raises:
            UsageError: the script asks for a heterogeneous job, or a line can't be read.
        """
        texts = dict(directive_lines(lines))
        for line in texts.values():
            if _HETEROGENEOUS.match(line):
                raise UsageError(
                    f"the script {path} asks for a heterogeneous job, which clusterctl can't "
                    "submit",
                    code="heterogeneous-job",
                    fix="submit the script with `sbatch` on the cluster (`clusterctl ssh`)",
                )
        late = tuple(
            number for number in _comments(lines, is_python=is_python) if number not in texts
        )
        words = [
            (number, word) for number, line in texts.items() for word in _words(path, number, line)
        ]
        return cls(path.name, tuple(texts.values()), tuple(directives_in(words)), late)

    def last(self, name: str) -> Directive | None:
        """Return the last option with this name, which is the option that sbatch uses."""
        return next(
            (r for r in reversed(self.options) if r.option and r.option.name == name), None
        )

    def notes(self, job: JobSpec) -> Iterator[str]:
        """Yield a line for each thing that the script's #SBATCH lines ask for in vain."""
        ignored: dict[str, list[Directive]] = {}
        for directive in self.options:
            if directive.option and directive.option.instead:
                ignored.setdefault(directive.option.instead, []).append(directive)
        for instead, options in ignored.items():
            names = " and ".join(dict.fromkeys(directive.own_name for directive in options))
            has = "has" if len({directive.own_name for directive in options}) == 1 else "have"
            yield (
                f"{self._place(directive.line for directive in options)}: {names} {has} no effect: "
                f"{instead}"
            )
        named = self.last("job-name")
        if named and named.value != job.name == safe_name(named.value or ""):
            yield f"{self._place([named.line])}: the job is called {job.name}: {_NAMES}"
        export = self.last("export")
        if export and export.without(self._replaced(job)):
            words = (
                set((export.value or "").split(",")) - {"ALL", "NONE", "NIL", ""} - job.env.keys()
            )
            if variables := sorted(word for word in words if "=" not in word):
                passes = (
                    f"--export={','.join(variables)} passes the value of your account on the "
                    "cluster"
                )
                yours = " ".join(f"--env {name}" for name in variables)
                yield f"{self._place([export.line])}: {passes}; `submit {yours}` passes yours"
        if self.late:
            problem = (
                "#SBATCH after the first command has no effect: move it to the top of the script"
            )
            yield f"{self._place(self.late)}: {problem}"

    def _place(self, lines: Iterable[int]) -> str:
        """Return the script's name and these numbers of lines."""
        numbers = sorted(set(lines))
        head = "line" if len(numbers) == 1 else "lines"
        return f"{self.script}, {head} {', '.join(map(str, numbers))}"

    def without_replaced(self, job: JobSpec) -> tuple[str, ...]:
        """Return the lines without the options that speak of a quantity which the job's flags set.

        Raises:
            UsageError: a line contradicts the flags, or is not an option of a job.
        """
        kept = [in_program_folder(directive, job) for directive in self.effective(job)]
        for directive in kept:
            if contradiction := _contradiction(job, directive):
                problem, fix = contradiction
                place = f"`#SBATCH {directive}` in line {directive.line} of {self.script}"
                raise UsageError(f"{place} {problem}", code="directive-refused", fix=fix)
        if kept == list(self.options):
            return self.lines
        lines = (group for _, group in groupby(kept, key=lambda directive: directive.line))
        return tuple(
            f"{MARK} {' '.join(quoted(str(directive)) for directive in line)}" for line in lines
        )

    def effective(self, job: JobSpec) -> list[Directive]:
        """Return the options that the job's flags do not replace."""
        replaced = self._replaced(job)
        return [new for directive in self.options if (new := directive.without(replaced))]

    def _replaced(self, job: JobSpec) -> frozenset[str]:
        """Return the quantities that the job's flags set."""
        ours = {r.own_name for r in self.options if r.option and r.option.role == "ours"}
        given = {*quantities_of(job.model_fields_set), *ours}
        for directive in directives_of(job.slurm):
            given |= {*directive.quantities, directive.own_name}
        shapers = (r for r in self.options if r.option and r.option.name in _SETS_SHAPE)
        shape = {quantity for directive in shapers for quantity in directive.quantities}
        if given & _SHAPE and given | shape >= _SHAPE:
            given.add("--ntasks")
        return frozenset(
            given | (_OF_GPUS if "gpus" in job.model_fields_set and not job.gpus else set())
        )


def _comments(lines: Sequence[str], *, is_python: bool) -> Iterator[int]:
    """Yield the numbers of the lines that are comments and begin with #SBATCH.

    A script may contain other scripts as texts, with #SBATCH lines that are not its own.
    """
    if not any(line.startswith(MARK) for line in lines):
        return
    if not is_python:
        yield from _comments_of_shell(lines)
        return
    readline = (f"{line}\n" for line in lines).__next__
    with suppress(tokenize.TokenError, SyntaxError, ValueError):
        for token in tokenize.generate_tokens(readline):
            if token.type == tokenize.COMMENT and token.line.startswith(MARK):
                yield token.start[0]


def _comments_of_shell(lines: Sequence[str]) -> Iterator[int]:
    # The quote that is open, and the words that end the here-documents that are open.
    quote = ""
    ends: list[str] = []
    for number, line in enumerate(lines, start=1):
        if ends:
            if line.strip("\t") == ends[0]:
                del ends[0]
            continue
        if not quote and line.startswith(MARK):
            yield number
        at = 0
        while part := (_QUOTED[quote] if quote else _SHELL_PART).search(line, at):
            at = part.end()
            text = part[0]
            if text in {"'", '"'}:
                quote = "" if quote else text
            elif not quote and text[0] == "#":
                break
            elif not quote and part["end"]:
                ends.append(part["end"].strip("'\"\\"))


def in_program_folder(directive: Directive, job: JobSpec) -> Directive:
    """Return an option, with the path of --input below the program's folder, to which the file is
    sent.
    """
    path = directive.value or ""
    if directive.own_name != "--input" or path.startswith("/"):
        return directive
    return replace(directive, value=posixpath.normpath(f"{PROGRAM_FOLDER}/{job.place.start}/{path}"))


def _contradiction(job: JobSpec, directive: Directive) -> tuple[str, str] | None:
    """Return the problem and the fix if an option of the script contradicts the job's flags, or
    None.
    """
    name = directive.own_name
    flags = job.model_fields_set
    value = directive.value or ""
    if directive.option and directive.option.role == "never":
        use = directive.option.use
        advice = f", and use `clusterctl submit {use}`" if use else ""
        return "is not an option of a job", f"leave it out of the script{advice}"
    if name == "--ntasks":
        shape = (OPTIONS["nodes"], OPTIONS["tasks_per_node"])
        for own, other in (shape, reversed(shape)):
            least = getattr(job, own.name)
            if own.name in flags and value.isdecimal() and int(value) < least:
                problem = f"asks for fewer tasks in total than {own.flag} {least}"
                return problem, f"also pass {other.flag}, which replaces --ntasks"
    count = _count_nodes(value) if name == "--nodelist" else 0
    if "nodes" in flags and count > job.nodes:
        fix = f"use --nodes {count}, or name other nodes with --slurm --nodelist=NODES"
        return f"names more nodes than --nodes {job.nodes}", fix
    if any(name == given.own_name for given in directives_of(job.slurm)):
        return (
            f"can't be combined with --slurm {name}",
            "leave out either, or pass --gpus or --cpus",
        )
    flag = next((flag_of(quantity) for quantity in directive.quantities), "")
    if flag and "gpu" in name and "gpus" in flags and not job.gpus:
        return "needs GPUs, and --gpus is 0", f"replace it with {flag}"
    return None


def _count_nodes(names: str) -> int:
    with suppress(ValueError):
        return len(expand_nodes(names))
    return 0


def _words(path: Path, number: int, line: str) -> Iterator[str]:
    try:
        yield from split_words(line.removeprefix(MARK))
    except ValueError as exc:
        raise UsageError(
            f"line {number} of {path.name} can't be read: {exc}",
            code="directive-refused",
            why=line,
            fix="correct the line",
        ) from exc
