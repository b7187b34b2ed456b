"""The excerpt of a job's logs that is shown: the last traceback and the last lines of the rank that
failed first.

Whether the traceback ended the program is not decided: both are shown, and the lines between them
are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.ends.failed_rank import FailedRank
from clusterctl.scheduler.ends.log_text import (
    CONSEQUENCES,
    LEFT_OUT,
    compiled,
    is_frame,
    is_statement,
    says_no_error,
    without_long_lines,
    without_noise,
)
from clusterctl.util.terminal import plain_line

# Whose lines an excerpt has.
OF_JOB: Final = "the job"
# Numbers of lines: the last of a log, those after a traceback, before it, of the other stream,
# before a backtrace, and of bash about the job's script.
_LAST = 10
_AFTER = 6
_BEFORE = 2
_BESIDE = 4
_ABOVE_FRAMES = 3
_OF_SHELL = 2
_FRAMES = 3
_MESSAGE_LINES = 8  # of an exception
_COLUMNS = 400
_TAIL_COLUMNS = 120
_RETURNS = 2
# Signals that a process gets from outside, so that its last words do not belong to its end.
BY_ANOTHER: Final = frozenset({"SIGKILL", "SIGTERM"})
# The quantifiers are possessive and the message is optional, so that hostile logs take no time.
_TRACEBACK: Final = re.compile(
    r"^(?P<frames>(?:(?:Original )?Traceback \(most recent call last\):\n)?"
    r"(?:  File .*\n(?:    .*\n|  \[Previous line.*\n)*+)++)"
    r"(?:(?P<message>[A-Za-z_][\w.]*(?:: .*|:)?)$)?+",
    re.MULTILINE,
)
_FRAME: Final = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?', re.MULTILINE
)
# Where the message of an exception ends, which may have several lines.
_MESSAGE_END: Final = re.compile(r"\n(?:\s*$|(?:Original )?Traceback |\"\"\"$)", re.MULTILINE)
# Python's own modules, and installed packages.
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/(?:python|pypy)\d|^<frozen ")
# Other frames that are not of the user's files, unless they are in the program's folder: code without
# a file (but a script on stdin has lines), Cython's sources, packages in archives, commands such as
# torchrun, and files of the system.
_FOREIGN: Final = re.compile(
    r"^<(?!stdin>)|\.p(?:yx|xi|xd)$|\.(?:egg|whl|zip|pyz|pex)/|/bin/[^/.]+$|^/usr/(?:lib|share)/"
)
_IMPORTER: Final = re.compile(r"\b(?:runpy|importlib)\b")
# The text that Python writes between an exception and the exception raised from it.
_CHAINED: Final = re.compile(
    r"^(?:During handling of|The above exception was) .*\s*\Z", re.MULTILINE
)
_ORIGINAL: Final = "Original Traceback"
# Python reports an exception in __del__ with these lines.
_IGNORED: Final = re.compile(r"^Exception ignored (?!in atexit callback).*\n\Z", re.MULTILINE)
# Python's own lines before the traceback of an exception that ends a part of a program: threading,
# multiprocessing, atexit, asyncio.
_PART: Final = re.compile(
    r"^(?:Exception in (thread .+):|(Process \S+):|Exception ignored in (atexit callback)\b.*"
    r"|Error in (atexit)\._run_exitfuncs:|(Task) exception was never retrieved\nfuture: .*)\n\Z",
    re.MULTILINE,
)
# Errors of the shell itself about the job's script, which goes on after them.
OF_BASH: Final = re.compile(
    r"^\S+: (?:line )?\d+: .*(?:not found|No such file.*|Permission denied|unbound variable)$",
    re.MULTILINE,
)
# How Go and sanitizers say why they end a program, before long traces.
_OF_RUNTIME: Final = re.compile(
    r"^(?:(?:panic|fatal error): .+|SUMMARY: \w+Sanitizer: .+)$", re.MULTILINE
)
# A message of mpirun between two rules. Its first line names the problem.
_BANNER: Final = re.compile(r"^-{70,}\n(?P<line>.+)(?:\n.*){0,60}?\n-{70,}$", re.MULTILINE)
# A line that is no rule or bracket, was not written by clusterctl, and does not only say that R, gcc,
# gfortran or Node.js ends.
_WORD: Final = re.compile(
    r"(?!clusterctl: |Execution halted$|Error termination\.|compilation terminated\.$|Node\.js v)\S*\w"
)
# The heading of a stack: of Lua, Node.js, gfortran.
_STACK: Final = re.compile(r"(?i)(?:stack|trace|traceback|backtrace):$")
_LOOK_BACK = 800  # characters before a traceback
OF_OTHERS: Final = "other processes of the job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Lines of a log. source: whose: such as ``rank 1 on n2``, ``OF_JOB``, or ``OF_OTHERS`` if the
        rank that failed first has a log of its own without an important line.

    traceback: the last that is no consequence of another rank's end. Empty: no such traceback.
    exception: the line with its message. chain: the exceptions from which it was raised.
    place: its last line in a file of the user, such as ``train.py:7``.
    part: the thread or process that it ended, if that was not the whole program.
    shadow: the user's file that a library imported in place of a package.
    before: the lines before the traceback. last: the last lines of the log, after it.
    between: the number of lines between the traceback and ``last``.
    beside, beside_of: the last lines of the other stream, if the job has written both, so that their
        order is unknown; and its name, stdout or stderr.
    of_shell: earlier lines in which the shell says that a command of the script failed, or a runtime
        why it ends the program, or with which a message of mpirun begins.
    is_consequence: whether the exception tells of the end of another rank.
    """

    source: str = OF_JOB
    of_shell: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    traceback: tuple[str, ...] = ()
    exception: str = ""
    place: str = ""
    part: str = ""
    shadow: str = ""
    between: int = 0
    last: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    beside_of: str = ""
    is_consequence: bool = False

    @property
    def last_line(self) -> str:
        """The last line after the traceback that is a statement of the job's own, or "". If the job
        has written both streams, that of stderr.
        """
        return next(self._statements, "")

    @property
    def last_complaint(self) -> str:
        """The same without lines that say themselves that they are no error, or that a stack follows."""
        said = (line for line in self._statements if not _STACK.search(line))
        return next((line for line in said if not says_no_error(line)), "")

    @property
    def _statements(self) -> Iterator[str]:
        """The statements after the traceback, the last first."""
        written = self.beside if self.beside_of == "stderr" else self.last
        for at in reversed(range(len(written))):
            line, *below = written[at:]
            if _WORD.match(line) and is_statement(line):
                # R writes the call, and the message below it.
                yield below[0].strip() if below and line.rstrip().endswith(" :") else line

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines for people."""
        return (
            *self.of_shell,
            *(["[...]"] if self.of_shell else []),
            *self.before,
            *(f"({message}; then:)" for message in self.chain),
            *self.traceback,
            *([f"{LEFT_OUT}{self.between} lines ...]"] if self.between else []),
            *self.last,
            *([f"(on {self.beside_of}:)", *self.beside] if self.beside else []),
        )


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception in a log. start, end: of its traceback, to the end of the message's first line.

    chain: the exceptions from which it was raised.
    """

    match: re.Match[str]
    start: int
    end: int
    chain: tuple[re.Match[str], ...] = ()

    @property
    def message(self) -> str:
        return self.match["message"]

    @property
    def is_consequence(self) -> bool:
        """Whether the end of another rank raised it."""
        text = self.match.string[self.match.start("message") :][: _MESSAGE_LINES * _COLUMNS]
        said = _MESSAGE_END.split(text, 1)[0].split("\n")[:_MESSAGE_LINES]
        return any(compiled(pattern).search("\n".join(said)) for pattern in CONSEQUENCES)

    @property
    def part(self) -> str:
        """The part of the program that it ended, such as a thread; "": the whole, or unknown."""
        text = self.match.string
        begin = _PART.search(text, max(0, self.start - _LOOK_BACK), self.start)
        return plain_line(next(filter(None, begin.groups()))) if begin else ""


def excerpt_of(evidence: Evidence, failed: FailedRank) -> Excerpt:
    """Select the lines: of the log of the rank that failed first, else of the job's logs."""
    own = (evidence.ranks or {}).get(failed.rank) if failed.rank is not None else None
    stderr, stdout = evidence.log.removeprefix(evidence.stdout), evidence.stdout
    folder = evidence.folder or evidence.job.work_dir
    source = OF_JOB if own is None else OF_OTHERS
    of_job = [replace(excerpt_of_log(text, folder), source=source) for text in (stderr, stdout)]
    if own is not None and failed.signal in BY_ANOTHER:
        # A killed rank had no last words, and those of other ranks are not its own.
        of_job = []
    of_rank = [replace(excerpt_of_log(own or "", folder), source=str(failed))]
    found = [excerpt for excerpt in (*of_rank, *of_job) if excerpt.lines]
    if not found and failed.rank is None:
        # There is nothing but messages of launchers.
        lines = _written(without_long_lines(evidence.log))
        return Excerpt(last=_plain(lines[-_LAST:]))
    first = min(found, key=_preference, default=Excerpt())
    for at, (name, text) in enumerate((("stdout", stdout), ("stderr", stderr))):
        if of_job and first is of_job[at] and of_job[1 - at].lines:
            lines = _written(without_noise(text))[-_BESIDE:]
            return replace(first, beside=_plain(lines), beside_of=name)
    return first


def _preference(excerpt: Excerpt) -> int:
    """Return the place of an excerpt among those of a job. The rank's own output comes first, also
    without an exception, unless it only reports the end of another rank.
    """
    if excerpt.is_consequence:
        return 2
    is_own = excerpt.source not in {OF_JOB, OF_OTHERS}
    return 0 if is_own else 1 if excerpt.exception else 3


def excerpt_of_log(text: str, folder: str) -> Excerpt:
    """Select the lines of a single log. folder: of the program, which paths are shown without."""
    text = without_noise(text)
    every = _raised_in(text)
    primary = [each for each in every if not each.is_consequence]
    raised = next(reversed(primary or every), None)
    lines = _written(text[raised.end :] if raised else text)
    between, last = _end_of(lines, _AFTER if raised else _LAST)
    told = [
        *_OF_RUNTIME.findall(text),
        *(match[0] for match in OF_BASH.finditer(text)),
        *(match["line"] for match in _BANNER.finditer(text)),
    ]
    of_shell = [line for line in told if line not in last]
    return Excerpt(
        of_shell=_plain(of_shell[:_OF_SHELL]),
        last=_plain(last),
        between=between if raised else 0,
        **(_of_raised(raised, folder, _end_before(raised, every)) if raised else {}),
    )


def _end_of(lines: Sequence[str], count: int) -> tuple[int, list[str]]:
    """Return how many lines are left out, and the last ``count`` lines. If these begin within a
    backtrace, also the lines before it: they have the message.
    """
    start = max(0, len(lines) - count)
    message = start
    while message and is_frame(lines[message]):
        message -= 1
    if message == start:
        return start, [*lines[start:]]
    first = max(0, message - _ABOVE_FRAMES + 1)
    left = start - message - 1
    mark = [f"{LEFT_OUT}{left} lines ...]"] if left else []
    return first, [*lines[first : message + 1], *mark, *lines[start:]]


def ended_part(text: str) -> tuple[str, str]:
    """Return the first part of a program that an exception ended, such as a thread, and the
    exception; ("", "") if there is no such part.
    """
    parts = ((each.part, plain_line(each.message)) for each in _raised_in(without_noise(text)))
    return next((found for found in parts if found[0]), ("", ""))


def _end_before(raised: _Raised, every: Sequence[_Raised]) -> int:
    """Return where the exception before this one ends in the log. 0: it is the first."""
    return max((each.end for each in every if each.end <= raised.start), default=0)


def _of_raised(raised: _Raised, folder: str, since: int) -> dict[str, Any]:
    """Return the fields of an excerpt that tell of an exception. since: where the one before it ends."""
    # Another process may have raised the same exception, and sent it as text.
    same = (each for each in raised.chain if each["message"] == raised.message)
    match = next(same, raised.match)
    before = match.string[max(since, raised.start - _LOOK_BACK) : raised.start]
    frames = [*_FRAME.finditer(match["frames"])]
    own = next((frame for frame in reversed(frames) if _is_own(frame, folder)), None)
    message = re.sub(r"\r(?=[^\n])", " ", raised.message)
    chain = dict.fromkeys(
        each["message"] for each in raised.chain if each["message"] != raised.message
    )
    return {
        "before": _plain(_written(before)[-_BEFORE:]),
        "chain": _plain(chain),
        "traceback": _plain([*_shortened(match["frames"], own), message]),
        "exception": _plain([message])[0],
        "place": f"{_below(own['file'], folder)}:{own['line']}" if own else "",
        "part": raised.part,
        "shadow": _below(_shadow(frames, folder), folder),
        "is_consequence": raised.is_consequence,
    }


def _raised_in(text: str) -> list[_Raised]:
    """Return the exceptions in a log; those from which one was raised are in its chain."""
    found: list[_Raised] = []
    for match in _TRACEBACK.finditer(text):
        is_ignored = _IGNORED.search(text, max(0, match.start() - _LOOK_BACK), match.start())
        if match["message"] is None or is_ignored:
            continue
        before = found[-1] if found else None
        between = text[before.end : match.start()] if before else ""
        is_chained = _CHAINED.search(between) is not None or match[0].startswith(_ORIGINAL)
        if before and is_chained:
            found[-1] = _Raised(match, before.start, match.end(), (*before.chain, before.match))
        else:
            found.append(_Raised(match, match.start(), match.end()))
    return found


def _is_own(frame: re.Match[str], folder: str) -> bool:
    """Return whether a frame is in a file of the user. folder: of the program."""
    file = frame["file"]
    is_in_folder = bool(folder) and file.startswith(f"{folder}/")
    return not _LIBRARY.search(file) and (is_in_folder or not _FOREIGN.search(file))


def _shadow(frames: Sequence[re.Match[str]], folder: str) -> str:
    """Return the path of a file of the user that a library imported, in place of a package, or ""."""
    for importing, frame in pairwise(frames):
        is_imported = frame["function"] == "<module>" and not _IMPORTER.search(importing["file"])
        if is_imported and _is_own(frame, folder) and _LIBRARY.search(importing["file"]):
            return frame["file"]
    return ""


def _shortened(frames: str, own: re.Match[str] | None) -> list[str]:
    """Return the head of a traceback, its last frames, and the last frame of the user."""
    head, *each = re.split(r"(?m)^(?=  File )", frames)
    kept = each[-_FRAMES:]
    if own and not any(frame.startswith(own[0]) for frame in kept):
        kept = [next(frame for frame in reversed(each) if frame.startswith(own[0])), *kept]
    return "".join((head, *kept)).strip("\n").split("\n")


def _below(file: str, folder: str) -> str:
    """Return the path of a file below a folder."""
    return file.removeprefix(f"{folder}/") if folder else file


def _written(text: str) -> list[str]:
    """Return the lines of a text that are not blank."""
    return [line for line in text.split("\n") if line.strip().strip("\0")]


def _plain(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(_plain_lines(lines))


def _plain_lines(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        # Of a progress bar, only the last state is shown. Another carriage return is part of a name.
        is_progress = line.count("\r") > _RETURNS
        text = line if is_progress else line.rstrip("\r").replace("\r", "\\r")
        shown = plain_line(text.expandtabs(4))
        is_long = len(shown) > _COLUMNS
        yield (
            f"{shown[: _COLUMNS - _TAIL_COLUMNS]} … {shown[-_TAIL_COLUMNS:]}" if is_long else shown
        )
