"""Causes of failed jobs whose evidence is more than a pattern in a log.

Each function looks at the case of a job, and returns an explanation, or None if its cause does not
apply.
"""

from __future__ import annotations

import re
from typing import Final

from clusterctl.scheduler.base import JobState
from clusterctl.scheduler.case import Case, Explanation
from clusterctl.scheduler.failed_rank import Failed, signal_name
from clusterctl.scheduler.history import is_notice
from clusterctl.scheduler.history import left_mpi as rank_that_left_mpi
from clusterctl.scheduler.program_error import compiled, search

# --- Input ---------------------------------------------------------------------------------------
# A prompt at the end of a line, and what programs say if nobody can answer.
_PROMPT = r"(?:\[[Yy]/[Nn]\]|\((?:yes/no|y/n|Y/n|y/N|\[y\]/n)[^)\n]*\))[?:]* *"
_NO_INPUT: Final = (
    r"^EOFError: EOF when reading a line$"
    r"|could not read (?:Username|Password) for .*: "
    r"(?:No such device or address|terminal prompts disabled)"
    r"|^sudo: a (?:terminal|password) is required"
    r"|^Host key verification failed\.$"
    # The program gave up at the prompt, or the prompt is the last that it wrote.
    rf"|{_PROMPT}(?:Abort(?:ed)?[.!]?|Exiting\.?)$|{_PROMPT}\s*\Z"
    r"|^the input device is not a TTY|/dev/tty.*: No such device or address"
    r"|^(?:EOFError|CondaSystemExit|click\.exceptions\.Abort)\b.*$"
)
_ASKS: Final = r"(?i)\b(?:input|getpass|prompt|confirm|ask|tcgetattr|raw_input)\s*\("
_NO_TERMINAL: Final = r"^(?:termios\.error|OSError): .*Inappropriate ioctl for device"
_HOST_KEY: Final = "Host key verification failed."
_ANSWER: Final = (
    "answer in advance: with an option such as --yes, a variable, or `yes | PROGRAM` in the script"
)


def no_input(case: Case) -> Explanation | None:
    """A program asked a question. Evidence: its prompt is the end of the log, or a call that reads
    failed.
    """
    match = search([_NO_INPUT], case.error.evidence)
    if match is not None and match[0].startswith(("EOFError", "CondaSystemExit", "click")):
        # Files also have ends.
        is_asking = (
            any(compiled(_ASKS).search(line) for line in case.error.source)
            or not case.error.tracebacks
        )
        match = match if is_asking else None
    if match is None and any(
        "tcgetattr" in line or "getpass" in line for line in case.error.source
    ):
        match = compiled(_NO_TERMINAL).search(case.error.evidence)
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
        f"the program asks a question{case.at}, and a job has no input: nobody can answer",
        fix,
        match,
    )


# A `read` of the script's own input: not in a loop or a pipe, and without a file.
_READ: Final = r"^[ \t]*(?:if +)?(?:! +)?(?:IFS=\S* +)?read\b(?![^\n]*(?:<| -\w*[ut]))[^\n]*$"
_ENDS_AT_ERROR: Final = (
    r"^[ \t]*set +-(?:\w*e|o +errexit)|^#!.* -\w*e|\bread\b[^\n]*\|\| *\{?[^\n]*\bexit\b"
)


def unanswered_read(case: Case) -> Explanation | None:
    """`read` fails without input, and bash prints no prompt. Evidence: the script as it was
    sent.
    """
    match = compiled(_READ).search(case.evidence.script)
    if (
        match is None
        or case.failed.exit_code != 1
        or compiled(_ENDS_AT_ERROR).search(case.evidence.script) is None
    ):
        return None
    line = case.evidence.script.count("\n", 0, match.start()) + 1
    return Explanation(
        "no-input",
        f"exit code 1{case.at}: line {line} of the script waits for an answer (`read`), "
        "and a job has no input",
        _ANSWER,
    )


# --- Launchers -----------------------------------------------------------------------------------
_LAUNCHERS = r"(?:mpirun|mpiexec|prterun|orterun|prted|orted)"
_CRASHED: Final = (
    r"^\S+: line \d+: +\d+ (?:Segmentation fault|Aborted|Bus error)\s[^\n]*?"
    rf"\b(?P<what>{_LAUNCHERS})\b"
    rf"|^\[[^\]\n]+\] \[ ?\d+\] (?:\S*/)?(?P<what2>{_LAUNCHERS}|lib(?:prrte|open-rte)\.so[\w.]*)\("
)


def launcher_crashed(case: Case) -> Explanation | None:
    """mpirun itself crashed. Evidence: bash names it as the crashed process, or it is in the
    stack.
    """
    if case.failed.rank is not None or not case.failed.signal:
        return None
    if (match := compiled(_CRASHED).search(case.raw)) is None:
        return None
    what = match["what"] or "mpirun"
    return Explanation(
        "launcher-crashed",
        f"{what} itself crashed ({case.failed.signal}){case.at}, not the program that it started",
        "submit again; if it crashes again, start the ranks with srun (--launcher srun), or use "
        "another MPI",
    )


# Messages of MPI_Init. A server also says PMIX_ERR_UNREACH if a rank ended without MPI_Finalize.
_NO_PMIX: Final = (
    r"PMIx? (?:server|client).*(?:unreachable|fail)|PMIX_ERR(?!_UNREACH in file \S*pmix_server\.c)"
    r"|PMI server not found|OPAL ERROR: Unreachable"
)


def mpi_without_pmix(case: Case) -> Explanation | None:
    """MPI does not work with the launcher's PMIx. An exception of the program shows that MPI has
    started.
    """
    is_of_program = case.error.tracebacks and not re.search(r"\bP?MPI?\b|\bPMIx\b", case.error.text)
    if is_of_program or search([_NO_PMIX], case.raw) is None:
        return None
    return Explanation(
        "mpi-pmix",
        f"MPI could not start{case.at}: the MPI library does not work with the launcher's PMIx",
        "use the cluster's MPI and mpi4py, or start the ranks by mpirun: with --launcher "
        "mpirun, or `mpirun PROGRAM` in a script",
    )


def left_mpi(case: Case) -> Explanation | None:
    """A rank ended with exit code 0 while the others waited for it in MPI, and Slurm killed them.

    Evidence: Slurm's PMIx lost this rank first, and there is neither a record nor a message of its
        failure.
    """
    lost = rank_that_left_mpi(case.raw, case.evidence.ends)
    if lost is None or case.error.tracebacks or case.failed.signal not in {"SIGKILL", "SIGTERM"}:
        return None
    rank, _ = lost
    return Explanation(
        "left-mpi",
        f"rank {rank} ended with exit code 0 before MPI_Finalize, and Slurm then killed the "
        "other ranks",
        "all ranks must take part in each collective and end with MPI_Finalize: look for "
        f"sys.exit, os._exit or an early return in rank {rank} (`clusterctl logs --rank {rank}`)",
        failed=Failed(rank=rank, host=case.job.nodes[0] if len(case.job.nodes) == 1 else ""),
    )


# srun starts a program for which a step has no PATH.
_NOT_STARTED: Final = r"execve\(\): (?P<what>[\w.+-]+): No such file or directory"
_STEP_EXPORT: Final = r"^[^#\n]*\bsrun\b[^\n]*--export[= ](?P<value>(?!ALL\b)\S+)"


def step_without_path(case: Case) -> Explanation | None:
    """`srun --export=NAME=VALUE` passes no other variable.

    Evidence: the script has this option, and the command that srun cannot find has no path.
    """
    match = search([_NOT_STARTED], case.error.evidence)
    export = compiled(_STEP_EXPORT).search(case.evidence.script)
    if match is None or export is None:
        return None
    value = export["value"].strip("\"'")
    more = "" if value == "NONE" else f",{value}"
    return Explanation(
        "step-without-path",
        f"srun cannot find {match['what']}{case.at}: with --export={value}, the step has no PATH",
        f"use srun --export=ALL{more}, or the full path of the command",
        match,
    )


_PORT_IN_USE: Final = r"(?i)address already in use|EADDRINUSE|errno: 98\b"


def master_port_in_use(case: Case) -> Explanation | None:
    """A process has MASTER_PORT already. Evidence: the message or the failed call names this
    port.
    """
    match = search([_PORT_IN_USE], case.error.evidence)
    port = case.evidence.attempt.port
    if match is None or not port:
        return None
    said = (case.error.evidence, *case.error.source)
    if not any(re.search(rf"\bMASTER_PORT\b|(?<![\d.]){port}(?![\d.]*\d)", text) for text in said):
        return None
    return Explanation(
        "port-in-use",
        f"MASTER_PORT ({port}) is already in use{case.at}: a process on the node has it",
        "if two parts of the program listen on MASTER_PORT, give one of them another port; "
        "otherwise submit again: the job then gets another port",
        match,
    )


# --- Jobs that never started ---------------------------------------------------------------------
def never_started(case: Case) -> Explanation | None:
    """Slurm ended a waiting job. Evidence: the job has no nodes."""
    job = case.job
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


# --- Hangs ---------------------------------------------------------------------------------------
def ended_by_hang(case: Case) -> Explanation | None:
    """No rank made progress, and hang.py ended the program."""
    hang = case.evidence.attempt.hang
    if hang is None or not hang.ended_job:
        return None
    return Explanation(
        "hang",
        f"no progress for {hang.duration}: {hang.summary or 'the ranks are unknown'}",
        "correct the program where the ranks wait; if the program was only slow, use --hang warn",
    )


def ended_by_alarm(case: Case) -> Explanation | None:
    """An alarm has ended the program."""
    ending = [alarm for alarm in case.evidence.attempt.alarms if alarm.ended_job]
    if not ending:
        return None
    alarm = ending[-1]
    return Explanation(
        "alarm",
        str(alarm),
        f"correct what wastes the time; if it must be so, use --alarm {alarm.kind}=warn",
    )


# --- Time limits ---------------------------------------------------------------------------------
def notice_not_handled(case: Case) -> Explanation | None:
    """The signal that announces the time limit ended the program.

    Evidence: the script asks for this signal, and the time limit was near.
    """
    job = case.job
    signal = case.failed.signal or signal_name(case.failed.exit_code or 0)
    if not job.time_limit_s or job.last_start is None or job.end_time is None:
        return None
    left_s = job.time_limit_s - (job.end_time - job.last_start)
    if not is_notice(case.evidence.script, signal, left_s):
        return None
    return Explanation(
        "notice-not-handled",
        f"ended by {signal}{case.at}, with which Slurm announced the time limit (#SBATCH --signal)",
        f"handle {signal} in the program, as docs/restarts.md shows, or use a longer --time",
    )
