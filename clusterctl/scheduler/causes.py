"""Causes of failed jobs whose evidence is more than a pattern in a log. See data/causes.toml for
the others.

Each function looks at the facts of a job, and returns an explanation, or None if its cause does not
apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.failed_rank import Failed
from clusterctl.scheduler.program_error import ProgramError, is_phrase, search
from clusterctl.spec.sbatch import values_in

# Returns placeholder -> text for a file of this machine (see ``LocalFiles.find``).
FindHere = Callable[[str], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job failed.

    match: the text in the log's evidence that shows it, if it is in the log.
    failed: the rank that failed first, if it is another than in ``FailedJob``.
    """

    code: str
    cause: str
    fix: str
    match: re.Match[str] | None = None
    failed: Failed | None = None


@dataclass(frozen=True, slots=True)
class FailedJob:
    """The facts of a failed job that the functions read.

    raw: the job's log with the launcher's messages. at: the place of the failure, " in rank 1 on
        n2" or "".
    left_here: searches this machine for a file that the job did not find.
    excluded: " and without --exclude PATTERN" if --exclude was used, or "".
    ended: ranks with a record of how they failed. script: the text of the job's script, or "".
    port: MASTER_PORT, or 0 if it is unknown.
    """

    job: JobInfo
    failed: Failed
    raw: str
    error: ProgramError
    at: str
    left_here: FindHere
    excluded: str
    ended: Collection[int]
    script: str
    port: int


# --- Input ---------------------------------------------------------------------------------------
# A prompt at the end of a line, and what programs say if nobody can answer.
_PROMPT = r"(?:\[[Yy]/[Nn]\]|\((?:yes/no|y/n|Y/n|y/N|\[y\]/n)[^)\n]*\))[?:]* *"
_NO_INPUT: Final = re.compile(
    r"^EOFError: EOF when reading a line$"
    r"|could not read (?:Username|Password) for .*: (?:No such device or address|terminal prompts disabled)"
    r"|^sudo: a (?:terminal|password) is required"
    r"|^Host key verification failed\.$"
    # The program gave up at the prompt, or the prompt is the last that it wrote.
    rf"|{_PROMPT}(?:Abort(?:ed)?[.!]?|Exiting\.?)$|{_PROMPT}\s*\Z"
    r"|^the input device is not a TTY|/dev/tty.*: No such device or address"
    r"|^(?:EOFError|CondaSystemExit|click\.exceptions\.Abort)\b.*$",
    re.MULTILINE,
)
_ASKS: Final = re.compile(
    r"\b(?:input|getpass|prompt|confirm|ask|tcgetattr|raw_input)\s*\(", re.IGNORECASE
)
_NO_TERMINAL: Final = re.compile(
    r"^(?:termios\.error|OSError): .*Inappropriate ioctl for device", re.MULTILINE
)
_HOST_KEY: Final = "Host key verification failed."
_ANSWER: Final = (
    "answer in advance: with an option such as --yes, a variable, or `yes | PROGRAM` in the script"
)


def no_input(facts: FailedJob) -> Explanation | None:
    """A program asked a question. Evidence: its prompt is the end of the log, or a call that reads
    failed.
    """
    match = search([_NO_INPUT], facts.error.evidence)
    if match is not None and match[0].startswith(("EOFError", "CondaSystemExit", "click")):
        # Files have ends, too.
        is_asking = (
            any(_ASKS.search(line) for line in facts.error.source) or not facts.error.tracebacks
        )
        match = match if is_asking else None
    if match is None and any(
        "tcgetattr" in line or "getpass" in line for line in facts.error.source
    ):
        match = _NO_TERMINAL.search(facts.error.evidence)
    if match is None:
        return None
    fix = _ANSWER
    if match[0] == _HOST_KEY:
        fix = (
            "accept the host's key before: run ssh once in `clusterctl ssh`, or use ssh-keyscan "
            "in the script"
        )
    return Explanation(
        "no-input",
        f"the program asks a question{facts.at}, and a job has no input: nobody can answer",
        fix,
        match,
    )


# A `read` of the script's own input: not in a loop or a pipe, and without a file.
_READ: Final = re.compile(
    r"^[ \t]*(?:if +)?(?:! +)?(?:IFS=\S* +)?read\b(?![^\n]*(?:<| -\w*[ut]))[^\n]*$", re.MULTILINE
)
_ENDS_AT_ERROR: Final = re.compile(
    r"^[ \t]*set +-(?:\w*e|o +errexit)|^#!.* -\w*e|\bread\b[^\n]*\|\| *\{?[^\n]*\bexit\b",
    re.MULTILINE,
)


def unanswered_read(facts: FailedJob) -> Explanation | None:
    """`read` fails without input, and bash prints no prompt. Evidence: the script as it was
    sent.
    """
    match = _READ.search(facts.script)
    if match is None or facts.failed.exit_code != 1 or _ENDS_AT_ERROR.search(facts.script) is None:
        return None
    line = facts.script.count("\n", 0, match.start()) + 1
    return Explanation(
        "no-input",
        f"exit code 1{facts.at}: line {line} of the script waits for an answer (`read`), "
        "and a job has no input",
        _ANSWER,
    )


# --- Files ---------------------------------------------------------------------------------------
_NO_FILE = r"[Nn]o such file or directory"
_OPEN = r"['\"`\u2018]"
_CLOSE = r"['\"\u2019]"
_NAME = r"(?P<file>[^'\"`\u2018\u2019\n]+)"
# The name of the file in messages about a missing file, from the most to the least certain form.
_NAMED: Final = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"(?P<file>[^'\":\s]+) cannot be read: {_NO_FILE}",
        rf"can't open file {_OPEN}{_NAME}{_CLOSE}",
        # coreutils, Fortran, awk
        rf"{_OPEN}{_NAME}{_CLOSE}(?: for \w+)?: (?:\[Errno 2\] )?{_NO_FILE}",
        rf"^tar: (?P<file>[^\n]+): Cannot \w+: {_NO_FILE}",
        # Python
        (
            rf"(?:{_NO_FILE}|[Ff]ile [Nn]ot [Ff]ound|non-existent "
            rf"directory)[^\n'\"]*{_OPEN}{_NAME}{_CLOSE}"
        ),
        # C++
        rf"{_NO_FILE} \[(?P<file>[^\]\n]+)\]",
        # Go
        (
            r"\b(?:open|stat|lstat|chdir|mkdir|readlink|remove) (?P<file>\S+): no such file or "
            r"directory"
        ),
        # bash and sh
        rf"^\S+: line \d+: (?:cd: )?(?P<file>[^:\n]+): {_NO_FILE}",
        (
            rf"^\S+: \d+: (?:\.: |cd: )?(?:cannot (?:open|create) |can't cd to "
            rf")?(?P<file>[^:\n]+): {_NO_FILE}"
        ),
        # PROGRAM: FILE, and paths
        rf"^\S+: (?P<file>[^'\":\s]+): (?:\[Errno 2\] )?{_NO_FILE}",
        rf"(?<![^'\":\s])(?P<file>[^'\":\s]*[^'\":\s.]/[^'\":\s]*|/[^'\":\s]+|\.{{1,2}}/[^'\":\s]+"
        rf"|[^'\":\s]+\.\w{{1,8}}): (?:\[Errno 2\] )?{_NO_FILE}",
    )
)
_UNNAMED: Final = re.compile(_NO_FILE)
# Words before the message that are the name of a call or of nothing.
_CALLS: Final = re.compile(
    r"(?:f?open(?:at|dir)?|l?stat|access|ch(?:dir|mod|own)|exec\w*|connect|bind|mmap|read(?:link)?|write"
    r"|unlink|rename|mkdir|rmdir|fail(?:ed|ure)|[Ee]rror|fatal|file|reading|writing|main|perror)(?:\(\))?"
)


def _missing_name(error: ProgramError) -> tuple[str, re.Match[str]] | None:
    """Return the file that the error names as missing, "" if the message has no name; None: no such
    error.
    """
    for pattern in _NAMED:
        for match in pattern.finditer(error.evidence):
            if not _CALLS.fullmatch(match["file"]) and not is_phrase(match):
                return match["file"], match
    unnamed = search([_UNNAMED], error.evidence)
    return ("", unnamed) if unnamed is not None else None


# What sbatch writes for a letter after % in the name of a log. For other letters, see
# ``_log_pattern``.
_LOG_NAMES: Final = {"x": r"[^/]*", "N": r"[^/]*", "n": r"\d+", "%": "%"}


def _log_pattern(log: str) -> str:
    """Return a regular expression for the paths that sbatch makes of a value of --output."""
    parts = re.split(r"%\d*([A-Za-z%])", log)
    fields = (_LOG_NAMES.get(letter, r"\w+") for letter in parts[1::2])
    texts = map(re.escape, parts[::2])
    pattern = "".join(text + field for text, field in zip(texts, (*fields, ""), strict=True))
    return rf"(?:\./)?{pattern.removeprefix(re.escape('./'))}"


def log_has_another_path(facts: FailedJob) -> Explanation | None:
    """The script reads its own log. Evidence: the missing file fits the path in a line of the
    script.
    """
    found = _missing_name(facts.error)
    if found is None or not found[0]:
        return None
    file, match = found
    for option, log in values_in(facts.script.split("\n"), "--output", "--error").items():
        if re.fullmatch(_log_pattern(log), file):
            return Explanation(
                "log-has-another-path",
                f"no file {file}{facts.at}: clusterctl writes the job's log to a file of its "
                f"own, so that the script's {option} has no effect",
                "`clusterctl logs` shows the log; if the script needs the file, redirect into "
                "it, as in `PROGRAM > FILE`",
                match,
            )
    return None


def file_stayed_at_home(facts: FailedJob) -> Explanation | None:
    """A file that is missing in the job exists on this machine, and was not sent."""
    found = _missing_name(facts.error)
    if found is None or not found[0]:
        return None
    file, match = found
    here = facts.left_here(file)
    if inside := here.get("inside"):
        return Explanation(
            "file-in-program-folder",
            f"no file {file}{facts.at}: it was sent, and is {inside} in the folder of the program",
            'find the script\'s folder with `dirname "$0"` or $SLURM_SUBMIT_DIR: the script that Slurm knows '
            "(`scontrol show job`) is clusterctl's",
            match,
        )
    if venv := here.get("venv"):
        return Explanation(
            "virtual-environment-not-sent",
            f"no file {file}{facts.at}: virtual environments are not sent with jobs",
            f"remove the line with {venv} from the script, and submit with --requirements "
            "requirements.txt (such a file: pip freeze)",
            match,
        )
    return _stayed(facts, file, here, match)


def _stayed(
    facts: FailedJob, file: str, here: Mapping[str, str], match: re.Match[str] | None
) -> Explanation | None:
    if home := here.get("home"):
        return Explanation(
            "file-stayed-at-home",
            f"no file {file}{facts.at}: it exists on your machine, but was not sent with the job",
            f"submit with --include {home}{facts.excluded}",
            match,
        )
    if above := here.get("above"):
        return Explanation(
            "file-stayed-at-home",
            f"no file {file}{facts.at}: it exists in {above} on your machine, and that folder "
            "was not sent",
            f"submit with --folder {above}",
            match,
        )
    return None


# A program's own message about data that it did not find, and the paths in it.
_LACKS: Final = re.compile(
    r"\bno (?:\w+ ){1,4}?(?:in|at|under|below|for|found|matching|match)\b|\bno such\b|\bnot (?:found|exist)"
    r"|\b(?:does|do|did)(?: not|n't) (?:exist|find|contain)|\bmissing\b|\bempty\b|\bfound 0\b"
    r"|\b(?:(?:could|can)(?: ?not|n?'t)|unable to) (?:find|open|read|load)"
    r"|\b0 (?:files|samples|images|examples|rows)\b",
    re.IGNORECASE,
)
_PATH: Final = re.compile(r"[^\s'\"`\u2018\u2019<>|,;()\[\]{}]+")
_MOST_PATHS = 20


def data_stayed_at_home(facts: FailedJob) -> Explanation | None:
    """The program itself says that it found no data at a path. The path exists here, and was not
    sent.
    """
    text = facts.error.evidence if facts.error.tracebacks else "\n".join(facts.error.last_lines)
    for line in text.split("\n"):
        # The message of a shell names the script, and lacks a program.
        if _LACKS.search(line) and "command not found" not in line:
            for path in _paths(line):
                here = facts.left_here(path)
                if partly := here.get("partly"):
                    return Explanation(
                        "file-stayed-at-home",
                        f"the program found nothing in {path}{facts.at}: some of the files in it "
                        "on your machine were not sent with the job",
                        f"submit with --include {partly}{facts.excluded}",
                    )
                if found := _stayed(facts, path, here, None):
                    return found
    return None


def _paths(line: str) -> Iterator[str]:
    """Yield the words of a line that may be paths. For a pattern such as data/*.txt, yield its
    folder.
    """
    quoted = re.findall(r"['\"`\u2018]([^'\"`\u2018\u2019\n]+)['\"\u2019]", line)
    words = (word.rstrip(".:,!?") for word in (*quoted, *_PATH.findall(line)))
    for word in [word for word in words if "/" in word.strip("/") or word in quoted][:_MOST_PATHS]:
        fixed = re.split(r"[^/]*[*?\[]", word, maxsplit=1)[0].rstrip("/")
        if fixed and fixed not in (".", ".."):
            yield fixed


def missing_file(facts: FailedJob) -> Explanation | None:
    """A file is missing, and this machine has no such file either."""
    if (found := _missing_name(facts.error)) is None:
        return None
    file, match = found
    if not file:
        return Explanation(
            "missing-file",
            f"a file does not exist{facts.at}; the message does not name it",
            "look for the file's name in the log's lines before the message, or in the program",
            match,
        )
    return Explanation(
        "missing-file",
        f"no such file{facts.at}: {file}",
        "use the path of the file on the cluster; upload data with `clusterctl put`, and files "
        "in the script's folder with --include",
        match,
    )


# --- Launchers -----------------------------------------------------------------------------------
_LAUNCHERS = r"(?:mpirun|mpiexec|prterun|orterun|prted|orted)"
_CRASHED: Final = re.compile(
    rf"^\S+: line \d+: +\d+ (?:Segmentation fault|Aborted|Bus error)\s[^\n]*?\b(?P<what>{_LAUNCHERS})\b"
    rf"|^\[[^\]\n]+\] \[ ?\d+\] (?:\S*/)?(?P<what2>{_LAUNCHERS}|lib(?:prrte|open-rte)\.so[\w.]*)\(",
    re.MULTILINE,
)


def launcher_crashed(facts: FailedJob) -> Explanation | None:
    """mpirun itself crashed. Evidence: bash names it as the crashed process, or it is in the
    stack.
    """
    if facts.failed.rank is not None or not facts.failed.signal:
        return None
    if (match := _CRASHED.search(facts.raw)) is None:
        return None
    what = match["what"] or "mpirun"
    return Explanation(
        "launcher-crashed",
        f"{what} itself crashed ({facts.failed.signal}){facts.at}, not the program that it started",
        "submit again; if it crashes again, start the ranks with srun (--launcher srun), or use "
        "another MPI",
    )


# Messages of MPI_Init. A server also says PMIX_ERR_UNREACH if a rank ended without MPI_Finalize.
_NO_PMIX: Final = re.compile(
    r"PMIx? (?:server|client).*(?:unreachable|fail)|PMIX_ERR(?!_UNREACH in file \S*pmix_server\.c)"
    r"|PMI server not found|OPAL ERROR: Unreachable"
)


def mpi_without_pmix(facts: FailedJob) -> Explanation | None:
    """MPI does not work with the launcher's PMIx. An exception of the program shows that MPI has
    started.
    """
    is_of_program = facts.error.tracebacks and not re.search(
        r"\bP?MPI?\b|\bPMIx\b", facts.error.text
    )
    if is_of_program or search([_NO_PMIX], facts.raw) is None:
        return None
    return Explanation(
        "mpi-pmix",
        f"MPI could not start{facts.at}: the MPI library does not work with the launcher's PMIx",
        "use the cluster's MPI and mpi4py, or start the ranks by mpirun: with --launcher "
        "mpirun, or `mpirun PROGRAM` in a script",
    )


# Slurm's PMIx plugin lost the connection to a rank that had not called MPI_Finalize, and ends the
# step.
_LOST_RANK: Final = re.compile(
    r"^slurmstepd\S*: error: .*mpi/pmix.*Error handler invoked: .*source = "
    r"\[\S+:(?P<rank>\d{1,9})\]",
    re.MULTILINE,
)
_TASKS = r"\d{1,9}(?:-\d{1,9})?"
_FAILED_TASKS: Final = re.compile(
    rf"^srun: error: \S+: tasks? (?P<tasks>{_TASKS}(?:,{_TASKS})*): ", re.MULTILINE
)


def left_mpi(facts: FailedJob) -> Explanation | None:
    """A rank ended with exit code 0 while the others waited for it in MPI, and Slurm killed them.

    Evidence: Slurm's PMIx lost this rank first, and there is neither a record nor a message of its
        failure.
    """
    lost = _LOST_RANK.search(facts.raw)
    if lost is None or facts.error.tracebacks or facts.failed.signal not in {"SIGKILL", "SIGTERM"}:
        return None
    rank = int(lost["rank"])
    failed = [match["tasks"] for match in _FAILED_TASKS.finditer(facts.raw)]
    if rank in facts.ended or not failed or any(_is_in(rank, tasks) for tasks in failed):
        return None
    return Explanation(
        "left-mpi",
        f"rank {rank} ended with exit code 0 before MPI_Finalize, and Slurm then killed the "
        "other ranks",
        "all ranks must take part in each collective and end with MPI_Finalize: look for "
        f"sys.exit, os._exit or an early return in rank {rank} (`clusterctl logs --rank {rank}`)",
        failed=Failed(rank=rank, host=facts.job.nodes[0] if len(facts.job.nodes) == 1 else ""),
    )


def _is_in(number: int, ranges: str) -> bool:
    """Return whether a number is in a list such as ``0-2,5``."""
    limits = [part.partition("-") for part in ranges.split(",")]
    return any(int(first) <= number <= int(last or first) for first, _, last in limits)


# srun starts a program for which a step has no PATH.
_NOT_STARTED: Final = re.compile(r"execve\(\): (?P<what>[\w.+-]+): No such file or directory")
_STEP_EXPORT: Final = re.compile(
    r"^[^#\n]*\bsrun\b[^\n]*--export[= ](?P<value>(?!ALL\b)\S+)", re.MULTILINE
)


def step_without_path(facts: FailedJob) -> Explanation | None:
    """`srun --export=NAME=VALUE` passes no other variable.

    Evidence: the script has this option, and the command that srun cannot find has no path.
    """
    match = search([_NOT_STARTED], facts.error.evidence)
    export = _STEP_EXPORT.search(facts.script)
    if match is None or export is None:
        return None
    value = export["value"].strip("\"'")
    more = "" if value == "NONE" else f",{value}"
    return Explanation(
        "step-without-path",
        f"srun cannot find {match['what']}{facts.at}: with --export={value}, the step has no PATH",
        f"use srun --export=ALL{more}, or the full path of the command",
        match,
    )


_PORT_IN_USE: Final = re.compile(r"(?i)address already in use|EADDRINUSE|errno: 98\b")


def master_port_in_use(facts: FailedJob) -> Explanation | None:
    """A process has MASTER_PORT already. Evidence: the message or the failed call names this
    port.
    """
    match = search([_PORT_IN_USE], facts.error.evidence)
    if match is None or not facts.port:
        return None
    said = (facts.error.evidence, *facts.error.source)
    if not any(
        re.search(rf"\bMASTER_PORT\b|(?<![\d.]){facts.port}(?![\d.]*\d)", text) for text in said
    ):
        return None
    return Explanation(
        "port-in-use",
        f"MASTER_PORT ({facts.port}) is already in use{facts.at}: a process on the node has it",
        "if two parts of the program listen on MASTER_PORT, give one of them another port; "
        "otherwise submit again: the job then gets another port",
        match,
    )


# --- Jobs that never started ---------------------------------------------------------------------
def never_started(facts: FailedJob) -> Explanation | None:
    """Slurm ended a waiting job. Evidence: the job has no nodes."""
    job = facts.job
    has_run = bool(job.nodes or job.elapsed_s)
    if has_run or job.prefix or job.state not in {JobState.NODE_FAIL, JobState.FAILED}:
        return None
    if job.state is JobState.NODE_FAIL:
        return Explanation(
            "never-started",
            "the job never started: a node or partition that it asked for left the cluster",
            "submit again, for nodes and a partition that `clusterctl status` shows",
        )
    return Explanation(
        "never-started",
        f"the job never started: Slurm rejected it ({job.reason or 'no reason given'})",
        "submit again, and ask for what `clusterctl status` shows",
    )


# --- Time limits ---------------------------------------------------------------------------------
# The signal before the time limit that the script asks for. Slurm may send it up to a minute early.
_NOTICE: Final = re.compile(
    r"^#SBATCH\s+(?:\S+\s+)*?--signal[=\s](?:[BR]+:)?(?:SIG)?(?P<name>[A-Z]\w*)(?:@(?P<lead>\d+))?(?:\s|$)",
    re.MULTILINE,
)
_LEAD_S = 60
_EARLY_S = 65


def notice_not_handled(facts: FailedJob) -> Explanation | None:
    """The signal that announces the time limit ended the program.

    Evidence: the script asks for this signal, and the time limit was near.
    """
    job = facts.job
    signal = facts.failed.signal
    if not job.time_limit_s or job.last_start is None or job.end_time is None:
        return None
    left_s = job.time_limit_s - (job.end_time - job.last_start)
    for asked in _NOTICE.finditer(facts.script):
        if signal == f"SIG{asked['name']}" and left_s <= int(asked["lead"] or _LEAD_S) + _EARLY_S:
            return Explanation(
                "notice-not-handled",
                f"ended by {signal}{facts.at}, with which Slurm announced the time limit "
                "(#SBATCH --signal)",
                f"handle {signal} in the program, as docs/restarts.md shows, or use a longer "
                "--time",
            )
    return None


Function = Callable[[FailedJob], Explanation | None]
# Code in causes.toml -> the functions that come before its first entry.
BEFORE: Final[Mapping[str, Sequence[Function]]] = {
    "lost-node": (never_started,),
    "cuda-illegal-address": (launcher_crashed, left_mpi, no_input),
    "modules-of-another-site": (log_has_another_path, file_stayed_at_home, data_stayed_at_home),
    "command-not-found": (step_without_path,),
    "noexec": (missing_file,),
    "port-in-use": (master_port_in_use,),
    "arguments": (mpi_without_pmix,),
    "terminated": (notice_not_handled,),
    "exit-code": (unanswered_read,),
}
