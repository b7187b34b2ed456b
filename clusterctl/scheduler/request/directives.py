"""The #SBATCH lines of a user's script, and the options in them that flags of `submit` replace."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from clusterctl.errors import Notice, UsageError
from clusterctl.spec.job import JobSpec
from clusterctl.spec.program import safe_name
from clusterctl.spec.sbatch import (
    MARK,
    Directive,
    directive_lines,
    directives_in,
    near_option,
    split_words,
)

_HETEROGENEOUS: Final = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")
# What matters for finding comments in a shell script: escapes, quotes, here-documents, comments.
_SHELL_PART: Final = re.compile(
    r"""\\.|'|"|(?<!<)<<-?[ \t]*(?P<end>\\?\w+|'[^']*'|"[^"]*")|(?<![^\s;&|(])\#.*"""
)
_NAMES: Final = "a name has letters, digits, dots, dashes and underscores"
_QUOTED: Final = {"'": re.compile("'"), '"': re.compile(r"""\\.|\"""")}


@dataclass(frozen=True, slots=True)
class Directives:
    """The #SBATCH lines of a script.

    script: the file's name. lines: the lines, verbatim. options: the options in them.
    late: numbers of the #SBATCH lines after the first command, which sbatch ignores.
    faults: errors about lines that can't be read or submitted.
    """

    script: str
    lines: tuple[str, ...] = ()
    options: tuple[Directive, ...] = ()
    late: tuple[int, ...] = ()
    faults: tuple[UsageError, ...] = ()

    @classmethod
    def read(cls, path: Path, lines: Sequence[str], *, is_python: bool = False) -> Directives:
        """Read the #SBATCH lines before a script's first command, as sbatch does.

        is_python: whether the script is a Python program rather than a shell script.
        """
        texts = dict(directive_lines(lines))
        faults = []
        words: list[tuple[int, str]] = []
        for number, line in texts.items():
            place = f"line {number} of {path.name}"
            if _HETEROGENEOUS.match(line):
                faults.append(_heterogeneous(place))
                continue
            try:
                words += ((number, word) for word in split_words(line.removeprefix(MARK)))
            except ValueError as exc:
                faults.append(_unreadable(place, line, str(exc)))
        late = (number for number in _comments(lines, is_python=is_python) if number not in texts)
        return cls(
            path.name,
            tuple(texts.values()),
            tuple(
                replace(one, place=f"`#SBATCH {one}` in line {one.line} of {path.name}")
                for one in directives_in(words)
            ),
            tuple(late),
            tuple(faults),
        )

    def last(self, name: str) -> Directive | None:
        """Return the last option with this name, which is the option that sbatch uses."""
        return next((r for r in reversed(self.options) if r.option and r.option.name == name), None)

    def notes(self, job: JobSpec, kept: Sequence[Directive]) -> Iterator[str]:
        """Yield a line for each thing that the script's #SBATCH lines ask for in vain.

        kept: the options that neither flags nor --slurm replace.
        """
        ignored: dict[str, list[Directive]] = {}
        for directive in self.options:
            # Those that are never an option of a job are errors.
            if directive.option and directive.option.role == "ours" and directive.option.instead:
                ignored.setdefault(directive.option.instead, []).append(directive)
        for instead, options in ignored.items():
            names = " and ".join(dict.fromkeys(directive.own_name for directive in options))
            has = "has" if len({directive.own_name for directive in options}) == 1 else "have"
            yield (
                f"{self._place(directive.line for directive in options)}: {names} {has} no effect: "
                f"{instead}"
            )
        unknown: dict[str, list[Directive]] = {}
        for directive in self.options:
            if directive.option is None:
                unknown.setdefault(str(directive), []).append(directive)
        for word, options in unknown.items():
            near = near_option(word) or "only a plugin of the cluster's Slurm may have it"
            place = self._place(directive.line for directive in options)
            yield Notice(
                "directive-unknown", f"{place}: sbatch itself has no option {word}: {near}"
            )
        named = self.last("job-name")
        if named and named.value != job.name == safe_name(named.value or ""):
            yield f"{self._place([named.line])}: the job is called {job.name}: {_NAMES}"
        export = self.last("export")
        if export and export in kept:
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


def _heterogeneous(place: str) -> UsageError:
    return UsageError(
        "clusterctl can't submit a heterogeneous job",
        code="unsupported",
        about="heterogeneous",
        where=place,
        fix="submit the script with `sbatch` on the cluster (`clusterctl ssh`)",
    )


def _unreadable(place: str, line: str, why: str) -> UsageError:
    return UsageError(
        f"the line can't be read: {why}",
        about="directive",
        where=place,
        why=line,
        fix="correct the line",
    )
