"""The text of a job's logs: what launchers and libraries write around the words of a program."""

from __future__ import annotations

import re
from functools import cache
from itertools import takewhile
from typing import Final

from clusterctl.util.terminal import plain_line, without_colors

_COLUMNS = 400
_LONGEST = 2 * _COLUMNS
_LABEL: Final = re.compile(r"^\[(?:rank|default)\d+\]: ?", re.MULTILINE)
# A line of a backtrace: of Java, Julia and UCX, of gfortran and sanitizers, of PyTorch, of Open MPI.
_FRAME: Final = re.compile(
    r"={4} backtrace |\s+(?:at |\.\.\. \d+ more|\[\d+\] |@ |\d+ +(?:0x|/\S+\())|\s*#\d+ +0x|frame #\d+: "
    r"|\[\S+:\d+\] \[ *\d+\] "
)
LEFT_OUT: Final = "[... "
# The margin and the rules of the traceback of an ExceptionGroup.
_MARGIN: Final = re.compile(
    r"^ +(?:\| |\+ Exception Group (?=Traceback )|\+[-+].*$|\|$)", re.MULTILINE
)
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
# A traceback in torchrun's summary, indented.
_HEAD: Final = "Traceback (most recent call last):\n"
_IN_SUMMARY: Final = f"\n  traceback : {_HEAD}"
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
# Lines that say themselves that they are no error, or that the program goes on, and commands that
# the shell shows with `set -x`.
_NO_ERROR: Final = re.compile(
    r"(?i)^\W{0,3}(?:[\d:.,T| -]+Z? *\|? *)?(?:warn(?:ing)?|info|debug|note|hint|trace)\b(?!.*/simple/)"
    r"|^\S*\w*Warning: |^\S+:\d+: \w*Warning: |\blevel\"?[=:] *\"?(?:warn|info)|^\[?[WI]\d{4} "
    r"|NCCL INFO|\(ignored\)$|^\++ |^rm: "
    r"|\b(?:retry(?:ing)?\b(?!.*(?:nodes are busy|/simple/))|skipp(?:ed|ing)|ignor(?:ed|ing)"
    r"|fall(?:s|ing) back|continuing|disabling|using .* instead|trying (?:again|another))\b"
)


def without_long_lines(text: str) -> str:
    """Return the text without colors, PyTorch's ``[rank0]: `` labels and the middle of very long
    lines.

    Tracebacks in an ExceptionGroup become separate tracebacks.
    """
    text = _LABEL.sub("", without_colors(text))
    if "Exception Group Traceback" in text:
        text = _MARGIN.sub("", text)
    lines = text.split("\n")
    return "\n".join(
        line if len(line) <= _LONGEST else line[:_COLUMNS] + line[-_COLUMNS:] for line in lines
    )


def without_noise(text: str) -> str:
    """Return a log without messages that follow from a failure, or only surround it."""
    text = without_long_lines(text)
    raised = _raised_in_summary(text)
    for pattern in NOISE:
        text = compiled(pattern).sub("", text)
    return text if raised in text else f"{text}\n{_HEAD}{raised}\n"


def _raised_in_summary(text: str) -> str:
    """Return the frames and the message in torchrun's summary of the rank that failed first, or "". If
    the ranks write to files, they are nowhere else in the log.
    """
    _, is_there, rest = text.rpartition(_IN_SUMMARY)
    lines = takewhile(lambda line: line.startswith("  "), rest.split("\n") if is_there else ())
    return "\n".join(line[2:] for line in lines).rstrip()


def is_frame(line: str) -> bool:
    """Return whether a line is of a backtrace."""
    return _FRAME.match(line) is not None


def is_statement(line: str) -> bool:
    """Return whether a line is not indented, not of a backtrace, and does not stand for others."""
    return not (line.startswith((" ", "\t", LEFT_OUT)) or is_frame(line))


def says_no_error(line: str) -> bool:
    """Return whether a line says itself that it is no error, or that the program goes on."""
    return _NO_ERROR.search(line) is not None


def short(text: str, columns: int = 160) -> str:
    """Return a part of a log for a sentence: a printable line, which is cut after ``columns``."""
    line = plain_line(text)
    return line if len(line) <= columns else f"{line[:columns]}…"


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern, in which ^ and $ match at lines. It is compiled at its first use,
    because most commands diagnose no job.
    """
    return re.compile(pattern, re.MULTILINE)
