"""The error with which the log of a COMPLETED job ends: its results may be wrong all the same."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from clusterctl.scheduler.ends.excerpt import ended_part, excerpt_of_log
from clusterctl.scheduler.ends.hints import says_no_error

# Lines after a traceback with which the log of a shell script still ends with the traceback.
_REMARKS = 3
# A last line by which a shell or a command reports that it failed. `error: 0.012` is a result.
_COMMAND_FAILED: Final = re.compile(
    r": command not found$|^\S+: \*\*\* .*Error \d+$"
    r"|^\S+: line \d+: +\d+ (?:Segmentation fault|Aborted|Killed|Bus)"
    r"|^[\w./+-]+: .*: (?:No such file or directory|Permission denied|No space left on device)$"
    r"|^(?:[\w./+-]+: )?(?i:fatal|(?:fatal )?error): (?! *[-+]?(?:\.?\d|nan|inf))"
)


class LastError(NamedTuple):
    """The error with which a log ends, as a line. log: "log", or "stderr" or "stdout" if there are
    both. part: the part of the program that ended by it, such as a thread; the program went on.
    """

    line: str
    log: str
    part: str = ""


def error_at_end(stdout: str, stderr: str, *, is_shell: bool) -> LastError | None:
    """Return the exception that ended a part of the program, such as a thread; else the error with
    which the job's log ends: that of a traceback, or of a command.

    is_shell: whether the job's program is a shell script, which goes on after a failed command.
        Another program has handled an error that is not the last that it wrote.
    """
    written = {
        name: text for name, text in (("stderr", stderr), ("stdout", stdout)) if text.strip()
    }
    for name, text in written.items():
        part, line = ended_part(text)
        if part:
            return LastError(line, name, part)
    if len(written) > 1 and not is_shell:
        return None
    for name, text in written.items():
        if line := _last_error(text, remarks=_REMARKS if is_shell else 0):
            return LastError(line, name if len(written) > 1 else "log")
    return None


def _last_error(text: str, *, remarks: int) -> str:
    """Return the error with which a log ends, or "". remarks: number of lines that may come after
    its traceback.
    """
    excerpt = excerpt_of_log(text, "")
    is_last = not excerpt.between and len(excerpt.last) <= remarks
    if excerpt.exception and is_last and not any(map(says_no_error, excerpt.last)):
        return excerpt.exception
    last = next(iter(excerpt.last[-1:]), "")
    return last.strip() if _COMMAND_FAILED.search(last) and not says_no_error(last) else ""
