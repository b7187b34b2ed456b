"""Errors in a program's log: its tracebacks, or the end of the log.

An exception may be raised while another was handled, or in another process, which passes its
traceback on as text. The message of an exception is searched for causes, not the lines of source
code in the traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple, Self

from clusterctl.util.terminal import plain_line

# Messages of payload/node about staged files and receivers. The program runs in any case.
_ON_THE_WAY: Final = (
    r"^clusterctl: (?:the message \"|messages are sent from "
    r"|\S+: .* (?:leads to .* itself: |has [\d,]+ files? )).*(?:\n|\Z)"
)
# Messages that follow from a failure, or only surround it.
NOISE: Final = (
    (
        r"^-{74}\n(?:An MPI communication peer process|Primary job +terminated normally)"
        r"(?:.*\n)*?-{74}(?:\n|\Z)"
    ),
    r"^-{74}\nMPI_ABORT was invoked(?:.*\n)*?-{74}(?:\n|\Z)",
    r"^-{74}\n(?:mpirun|prterun) (?:noticed|detected|has exited)(?:.*\n)*?-{74}(?:\n|\Z)",
    (
        r"^slurmstepd\S*: error: +(?:mpi/pmix|\*\*\* (?:STEP|JOB) |Detected \d+ oom.kill"
        r"|.*exceeded memory limit).*(?:\n|\Z)"
    ),
    (
        r"^srun: (?:Job step aborted|launch/slurm|Force Terminated|Terminating"
        r"|error: \S+: tasks? \S+: ).*(?:\n|\Z)"
    ),
    (
        r"^\[\S+:\d+\] (?:\d+ more process(?:es)? ha(?:s|ve) sent help"
        r'|Set MCA parameter "orte_base_help_agg).*(?:\n|\Z)'
    ),
    r"^\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH in file \S*pmix_server\.c .*(?:\n|\Z)",
    # torchrun: its log, and its own traceback with its summary
    r"^\[?[WEI]\d{4} .*torch/distributed/(?:elastic|run).*(?:\n|\Z)",
    r"^.*torch\.distributed\.(?:elastic|run)\S*(?:[: ].*)?\[(?:WARNING|ERROR|INFO)\].*(?:\n|\Z)",
    r"^(?:WARNING|ERROR|INFO):torch\.distributed\..*(?:\n|\Z)",
    (
        r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*"
        r"torch\.distributed\.elastic\.multiprocessing\.\S+:.*(?:\n|\Z)"
    ),
    r"^={10,}\n\S+ FAILED\n(?:.*\n)*?={10,}(?:\n|\Z)",
    (
        r"^.*(?:process group has NOT been destroyed"
        r"|Setting OMP_NUM_THREADS environment variable for each).*(?:\n|\Z)"
    ),
    r"^\*{20,}(?:\n|\Z)",
    # messages of payload/node, and of bash about a killed command of clusterctl's script
    (
        r"^clusterctl: (?:hang: |this job is not requeued: |ranks do not end after "
        r"|.*; this job is requeued$).*(?:\n|\Z)"
    ),
    r"^\S*(?:slurm_script|job\.sbatch|job\.mpirun): line \d+: +\d+ [A-Z].*(?:\n|\Z)",
    _ON_THE_WAY,
)
# Exceptions that a rank raises only because another rank has ended.
CONSEQUENCES: Final = (
    r"Connection (?:closed by peer|reset by peer)",
    r"Broken pipe",
    r"remote process exited",
    r"ncclRemoteError",
    r"MPI_ERR_PROC_FAILED",
    r"DistNetworkError.*(?:closed|recv)",
    r"SignalException",
    r"\AKeyboardInterrupt",
)
_FRAMES = 3  # of a traceback
_MESSAGE_LINES = 8  # of an exception
_TAIL_LINES = 10
_MOST_LINES = 200
# A program that writes more lines after an exception has handled the exception.
_LINES_AFTER_ERROR = 25
# The last statements of a log, in which a line may be the program's error.
_LAST_STATEMENTS = 3
_COLUMNS = 400
_LONGEST = 2 * _COLUMNS
_LABEL: Final = re.compile(r"^\[(?:rank|default)\d+\]: ?", re.MULTILINE)
# The margin and the rules of the traceback of an ExceptionGroup.
_MARGIN: Final = re.compile(
    r"^ +(?:\| |\+ Exception Group (?=Traceback )|\+[-+].*$|\|$)", re.MULTILINE
)
_CHAINED: Final = re.compile(r"\n\n(?:During handling of|The above exception was) .*\n\n")
# PyTorch's workers add the traceback of their process to the message of the exception.
_ORIGINAL: Final = re.compile(r"\nOriginal Traceback \(most recent call last\):\n")
# Python reports an exception in __del__ with these lines.
_IGNORED: Final = re.compile(r"^Exception ignored .*\n\Z", re.MULTILINE)
# The quantifiers are possessive, so that hostile logs take no time.
_TRACEBACK: Final = re.compile(
    r"^(?P<frames>(?:Traceback \(most recent call last\):\n)?"
    r"(?:  File .*\n(?:    .*\n|  \[Previous line.*\n)*+)++)"
    r"(?P<message>[A-Za-z_][\w.]*(?:: .*|:)?"
    rf"(?:\n(?!(?:Original )?Traceback|\s*$|\"\"\"$).*){{0,{_MESSAGE_LINES - 1}}})?+"
    r"(?P<remote>\n\"\"\")?",
    re.MULTILINE,
)
_FRAME: Final = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?')
# Python's own modules, and installed packages.
_IMPORTER: Final = re.compile(r"\b(?:runpy|importlib)\b")
# Exceptions that programs raise about their own values.
_OWN: Final = re.compile(
    r"(?:Value|Type|Key|Index|Lookup|Attribute|Assertion|NotImplemented)Error\b"
)
# Lines by which a program reports that it keeps running: by their level, or in words. NCCL writes
# its errors with the level WARN.
_LEVEL: Final = re.compile(
    r"^(?:[\[\d][\w.,:/+| \]-]{0,40}?[\]:,| ] *)?\[?"
    r"(?:(?:WARN(?:ING)?|INFO|DEBUG|NOTICE|TRACE)\b|(?i:warn(?:ing)?|note|hint|info|debug)[:\]]"
    r"|[WI] \S+:|[WI]\d{4} |ok \d+\b|PASS(?:ED)?\b)"
    r"|\"level\": *\"(?i:warn(?:ing)?|info|debug|trace)\"|\blevel=(?i:warn(?:ing)?|info|debug|trace)\b"
    r"|\bNCCL (?:INFO|TRACE)\b|\b(?i:warning): |^\S*\b\w*Warning: |^\S+:\d+: \w*Warning: ",
)
_CONTINUES: Final = re.compile(
    r"\b(?:retry(?:ing)?\b(?! limit)|trying (?:again|another|port|the next)|will (?:try again|retry)"
    r"|fall(?:ing|s) back|skipp(?:ing|ed)|ignor(?:ed|ing)|evict(?:ed|ing)|reconnect(?:ed|ing)"
    r"|disabling|continuing|us(?:ing|e[sd]) (?:the )?(?:cpu|default|\S.* instead))\b",
    re.IGNORECASE,
)
_GIVES_UP: Final = re.compile(
    r"\b(?:giv(?:es?|ing) up|gave up|exceeded|exhausted|fatal|abort(?:s|ed|ing)?|exiting|cannot "
    r"continue)\b",
    re.IGNORECASE,
)
# An exception that a program of Python wrote as text.
_PRINTED: Final = re.compile(
    r"(?<![\w.])(?!java\.)(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::| ?\[|\(|$)"
)
# Python ends with this exit code at an uncaught exception. make and xargs end with
# another, if a command fails.
UNCAUGHT = 1
_OF_XARGS = 123
_MAKE_FAILED: Final = re.compile(rf"^\S*make(?:\[\d+\])?: \*\*\* .*Error {UNCAUGHT}$", re.MULTILINE)
# C++ aborts so while Python, which an exception has ended, stops its threads.
_ABORTED_AT_EXIT: Final = re.compile(
    r"^terminate called (?:without an active exception|recursively)", re.MULTILINE
)
_SHELL: Final = re.compile(r"#!.*\b(?:ba|da|k|z|c|tc|fi)?sh\b")
# Python's own lines before the traceback of an exception that ends a part of a program: threading,
# multiprocessing, atexit, asyncio.
_PART_ENDED: Final = re.compile(
    r"^(?:Exception in (thread .+):|(Process \S+):|Exception ignored in (atexit callback)\b.*"
    r"|Error in (atexit)\._run_exitfuncs:|(Task) exception was never retrieved\nfuture: .*)\n"
    r"(?=Traceback \(most recent call last\):\n)",
    re.MULTILINE,
)
# Words around an error's name in a sentence about the error.
_PHRASE_BEFORE: Final = re.compile(
    r"(?i)\b(?:no|without|never|if|whether|in case of|says|said) [\"'`]?$"
)
_PHRASE_AFTER: Final = re.compile(
    r"[\"'`]? (?:is|was|are|were|means|would|will|could|can|may|might|should|happens)\b"
)
# A last line by which a shell or a command reports that it failed.
_COMMAND_FAILED: Final = re.compile(
    r": command not found$|^\S+: \*\*\* .*Error \d+$"
    r"|^\S+: line \d+: +\d+ (?:Segmentation fault|Aborted|Killed|Bus)"
    r"|^[\w./+-]+: .*: (?:No such file or directory|Permission denied|No space left on device)$"
    r"|^(?:[\w./+-]+: )?(?i:fatal|(?:fatal )?error): "
)
# Commands that bash and zsh show with `set -x`.
_TRACED: Final = re.compile(r"^\++(?:\S*:\d+>)? \S.*$", re.MULTILINE)
# Lines after a traceback with which a log still ends with the traceback.
_REMARKS = 3
# Indented lines belong to the line above. wandb writes a summary after an exception, and Python
# ignores exceptions of objects that it removes at the end.
_NO_STATEMENT: Final = re.compile(r"\s|$|wandb: |Exception ignored |-{20,}$|={20,}$")
# What launchers, make, `time` and libraries write after an exception has ended a program.
_ABOUT_END: Final = re.compile(
    r"(?i)error|fail|exit|abort|warn|terminat|kill|^(?:real|user|sys)\b|^(?:srun|mpirun|clusterctl):"
)
_BANNER: Final = re.compile(r"^-{70,}\n(?:.*\n){1,60}?-{70,}$", re.MULTILINE)
_LIBRARY: Final = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|^<frozen ")


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a traceback: its place, and its lines in the log."""

    file: str
    line: str
    function: str
    shown: tuple[str, ...]

    @property
    def is_own(self) -> bool:
        """Whether the frame belongs to the program, not to a library."""
        return _LIBRARY.search(self.file) is None


@dataclass(frozen=True, slots=True)
class Traceback:
    """An exception with its frames. ``is_remote``: another process raised it, and sent it as
    text.
    """

    head: tuple[str, ...]
    frames: tuple[Frame, ...]
    message: str
    is_remote: bool

    @classmethod
    def of(cls, match: re.Match[str], *, is_remote: bool) -> Self:
        lines = match["frames"].splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("  File ")]
        frames = []
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
            place = _FRAME.match(lines[start])
            fields = place.groupdict("") if place else {"file": "", "line": "", "function": ""}
            frames.append(Frame(**fields, shown=tuple(lines[start:end])))
        # A carriage return inside a message would hide the exception's name.
        message = re.sub(r"\r(?=[^\n])", " ", match["message"])
        return cls(tuple(lines[: starts[0]]), tuple(frames), message, is_remote)

    @property
    def own_frame(self) -> Frame | None:
        """The last frame of the program."""
        return next((frame for frame in reversed(self.frames) if frame.is_own), None)

    @property
    def shown(self) -> list[str]:
        """The last frames and the message. The program's last frame is always among them."""
        last = self.frames[-_FRAMES:]
        own = self.own_frame
        frames = last if own is None or own in last else (own, *last)
        return [
            *self.head,
            *(line for frame in frames for line in frame.shown),
            *self.message.split("\n"),
        ]

    @property
    def shadow(self) -> str:
        """Path of a file of the program that a library imported, in place of a package, or ""."""
        for importing, frame in pairwise(self.frames):
            is_imported = frame.function == "<module>" and not _IMPORTER.search(importing.file)
            if is_imported and frame.is_own and not importing.is_own:
                return frame.file
        return ""


@dataclass(frozen=True, slots=True)
class ProgramError:
    """Error message of a program. ``shown`` is shown to the user.

    text: the messages of the tracebacks, or the end of the log. evidence: the same text, with
        blanks in place of lines that are not the error; it is searched for causes.
    tracebacks: the exception to report, then the exceptions before and after it. Empty: the end of
        a log.
    is_consequence: whether the end of another rank raised the exception.
    is_own: whether all exceptions in ``text`` are of types that no call of the system raises.
    """

    text: str
    evidence: str
    shown: tuple[str, ...]
    tracebacks: tuple[Traceback, ...] = ()
    is_consequence: bool = False
    is_own: bool = False

    @property
    def own_frame(self) -> Frame | None:
        """The last frame of the program, preferably in the reported exception."""
        frames = (traceback.own_frame for traceback in self.tracebacks)
        return next((frame for frame in frames if frame is not None), None)

    @property
    def source(self) -> tuple[str, ...]:
        """The lines of source code in the tracebacks."""
        frames = (frame for traceback in self.tracebacks for frame in traceback.frames)
        return tuple(line.strip() for frame in frames for line in frame.shown)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of the log that may be the error."""
        return tuple([line for line in self.evidence.split("\n") if line.strip()][-_MESSAGE_LINES:])

    @property
    def shadow(self) -> str:
        return next((traceback.shadow for traceback in self.tracebacks if traceback.shadow), "")


@dataclass(frozen=True, slots=True)
class End:
    """How the program ended, as evidence of whether an exception ended it.

    exit_code: None or 0: unknown, or not the program's own. signal: a name such as SIGSEGV, or "".
    is_abort: whether the program called MPI_Abort, with an exit code that it chose.
    is_ordered: whether the job's log is a single stream. Otherwise the order of its lines is
        unknown.
    """

    exit_code: int | None = None
    signal: str = ""
    is_abort: bool = False
    is_ordered: bool = True

    @classmethod
    def of(
        cls,
        exit_code: int | None,
        signal: str,
        *,
        log: str,
        script: str,
        is_ordered: bool,
    ) -> Self:
        """Return the end of a program.

        log: with the launcher's messages. script: text of the job's script, or "".
        """
        is_of_command = exit_code == _OF_XARGS or _MAKE_FAILED.search(log) is not None
        is_of_script = (
            re.search(rf"^[^#\n]*\bexit +{exit_code}\b", script, re.MULTILINE) is not None
        )
        is_at_exit = signal == "SIGABRT" and _ABORTED_AT_EXIT.search(log) is not None
        code = None if is_of_command or (is_shell(script) and is_of_script) else exit_code
        return cls(code, "" if is_at_exit else signal, "MPI_ABORT was invoked" in log, is_ordered)

    @property
    def is_by_exception(self) -> bool:
        """Whether an uncaught exception can end a program so."""
        return not self.signal and self.exit_code in {None, 0, UNCAUGHT}

    def is_caused_by(self, message: str, rest: str, *, is_shared: bool) -> bool:
        """Return whether an exception is the end of the program.

        message: of the exception, perhaps with the next lines of the log. rest: the log after it.
        is_shared: whether several ranks write to the log.
        """
        is_interrupt = self.signal == "SIGINT" and message.startswith("KeyboardInterrupt")
        is_by_exception = self.is_by_exception or is_interrupt
        if is_shared and (is_by_exception or self.signal):
            return True
        if self.signal in {"SIGKILL", "SIGTERM"}:
            return False
        lines = (*message.split("\n")[1:], *_TRACEBACK.sub("", rest).split("\n"))
        later = [line for line in lines if not _NO_STATEMENT.match(line)]
        if not is_by_exception:
            return not later and (self.is_ordered or self.is_abort)
        return len(later) <= _LINES_AFTER_ERROR and not any(map(_goes_on, later))


def find_error(
    rank_log: str | None,
    job_log: str,
    *,
    show_noise: bool,
    is_shared: bool,
    end: End,
) -> ProgramError:
    """Return the last exception that is not a consequence of another rank's end, or the end of the
    log.

    rank_log: log of the rank that failed first, if it exists. It is searched before ``job_log``,
        and messages of other ranks about this rank's end are ignored.
    show_noise: use the launcher's messages if the logs have no other text.
    is_shared: whether several ranks write to a log, so that lines after an error may be of other
        ranks.
    end: how the program ended. A rank's own log is a single stream.
    """
    rank = _read_log(rank_log or "", replace(end, is_ordered=True), is_shared=is_shared)
    if rank.primary:
        return _error_of(rank.primary[-1], is_consequence=False)
    job = _read_log(job_log, end, is_shared=is_shared)
    if job.primary:
        return _error_of(job.primary[-1], is_consequence=False)
    # No exception is better than the consequence of another rank's end.
    is_last_resort = rank_log is None or _TRACEBACK.search(rank.text) is not None
    if job.chains and is_last_resort:
        return _error_of(job.chains[-1], is_consequence=True)
    if rank_log is not None and rank.is_empty:
        return _end_of_others(job.text)
    if not rank.is_empty:
        return _end_of_log(rank, end, is_shared=is_shared)
    if job.is_empty and show_noise:
        shown = compiled(_ON_THE_WAY).sub("", job_log)
        return _end_of_log(_Log(shown, shown, is_ordered=True), end, is_shared=is_shared)
    return _end_of_log(job, end, is_shared=is_shared)


@dataclass(frozen=True, slots=True)
class _Log:
    """A log without the launcher's messages.

    unhandled: the text with blanks in place of the tracebacks that did not end the program, and of
        the commands that `set -x` shows.
    chains: the exceptions that ended the program, each with those from which it was raised.
    """

    text: str
    unhandled: str
    is_ordered: bool
    chains: Sequence[Sequence[Traceback]] = ()

    @property
    def is_empty(self) -> bool:
        return not self.text.strip()

    @property
    def primary(self) -> Sequence[Sequence[Traceback]]:
        """The chains that are not a consequence of another rank's end."""
        return [chain for chain in self.chains if not _is_consequence(chain[-1].message)]


def _is_consequence(message: str) -> bool:
    return compiled("|".join(CONSEQUENCES)).search(message) is not None


def _read_log(log: str, end: End, *, is_shared: bool) -> _Log:
    text = _without_noise(log)
    searched = _TRACED.sub(lambda line: " " * len(line[0]), text)
    unhandled = searched
    for match in _TRACEBACK.finditer(searched):
        if _is_ignored(searched, match):
            unhandled = _without_traceback(unhandled, match.start(), match.end())
    chains: list[Sequence[Traceback]] = []
    start = 0
    for stop, chain in _chains(searched):
        if not end.is_caused_by(chain[-1].message, searched[stop:], is_shared=is_shared):
            unhandled = _without_traceback(unhandled, start, stop)
        elif not chains or not _tells_of(chains[-1][-1], chain[-1].message, searched[start:stop]):
            chains.append(chain)
        start = stop
    return _Log(text, unhandled, end.is_ordered, chains)


def _tells_of(child: Traceback, message: str, text: str) -> bool:
    """Return whether an exception only says that a child has failed, which wrote its own before.

    message: of the exception. text: what the log has between the end of the child's and its end.
    """
    # Otherwise the child's message may have taken the next lines of the log.
    is_whole = "\n" not in child.message.strip()
    is_next = text.lstrip().startswith("Traceback (most recent call last):")
    return is_whole and is_next and message.startswith("subprocess.CalledProcessError: ")


def _end_of_others(job_text: str) -> ProgramError:
    """Return the end of the job's log as the error of a rank that wrote nothing."""
    lines = _TRACEBACK.sub("", job_text).split("\n")
    own_lines = [line for line in lines if not _is_consequence(line)]
    text = "\n".join(own_lines[-_MOST_LINES:])
    return ProgramError(text, _without_handled(text), ())


def _end_of_log(log: _Log, end: End, *, is_shared: bool) -> ProgramError:
    pairs = zip(log.text.split("\n"), log.unhandled.split("\n"), strict=True)
    last = [(line, unhandled) for line, unhandled in pairs if line.strip()][-_MOST_LINES:]
    lines = [line for line, _ in last]
    unhandled_lines = [unhandled for _, unhandled in last]
    if not end.is_by_exception and not is_shared:
        unhandled_lines = _without_printed(unhandled_lines, is_ordered=log.is_ordered)
    most = _MOST_LINES if is_shared else _LAST_STATEMENTS
    evidence = _without_handled("\n".join(unhandled_lines), most=most)
    return ProgramError("\n".join(lines), evidence, tuple(_shown_lines(lines[-_TAIL_LINES:])))


def _without_printed(lines: Sequence[str], *, is_ordered: bool) -> list[str]:
    """Return the lines with blanks in place of exceptions that the program printed.

    is_ordered: whether the last line is the program's last word, and so may be its error.
    """
    statements = [number for number, line in enumerate(lines) if not _NO_STATEMENT.match(line)]
    last_word = statements[-1] if is_ordered and statements else None
    return [
        " " * len(line) if _PRINTED.search(line) and number != last_word else line
        for number, line in enumerate(lines)
    ]


def goes_on_after(log: str, error: ProgramError) -> bool:
    """Return whether a log has lines after the reported exception that are not about its end."""
    if not error.tracebacks:
        return False
    # A message may have taken the next lines of the log.
    _, found, rest = log.rpartition(error.tracebacks[0].message.partition("\n")[0])
    rest = _TRACEBACK.sub("", _without_noise(rest))
    return bool(found) and not all(
        _NO_STATEMENT.match(line) or _ABOUT_END.search(line) for line in rest.split("\n")
    )


class LastError(NamedTuple):
    """The error with which a log ends, as a line. log: "log", or "stderr" or "stdout" if there are
    both. part: the part of the program that ended by it, such as a thread; the program went on.
    """

    line: str
    log: str
    part: str = ""


def is_shell(script: str) -> bool:
    """Return whether a script is one of a shell, by its first line."""
    return _SHELL.match(script) is not None


def error_at_end(stdout: str, stderr: str, *, is_shell: bool) -> LastError | None:
    """Return the exception that ended a part of the program of a COMPLETED job, such as a thread;
    else the error with which the job's log ends: that of a traceback, or of a command.

    is_shell: whether the job's program is a shell script, which goes on after a failed command.
        Another program has handled an error that is not the last that it wrote.
    """
    texts = {
        name: _without_noise(without_long_lines(text))
        for name, text in (("stderr", stderr), ("stdout", stdout))
    }
    written = [name for name, text in texts.items() if text.strip()]
    for name in written:
        if (begin := _PART_ENDED.search(texts[name])) and (
            chain := _first_chain(texts[name], begin)
        ):
            part = next(filter(None, begin.groups()))
            return LastError(
                plain_line(chain[-1].message.partition("\n")[0]), name, plain_line(part)
            )
    if len(written) > 1 and not is_shell:
        return None
    for name in written:
        if line := _last_error(texts[name], remarks=_REMARKS if is_shell else 0):
            return LastError(line, name if len(written) > 1 else "log")
    return None


def part_ended(text: str, error: ProgramError) -> str:
    """Return the part of the program that the reported exception ended, such as a thread; "": the
    whole program, or unknown.
    """
    messages = {traceback.message.partition("\n")[0] for traceback in error.tracebacks[:1]}
    for begin in _PART_ENDED.finditer(text):
        chain = _first_chain(text, begin)
        if chain and chain[-1].message.partition("\n")[0] in messages:
            return plain_line(next(filter(None, begin.groups())))
    return ""


def _first_chain(text: str, begin: re.Match[str]) -> list[Traceback]:
    """Return the exceptions of the traceback that follows a line of a log; [] if there is none."""
    return next((chain for _, chain in _chains(text[begin.end() :])), [])


def _last_error(text: str, *, remarks: int) -> str:
    """Return the error with which a log ends, or "". remarks: number of lines that may come after
    it.
    """
    chains = [*_chains(text)]
    if chains:
        end, chain = chains[-1]
        error, *more = chain[-1].message.split("\n")
        after = [line for line in (*more, *text[end:].split("\n")) if line.strip()]
        if len(after) <= remarks and not any(map(_goes_on, after)):
            return plain_line(error)
    last = next((line for line in reversed(text.split("\n")) if line.strip()), "")
    is_error = _COMMAND_FAILED.search(last) and not _LEVEL.search(last)
    return plain_line(last.strip()) if is_error else ""


def _goes_on(line: str) -> bool:
    """Return whether the program says in a line that it keeps running."""
    return _CONTINUES.search(line) is not None and _GIVES_UP.search(line) is None


def _without_traceback(text: str, start: int, end: int) -> str:
    """Return the text with blanks in place of the tracebacks between ``start`` and ``end``."""
    for match in _TRACEBACK.finditer(text, start, end):
        if match["message"] is not None:
            stop = match.start("message") + len(match["message"].partition("\n")[0])
            blank = re.sub(r"[^\n]", " ", text[match.start() : stop])
            text = text[: match.start()] + blank + text[stop:]
    return text


def _without_handled(text: str, most: int = _MOST_LINES) -> str:
    """Return the end of a log with blanks in place of the lines after which the program kept
    running.

    most: number of lines at the end that may hold the error. A banner of a launcher counts as a
        line.
    """
    lines = text.split("\n")
    starts = {
        text.count("\n", 0, match.start()): match[0].count("\n") for match in _BANNER.finditer(text)
    }
    in_banners = {
        number for start, count in starts.items() for number in range(start + 1, start + count + 1)
    }
    seen = 0
    was_ignored = False
    for number in reversed(range(len(lines))):
        line = lines[number]
        is_handled = (
            (was_ignored and not _NO_STATEMENT.match(line)) or _LEVEL.search(line) or _goes_on(line)
        )
        # make writes so after the error of a command.
        was_ignored = line.endswith("(ignored)")
        if is_handled or seen >= most:
            lines[number] = " " * len(line)
        elif number in starts or (number not in in_banners and not _NO_STATEMENT.match(line)):
            seen += 1
    return "\n".join(lines)


def _error_of(chain: Sequence[Traceback], *, is_consequence: bool) -> ProgramError:
    # The program raised its exception in another process.
    main = next((traceback for traceback in reversed(chain) if traceback.is_remote), chain[-1])
    tracebacks = (main, *(traceback for traceback in reversed(chain) if traceback is not main))
    # A statement other than `raise` failed by itself, so the exceptions before it had been handled.
    last = [line.strip() for line in main.frames[-1].shown[1:]]
    is_new = (
        bool(last)
        and not any(re.search(r"\braise\b", line) for line in last)
        and not main.is_remote
    )
    messages = [traceback.message for traceback in (tracebacks[:1] if is_new else tracebacks)]
    is_own = all(_OWN.match(message) for message in messages)
    said = "\n".join(messages)
    shown = tuple(_shown_lines(main.shown))
    return ProgramError(said, said, shown, tracebacks, is_consequence, is_own)


def _is_ignored(text: str, traceback: re.Match[str]) -> bool:
    """Return whether Python has ignored an exception, such as one in __del__."""
    begin = max(0, traceback.start() - _LONGEST)
    return _IGNORED.search(text, begin, traceback.start()) is not None


def _chains(text: str) -> Iterator[tuple[int, list[Traceback]]]:
    """Yield (end in the text, list of exceptions).

    A list holds an exception and the exceptions from which it was raised.
    """
    chain: list[Traceback] = []
    end = 0
    for match in _TRACEBACK.finditer(text):
        # No exception, or an exception that did not end the program.
        if match["message"] is None or _is_ignored(text, match):
            continue
        between = text[end : match.start()]
        is_original = bool(chain) and _ORIGINAL.match(text, end) is not None
        if chain and not is_original and not _CHAINED.fullmatch(between):
            yield end, chain
            chain = []
        traceback = Traceback.of(match, is_remote=is_original or match["remote"] is not None)
        # The original exception came before the exception with its text.
        chain.insert(len(chain) - is_original, traceback)
        end = match.end()
    if chain:
        yield end, chain


def _shown_lines(lines: Iterable[str]) -> Iterator[str]:
    return (plain_line(line)[-_COLUMNS:] for line in lines)


def without_long_lines(text: str) -> str:
    """Return the text without PyTorch's ``[rank0]: `` labels and without the middle of very long
    lines.

    Tracebacks in an ExceptionGroup become separate tracebacks.
    """
    text = _LABEL.sub("", text)
    if "Exception Group Traceback" in text:
        text = _MARGIN.sub("", text)
    lines = text.split("\n")
    return "\n".join(
        line if len(line) <= _LONGEST else line[:_COLUMNS] + line[-_COLUMNS:] for line in lines
    )


def _without_noise(text: str) -> str:
    for pattern in NOISE:
        text = compiled(pattern).sub("", text)
    return text


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern, in which ^ and $ match at lines. It is compiled at its first use,
    because most commands diagnose no job.
    """
    return re.compile(pattern, re.MULTILINE)


def search(patterns: Iterable[str], text: str) -> re.Match[str] | None:
    """Return the first match of the first pattern that matches more than a phrase in a sentence."""
    matches = (match for pattern in patterns for match in compiled(pattern).finditer(text))
    return next((match for match in matches if not is_phrase(match)), None)


def is_phrase(match: re.Match[str]) -> bool:
    """Return whether an error's name is only a phrase in a sentence."""
    text = match.string
    start = text.rfind("\n", 0, match.start()) + 1
    before = text[max(start, match.start() - _COLUMNS) : match.start()]
    return bool(_PHRASE_BEFORE.search(before) or _PHRASE_AFTER.match(text, match.end()))
