"""The fenced blocks of README.md and docs/, and the commands and outputs in them.

    ```console              `$ ` lines are commands, `> ` lines go on with them, the rest is what they print
    ```sh                   a script
    ```yaml cluster.yaml    (or any other language and name) a file, as the commands that follow find it
    ```console rc=4         the last command ends with this exit code
    ```console figures      numbers must agree too
    ```console no-run: why  shown only, for the reason given
    ```console elsewhere: tests/e2e/test_ordinary_user.py    run there, not here

The output of a command is compared line by line, in order. Words must be equal; a word with digits
need only have digits; `ada` is the name of the user. `...` stands for omitted lines or the end of a
line. In a block with `figures`, counts must be equal, and measured numbers within 5%, because
rounding in a training differs between machines. Job IDs are not compared.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
RUN = ("console", "sh")
_REASONS = re.compile(r"(no-run|elsewhere): *(\S.*)")
_EXIT_CODE = re.compile(r"rc=([0-9]+)")
_JOB = re.compile(r"\bjob (\d+)\b")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_UNITS = {"B", "KiB", "MiB", "GiB", "TiB"}  # of sizes, which differ from machine to machine


@dataclass(frozen=True)
class Block:
    """A code block. ``words`` is what follows the language in its info string; ``line`` counts from
    1.
    """

    page: Path
    line: int
    language: str
    words: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def shown_only(self) -> str:
        """Why it is not run here; "" if it is."""
        match = _REASONS.fullmatch(self.words)
        return match[2] if match else ""

    @property
    def elsewhere(self) -> str:
        """The test that runs it instead."""
        match = _REASONS.fullmatch(self.words)
        return match[2] if match and match[1] == "elsewhere" else ""

    @property
    def runs(self) -> bool:
        return self.language in RUN and not self.shown_only

    @property
    def file(self) -> str:
        """The file that it shows; "" if it shows none."""
        return "" if self.language in RUN else self.words

    @property
    def commands(self) -> tuple[Command, ...]:
        """In order. A script is one command."""
        code = _EXIT_CODE.fullmatch(self.words)
        last = int(code[1]) if code else 0
        if self.language == "sh":
            return (Command(self.where, f"set -e\n{self.text}", (), last),)
        found = [replace(command, figures=self.words == "figures") for command in _typed(self)]
        return (*found[:-1], replace(found[-1], exit_code=last)) if found else ()


@dataclass(frozen=True)
class Command:
    """What is typed, and what is shown to be printed."""

    where: str
    text: str
    prints: tuple[str, ...]
    exit_code: int = 0
    figures: bool = False

    def differs(self, output: str) -> str:
        """What of ``prints`` was not printed; "" if all was, in order."""
        lines = iter(output.splitlines())
        for expected in self.prints:
            if expected.strip() in {"", "..."}:
                continue
            if not any(_alike(expected, line, figures=self.figures) for line in lines):
                return expected
        return ""

    def jobs(self, output: str) -> dict[str, str]:
        """The ids of jobs in the manual -> those that they have here."""
        found: dict[str, str] = {}
        actual = output.splitlines()
        for expected in self.prints:
            same = next((line for line in actual if _alike(expected, line)), "")
            found |= dict(zip(_JOB.findall(expected), _JOB.findall(same), strict=False))
        return found


def pages() -> list[Path]:
    """All pages, the shortest way into the project first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> tuple[Block, ...]:
    """A page's code blocks in order; one that is not fenced has no language."""
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type in {"fence", "code_block"}:
            language, _, words = token.info.strip().partition(" ")
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(page, line, language, words.strip(), token.content))
    return tuple(found)


def follow(
    chosen: Iterable[Block], place: Path, types: Callable[[str, Path], tuple[int, str, Path]]
) -> None:
    """Do what blocks say, files and commands in order. ``types`` runs a command in a folder; it
    returns the exit code, what was printed, and the folder that comes next.

    Raises:
        AssertionError: a command ended, or printed, otherwise than the page shows.
    """
    jobs: dict[str, str] = {}
    for block in chosen:
        if block.file:
            name = shlex.quote(block.file)
            code, output, _ = types(
                f"mkdir -p $(dirname {name}); cat >{name} <<'EndOfFile'\n{block.text}EndOfFile",
                place,
            )
            assert code == 0, output
        for command in block.commands if block.language in RUN else ():
            code, output, place = types(with_jobs(command.text, jobs), place)
            shown = f"{command.where}\n$ {command.text}\n{output}"
            assert code == command.exit_code, f"exit {code}: {shown}"
            assert not (missing := command.differs(output)), f"no {missing!r}: {shown}"
            jobs |= command.jobs(output)


def _typed(block: Block) -> Iterator[Command]:
    text = ""
    at = block.line
    prints: list[str] = []
    for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
        if line.startswith("$ "):
            if text:
                yield Command(f"{block.page.relative_to(ROOT)}:{at}", text, tuple(prints))
            text = line[2:]
            prints = []
            at = number
        elif line.startswith("> ") and not prints:
            text += "\n" + line[2:]
        else:
            prints.append(line)
    if text:
        yield Command(f"{block.page.relative_to(ROOT)}:{at}", text, tuple(prints))


def shown(page: Path, text: str, turn: int = 0) -> Command:
    """The command of a page that is typed like this, the ``turn``-th of them from 0."""
    typed = (one for block in blocks(page) if block.language in RUN for one in block.commands)
    return [one for one in typed if one.text == text][turn]


def assert_shown(
    page: Path, text: str, output: str, names: Mapping[str, str], turn: int = 0
) -> None:
    """Fails unless ``said`` is what the page shows that command to print. ``names``: ours -> the
    page's.
    """
    for ours, its in names.items():
        output = output.replace(ours, its)
    missing = shown(page, text, turn).differs(output)
    assert not missing, f"no {missing!r}: {text}\n{output}"


def _alike(expected: str, line: str, *, figures: bool = False) -> bool:
    words = expected.split()
    output = line.split()
    if words[-1:] == ["..."]:
        words, output = words[:-1], output[: len(words) - 1]
    if len(words) != len(output) or not all(map(_same, words, output)):
        return False
    return not figures or all(map(_same_figure, ["", *words], words, output))


def _same_figure(before: str, word: str, output: str) -> bool:
    """Whether two words agree, if they are numbers. ``before`` is the word before them."""
    number, actual = (_NUMBER.fullmatch(text.strip("{}(),:")) for text in (word, output))
    if number is None or actual is None or before == "job":
        return True
    is_count = "." not in number[0] + actual[0]
    return math.isclose(float(number[0]), float(actual[0]), rel_tol=0.0 if is_count else 0.05)


def _same(word: str, output: str) -> bool:
    if word == output or (_has_digit(word) and _has_digit(output)):
        return True
    if {word, output} <= _UNITS:
        return True
    # Of a class of nodes, which this machine may not have yet.
    if {word, output} == {
        "made",
        "cached",
    }:
        return True
    anybody = re.escape(word).replace("ada", "[a-z_][a-z0-9_-]*")
    return "ada" in word and re.fullmatch(anybody, output) is not None


def with_jobs(text: str, jobs: dict[str, str]) -> str:
    """A command with the job ids that the manual's jobs have here. The value of an option is no id,
    unless the option names a job.
    """
    if not jobs:
        return text
    known: Sequence[str] = sorted(jobs, key=len, reverse=True)
    # In the name of a run, the cluster of the manual stands before.
    start = r"(?:(?<=\bdemo-)|(?<![\w.:-]))"
    pattern = re.compile(
        rf"(--(?!(?:run|from-run|after) )[\w-]+ )?{start}({'|'.join(known)})(?=$|[\s_-])",
        re.MULTILINE,
    )
    return pattern.sub(lambda match: match[0] if match[1] else jobs[match[2]], text)


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))
