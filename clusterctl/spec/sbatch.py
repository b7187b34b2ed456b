"""The options of sbatch (data/sbatch.toml), and texts that contain them: #SBATCH lines, and
--slurm.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from clusterctl.errors import BadValueError
from clusterctl.spec.names import DATA, did_you_mean
from clusterctl.spec.units import shown

# The start of a line of a script with options of sbatch.
MARK: Final = "#SBATCH"
# The dependency of a job on the user's earlier jobs with the same name.
SINGLETON: Final = "singleton"
# Options that only salloc has.
_OF_SALLOC: Final = frozenset(
    {"--bell", "--immediate", "--kill-command", "--no-bell", "--no-shell"}
)
# Options with a list of resources, such as gpu:2,tmpfs:10G. Each entry is a quantity of its own.
_LISTS: Final = frozenset({"gres", "tres-per-task"})
_ENTRIES: Final = (
    ("--gpus-per-node", re.compile(r"(gres[:/])?gpu\b")),
    ("--cpus-per-task", re.compile(r"cpu\b")),
)
# A part of a word, as sbatch reads it: a backslash works in both kinds of quotes, and # begins a
# comment.
_PART: Final = re.compile(r"""\\.|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s\\'"#]+""")

_BRACKETS: Final = re.compile(r"\[([^][]*)\]((?:%.*)?)")


@dataclass(frozen=True, slots=True)
class SbatchOption:
    """An option of sbatch. The head of data/sbatch.toml explains the fields."""

    name: str
    letter: str = ""
    value: str = "required"
    same: str = ""
    beside: bool = False
    role: str = ""
    use: str = ""
    instead: str = ""
    clock: bool = False
    form: str = ""
    salloc: bool = True


@dataclass(frozen=True, slots=True)
class Directive:
    """An option of sbatch with its value, in a line of a script or in a text of --slurm.

    option: None if sbatch has no such option. The value is then the word itself.
    value: None: the option has no value.
    line: the number of the line of the script, from 1. 0: it is not in the script.
    place: where the user wrote the option, for messages.
    """

    option: SbatchOption | None
    value: str | None
    line: int = 0
    place: str = ""

    def __str__(self) -> str:
        if self.option is None:
            return self.value or ""
        return f"--{self.option.name}" + (f"={self.value}" if self.value is not None else "")

    @property
    def own_name(self) -> str:
        """The option without its value, such as ``--exclude``."""
        return f"--{self.option.name}" if self.option is not None else str(self)

    @property
    def is_readable(self) -> bool:
        """Whether sbatch may accept the value. Values of most options are not judged."""
        form = self.option.form if self.option is not None else ""
        return (
            not form or re.fullmatch(form, self.value or "", re.IGNORECASE | re.ASCII) is not None
        )

    @property
    def quantities(self) -> frozenset[str]:
        """The quantities that the directive sets. Each is named as the option that usually sets it,
        such as ``--mem``, which also stands for ``--mem-per-cpu``.
        """
        if self.option is None:
            return frozenset()
        if self.option.name in _LISTS:
            return frozenset(quantity for quantity, _ in self._entries())
        return frozenset({f"--{self.option.same or self.option.name}"})

    def without(self, quantities: Iterable[str]) -> Directive | None:
        """Return the directive without these quantities, or ``None`` if nothing remains."""
        remaining = self.quantities.difference(quantities)
        if self.option is None or remaining == self.quantities:
            return self
        if not remaining or self.option.name not in _LISTS:
            return None
        return replace(
            self, value=",".join(entry for name, entry in self._entries() if name in remaining)
        )

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Yield (quantity, entry) for each entry of a list of resources."""
        for entry in (self.value or "").split(","):
            quantity = next(
                (name for name, pattern in _ENTRIES if pattern.match(entry)), self.own_name
            )
            yield quantity, entry


@cache
def sbatch_options() -> Mapping[str, SbatchOption]:
    """Return name -> option, without dashes."""
    tables = tomllib.loads((DATA / "sbatch.toml").read_text(encoding="utf-8"))
    return {name: SbatchOption(name, **table) for name, table in tables.items()}


def sbatch_option(word: str) -> SbatchOption | None:
    """Return the option that a word such as ``--nodes``, ``--nodes=2``, ``-N`` or ``-N2`` gives.

    Like sbatch, accept the beginning of a long name that only a single option has.
    """
    options = sbatch_options()
    if not word.startswith("--"):
        letter = word[1:2] if word.startswith("-") else ""
        return next(
            (option for option in options.values() if letter and option.letter == letter), None
        )
    name = word[2:].partition("=")[0]
    near = [option for option in options.values() if name and option.name.startswith(name)]
    return options.get(name) or (near[0] if len(near) == 1 else None)


def directive_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (number, line) for each #SBATCH line before a script's first command, as sbatch finds
    them.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            return
        if line.startswith(MARK):
            yield number, line.encode(errors="surrogateescape").decode(errors="replace")


def values_in(lines: Iterable[str], *names: str) -> dict[str, str]:
    """Return name -> value for these options in the #SBATCH lines of a script: the last of each
    that counts.

    names: such as ``--job-name``. Empty: the lines have none of them, or can't be read.
    """
    words: list[tuple[int, str]] = []
    for number, line in directive_lines(lines):
        try:
            words += [(number, word) for word in split_words(line.removeprefix(MARK))]
        except ValueError:
            return {}
    return {
        found.own_name: found.value
        for found in directives_in(words)
        if found.own_name in names and found.value
    }


def plain_array(value: object) -> object:
    """Return a value of --array without the brackets that sbatch allows, as in ``[0-9:3]%2``."""
    match = _BRACKETS.fullmatch(value) if isinstance(value, str) else None
    return f"{match[1]}{match[2]}" if match else value


def split_words(text: str) -> list[str]:
    """Split a text into words as sbatch does. Raises ValueError if a quote is not closed."""
    words = []
    start = 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        if text[start] == "#":
            break
        word = ""
        while match := _PART.match(text, start):
            part = match[0]
            start = match.end()
            word += re.sub(r"\\(.)", r"\1", part[1:-1] if part[0] in "'\"" else part)
        if start < len(text) and not text[start].isspace() and text[start] != "#":
            raise ValueError("a quote is not closed")
        words.append(word)
    return words


def quoted(word: str) -> str:
    """Quote a word for a #SBATCH line. Slurm 22.05 does not accept a backslash before a blank."""
    if re.fullmatch(r"[^\s\\'\"#]+", word):
        return word
    return '"' + re.sub(r'(["\\])', r"\\\1", word) + '"'


def directives_in(words: Iterable[tuple[int, str]]) -> Iterator[Directive]:
    """Yield the options in words, as sbatch's getopt finds them. ``words``: pairs (number of line,
    word).
    """
    remaining = iter(words)
    for line, word in remaining:
        option = sbatch_option(word)
        if option is None:
            yield Directive(None, word, line)
        elif word.startswith("--"):
            _, equals, value = word.partition("=")
            yield Directive(option, value if equals else _next_value(option, remaining), line)
        else:
            yield from _letters(word[1:], line, remaining)


def _letters(letters: str, line: int, remaining: Iterator[tuple[int, str]]) -> Iterator[Directive]:
    """Yield the options in a word of short options, such as ``HN2`` of ``-HN2``."""
    while letters:
        option = sbatch_option(f"-{letters}")
        if option is None:
            yield Directive(None, f"-{letters}", line)
            return
        letters, value = (letters[1:], "") if option.value == "absent" else ("", letters[1:])
        yield Directive(option, value or _next_value(option, remaining), line)


def _next_value(option: SbatchOption, remaining: Iterator[tuple[int, str]]) -> str | None:
    return next(remaining, (0, None))[1] if option.value == "required" else None


def directives_of(texts: Iterable[str]) -> tuple[Directive, ...]:
    """Return the options in texts of --slurm.

    Raises:
        BadValueError: a text has no option, a wrong option, or an option that clusterctl itself
            sets or that does not describe a job.
    """
    options: list[Directive] = []
    for text in texts:
        try:
            given = list(directives_in((0, word) for word in split_words(text)))
        except ValueError as exc:
            raise BadValueError("not-an-sbatch-option", f"{shown(text)}: {exc}") from exc
        if not given or not text.isprintable():
            problem = (
                "has no option" if text.isprintable() else "has a character that can't be printed"
            )
            raise BadValueError("not-an-sbatch-option", f"{shown(text)} {problem}")
        for directive in given:
            _check(directive)
        options += (replace(one, place=f"`--slurm {one}`") for one in given)
    return tuple(options)


def words_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the options in texts of --slurm as words, each with its value, such as ``--nodes=2``.

    Raises BadValueError like ``directives_of``.
    """
    return tuple(str(directive) for directive in directives_of(texts))


def _check(directive: Directive) -> None:
    option = directive.option
    code = "not-an-sbatch-option"
    if option is None:
        near = near_option(str(directive))
        raise BadValueError(code, f"sbatch has no option {directive}{f': {near}' if near else ''}")
    if (option.value, directive.value is None) in {("required", True), ("absent", False)}:
        problem = "needs a value" if directive.value is None else "has no value"
        raise BadValueError(code, f"{directive.own_name} {problem}")
    if not directive.is_readable:
        raise BadValueError(code, f"sbatch can't read the value of {directive}")
    if option.role:
        raise option_of_clusterctl(directive, option.use)


def near_option(word: str) -> str:
    """Return ``did you mean --nodes?`` if an option of jobs is similar to a word. Empty: none is."""
    if word.partition("=")[0] in _OF_SALLOC:
        return ""
    options = sbatch_options()
    return did_you_mean(word, [f"--{name}" for name in options if not options[name].role])


def option_of_clusterctl(directive: Directive, flags: str) -> BadValueError:
    """Return the error for an option that --slurm can't pass. flags: those of `submit` in its
    place. Empty: there are none.
    """
    advice = f"use {flags} of `clusterctl submit`" if flags else "leave it out"
    return BadValueError(
        "option-of-clusterctl", f"clusterctl itself sets {directive.own_name}: {advice}"
    )
