"""Transports run commands on hosts. Commands are argv lists; whatever reaches a remote shell is quoted."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from clusterctl.errors import CommandError, NoAnswerError, TransportError, UnreachableError, printable
from clusterctl.util.process import Result

LONGEST_LINE = 1 << 20  # bytes of an answer
PIPE = 1 << 18  # bytes of a pipe for much data; Linux lets anyone have four times that
ENDED_BY_SIGNAL = -1  # the exit status that stands for it
SILENCE_S = 120.0  # after which a command that should stream is given up

# Every command on a host begins with this line, which any login shell takes: csh, too. The output of the
# command follows the mark, and its script is what stdin begins with: no shell quotes it, and a command line
# has at most 128 KiB. It is not run unless it has come as a whole, since braces must be closed.
MARK = b"\x1eclusterctl\x1e\n"
_WRAPPER = 'exec /bin/sh -c \'printf "\\036clusterctl\\036\\n" && eval "$(head -c $0)"\' {size}'

# sshd leaves a command without a terminal running when its channel goes away. This ends the command, and what
# it started, when the channel's input is closed. The watcher holds no output open, and the shell becomes the
# command, whose exit status or signal is thus what sshd says.
_END_WITH_CHANNEL = (
    "exec 3<&0; { read -r _ <&3; kill -0 $$ && kill -TERM 0; } >/dev/null 2>&1 & exec 3<&- </dev/null"
)

_ROOT = Path(__file__).parents[2]
_IMPORTS = re.compile(r"^from clusterctl\..*\n", re.MULTILINE)
_IMPORT = re.compile(r"^from ((?:clusterctl|payload)\.[a-z_.]+) import ", re.MULTILINE)

# Makes modules of (name, text) pairs, under the names they import each other by; calls the last one's main.
# The program ends as soon as its stdout is closed: the clusterctl that runs it has ended, or has given it up.
BOOT = """\
import _thread, json, os, select, sys, types
def watch():
    poll = select.poll()
    poll.register(1, 0)
    poll.poll()
    os._exit(141)
_thread.start_new_thread(watch, ())
for name, text in json.loads(sys.argv[1]):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
try:
    module.main(*json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take the interpreter down takes longer
except OSError as exc:
    place = os.path.abspath(os.fsdecode(exc.filename or "."))
    sys.exit(f"{place!r}: {exc.strerror or exc}")
"""


class Conversation(Protocol):
    """A running command that is written to and read from. It must not say much while it is written to."""

    def send(self, data: bytes) -> None:
        """Write to its stdin; waits while it does not read.

        Raises:
            CommandError: it has ended.
            NoAnswerError: it took no byte for too long.
            UnreachableError: the connection broke.
        """

    def receive(self) -> bytes:
        """Some of its stdout, as soon as there is any; b"" at the end of it.

        Raises:
            NoAnswerError: it said no byte for too long.
        """

    def finish(self) -> None:
        """Close its stdin, read its stdout to the end, and wait until it has ended.

        Raises:
            CommandError: it exited non-zero.
            NoAnswerError: it said no byte for too long, or did not end.
            UnreachableError: the connection broke.
        """


class Transport(Protocol):
    """One host, as one user. A command ends with us; one that needs its stdin, when it reads its end.

    A program of ours (``remote_argv``) also ends when its stdout is closed.
    """

    @property
    def host(self) -> str:
        """Name of the host, for messages."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command to its end.

        Its stdout is text here; what is not UTF-8 becomes U+FFFD. Bytes as they are come from ``stream``.

        Raises:
            CommandError: it exited non-zero and ``check`` is set. A command that a signal ended has rc -1.
            NoAnswerError: no answer within ``timeout_s``. What runs with other rights (sudo) may go on.
            UnreachableError: no connection.
        """

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """Run a command without stdin and yield its stdout as it comes.

        Closing the generator ends the command.

        Raises:
            CommandError: it exited non-zero.
            NoAnswerError: it said no byte for too long.
            UnreachableError: the connection broke.
        """

    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        """Start a command that reads stdin and answers on stdout.

        Leaving the context without ``finish`` closes its stdin: it must end by itself then. After
        ``silence_s`` seconds (default: ``SILENCE_S``) without a byte in either direction it is given up.

        Raises:
            UnreachableError: no connection.
        """

    def begin(self, argv: Sequence[str]) -> None:
        """Start a command for which ``converse`` is called soon, where this takes no time; raises nothing."""

    def close(self) -> None:
        """Close the connection; calling it twice is fine."""


Connect = Callable[[str], Transport]  # to the host of this name


def enlarge(pipe: int) -> None:
    """Give a pipe more room: with the usual one, much data means a change of process every 64 KiB."""
    with suppress(OSError, AttributeError):  # beyond what this user may have; not Linux
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)


def sendable(argv: Sequence[str]) -> Sequence[str]:
    """The command as it is; raises TransportError if it can't be sent to a host."""
    if any("\0" in word for word in argv):
        raise TransportError(
            "a command's argument holds a NUL character, which no host can be given", code="null-byte"
        )
    return argv


def wrapped(
    argv: Sequence[str], env: Mapping[str, str] | None = None, *, reads: bool = True
) -> tuple[str, bytes]:
    """Return the line that runs a command by any login shell, and the script that its stdin begins with.

    env: variables that are added to its environment. ``reads``: it reads what follows the script. Otherwise
    its stdin is empty, and it ends when the channel's is closed.

    Raises:
        TransportError: an argument holds a NUL character.
    """
    words = ["env", *(f"{key}={value}" for key, value in env.items()), *argv] if env else list(argv)
    begin = "" if reads else f"{_END_WITH_CHANNEL}; "
    script = os.fsencode(f"{{ {begin}exec {shlex.join(sendable(words))}\n}}")
    return _WRAPPER.format(size=len(script)), script


def shown(argv: Sequence[str], limit: int = 120) -> str:
    """The command for a message: one line, printable, not too long."""
    line = printable(shlex.join(argv))
    return line if len(line) <= limit else line[:limit] + "..."


def failed(host: str, argv: Sequence[str], rc: int, stderr: str) -> CommandError:
    how = "was ended by a signal" if rc == ENDED_BY_SIGNAL else f"failed with exit status {rc}"
    return CommandError(
        f"`{shown(argv)}` {how}", code="command-failed", rc=rc, stderr=stderr, where=host, host=host
    )


def unreachable(host: str, config: Path, what: str, cause: Exception | str | None = None) -> UnreachableError:
    """The error for a host that there is no connection to; ``config`` is the `ssh_config` that names it."""
    fix = "`clusterctl up` starts it again if it is down"
    return UnreachableError(f"{host}: {what}", where=str(config), why=str(cause or ""), fix=fix, host=host)


def no_answer(host: str, argv: Sequence[str], seconds: float) -> NoAnswerError:
    """The error for a command that said nothing, or did not end, for that long."""
    return NoAnswerError(
        f"{host}: no answer from `{shown(argv)}` within {seconds:g} s",
        fix="try again; if it stays so, look at the host's load, "
        "and at what the account's ~/.bashrc there runs at each login",
        host=host,
    )


def lines(stream: Iterable[bytes], too_long: Exception) -> Iterator[bytes]:
    """The lines of a stream, as soon as they are whole, without their ends.

    Raises:
        Exception: ``too_long``, if one does not end.
    """
    rest = b""
    for piece in stream:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_LINE:
            raise too_long


def remote_argv(module: str, *arguments: str) -> list[str]:
    """The command that runs ``main`` of a module of ours, such as ``clusterctl.jobs.remote_follow``.

    The modules of ours that it imports go with it. Arguments travel as JSON, since they may hold names that
    are not UTF-8 (as `os.fsdecode` has them). Python is isolated: it imports nothing from the home of the
    account, where a job, or `clusterctl put json.py`, may have left modules.
    """
    return ["python3", "-IS", "-c", BOOT, module_texts(module), json.dumps(arguments)]


def remote_program(module: str) -> str:
    """A module of ours and those that it imports as one program, for the plain Python of a host."""
    texts = [text for _, text in json.loads(module_texts(module)) if text]
    return "\n\n".join(_IMPORTS.sub("", text) for text in texts)


@cache
def module_texts(module: str, root: Path = _ROOT) -> str:
    """A module of ours after all of ours that it imports: JSON pairs of name and text.

    ``root`` is the folder with the top package.
    """
    texts: dict[str, str] = {}
    _add(module, root, texts)
    packages = {name[:end] for name in texts for end, char in enumerate(name) if char == "."}
    return json.dumps([*((name, "") for name in sorted(packages)), *texts.items()])


def _add(module: str, root: Path, texts: dict[str, str]) -> None:
    """Put a module after all that it imports."""
    if module not in texts:
        text = (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for name in _IMPORT.findall(text):
            _add(name, root, texts)
        texts[module] = text
