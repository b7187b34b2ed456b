"""The commands of a shell script whose failure did not end it.

A script without `set -e` goes on after a command that fails, and ends with the exit code of its
last command. With `set -e`, it goes on after a command before `||` or in a condition. An error of
such a command is not the reason for the script's exit code, even if it is the last line on stderr:
a later command may have been silent.
"""

from __future__ import annotations

import re
import shlex
from typing import Final

# The script ends with the first command that fails.
_ERREXIT: Final = re.compile(
    r"^#!.* -\w*e|^\s*set (?:-\w+ )*-(?:\w*e|o errexit|\w*o errexit)", re.MULTILINE
)
# These end a script early, run lines elsewhere, or return the status of another command.
_UNCLEAR: Final = re.compile(r"<<|\b(?:trap|exec|eval|return)\b|\bexit\b(?! +\d)")
# The end of a script that keeps an exit code: `rc=$?` and `exit $rc`.
_EXIT_WITH: Final = re.compile(r"""\s*exit(?: +["']?\$\{?(?P<name>\w+|\?)\}?["']?)?\s*""")
_CONDITION: Final = re.compile(r"\s*(?:(?:if|elif|while|until)\s|!\s)")
# What may end the script after `||`.
_ENDS: Final = re.compile(r"\s*(?:exit|return|die|fail|abort|\{|\(|$)")
_EXIT: Final = re.compile(r"\bexit +(\d{1,9})\b")
# Lines that belong to a block that began above.
_IN_BLOCK: Final = re.compile(r"\s|(?:done|fi|esac|then|do|else|elif)\b|[})]")
_CONTINUES: Final = re.compile(r"(?:\\|\||&&)$")
_LAST_OF_ALL: Final = re.compile(r"wait\b|[$\"'(]|\w+=\$|(?:done|fi|esac)\b|[})]")
_FUNCTION: Final = r"^\s*(?:function\s+{name}\b|{name}\s*\(\))"
# bash names the script and the line before the command.
_OF_BASH: Final = re.compile(r"^\S+: (?:line )?\d+: ")
_AUTHOR: Final = re.compile(r"(?P<author>[\w./+-]+): ")


def goes_on_after_errors(script: str) -> bool:
    """Return whether a shell script goes on after a command that fails."""
    return not _ERREXIT.search(script)


def is_of_earlier_command(line: str, script: str, exit_code: int) -> bool:
    """Return whether a line of a log is the error of a command that the script went on after.

    False if that is unknown. line: begins with the command's name, or with bash's name of the
    script, as in ``rm: cannot remove 'x'``. exit_code: of the script.
    """
    said = _AUTHOR.match(_OF_BASH.sub("", line))
    return said is not None and _is_survived(re.escape(said["author"]), script, exit_code)


def is_of_earlier_file(file: str, script: str, exit_code: int) -> bool:
    """Return whether a program's file, as a traceback names it, is run only by commands that the
    script went on after. False if that is unknown.
    """
    name = file.rpartition("/")[2]
    module = re.escape(name.removesuffix(".py"))
    return bool(name) and _is_survived(
        rf"{re.escape(name)}|-m +(?:\w+\.)*{module}", script, exit_code
    )


def _is_survived(words: str, script: str, exit_code: int) -> bool:
    """Return whether the script went on after each of its commands that has one of these words.
    words: a regular expression.
    """
    lines = [line for line in script.splitlines() if not re.match(r"\s*(?:#|$)", line)]
    before, last = _split_last_command(_without_kept_exit(lines))
    body = "\n".join(before)
    if not last or _UNCLEAR.search(f"{body}\n{last}") or _LAST_OF_ALL.match(last):
        return False
    if any(int(code) == exit_code for code in _EXIT.findall(body)):
        return False
    name = re.escape(last.split()[0])
    if re.search(_FUNCTION.format(name=name), body, re.MULTILINE):
        return False
    named = re.compile(rf"(?:^|[\s/;|&(`\"'=])(?:{words})(?![\w.-])", re.MULTILINE)
    commands = [line for line in body.split("\n") if named.search(line)]
    if not goes_on_after_errors(script) and not all(
        _is_line_survived(line, named) for line in commands
    ):
        return False
    return bool(commands) and not named.search(last)


def _is_line_survived(line: str, named: re.Pattern[str]) -> bool:
    """Return whether a script with `set -e` goes on after the named commands of a line: they are in a
    condition, or before `||`.
    """
    if _CONDITION.match(line):
        return named.search(line.partition(";")[2]) is None
    _, bars, rest = line.rpartition("||")
    return bool(bars) and not named.search(rest) and not _ENDS.match(rest)


def _without_kept_exit(lines: list[str]) -> list[str]:
    """Return the lines up to the command whose exit code a last `exit $rc` returns; [] if that is
    unknown.
    """
    found = _EXIT_WITH.fullmatch(lines[-1]) if lines else None
    if found is None:
        return lines
    name = found["name"] or "?"
    if name == "?":
        return lines[:-1]
    kept = [number for number, line in enumerate(lines) if line.strip() == f"{name}=$?"]
    return lines[: kept[-1]] if kept else []


def _split_last_command(lines: list[str]) -> tuple[list[str], str]:
    """Return the lines before the last command, and the last command. A block counts as one."""
    start = len(lines) - 1
    while start > 0 and (_IN_BLOCK.match(lines[start]) or _CONTINUES.search(lines[start - 1])):
        start -= 1
    before = lines[: max(start, 0)]
    command = "\n".join(lines[max(start, 0) :])
    if "\n" in command:
        return before, command
    words = shlex.shlex(command, posix=False, punctuation_chars=";")
    words.whitespace_split = True
    words.commenters = ""
    try:
        parts = [*words]
    except ValueError:  # quotes that are not closed
        return before, ""
    ends = [number for number, word in enumerate(parts) if word == ";"]
    if not ends or ends[-1] == len(parts) - 1 or _IN_BLOCK.match(parts[ends[-1] + 1]):
        return before, command
    return [*before, " ".join(parts[: ends[-1]])], " ".join(parts[ends[-1] + 1 :])
