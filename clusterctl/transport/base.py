"""Interface to the hosts: run commands, given as lists of arguments and quoted for the remote
shell.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from clusterctl.errors import (
    CommandError,
    NoAnswerError,
    TransportError,
    UnreachableError,
    printable,
)
from clusterctl.state.workspace import Workspace
from clusterctl.transport.login import login_of
from clusterctl.util.process import Result, parallel_map

LONGEST_LINE = 1 << 20  # bytes
# Bytes of a pipe that carries much data. Linux lets any user have up to 1 MiB.
PIPE = 1 << 18
ENDED_BY_SIGNAL = -1  # exit status
_NOT_FOUND: Final = 127  # shell's exit status
# Code of the error if the host has no Python for clusterctl's programs.
PYTHON_GONE: Final = "python"
SILENCE_S = 120.0

# Each command on a host begins with this line, which every login shell accepts, csh included. The
# command's output follows the mark. The command itself is the first part of stdin, because a shell
# would quote it and a command line holds at most 128 KiB. The closing brace ensures that an
# incomplete command is not run.
MARK = b"\x1eclusterctl\x1e\n"
_WRAPPER = 'exec /bin/sh -c \'printf "\\036clusterctl\\036\\n" && eval "$(head -c $0)"\' {size}'

# sshd does not end a command without a terminal when its channel closes. This line starts a watcher
# that ends the command and its children when the channel's input is closed. The watcher keeps no
# output open, and is no child of the shell, for which a script's `wait` would wait.
_END_WITH_CHANNEL = (
    "exec 3<&0; ({ read -r _ <&3; kill -0 $$ && kill -TERM 0; } >/dev/null 2>&1 &); exec 3<&- "
    "</dev/null"
)

_ROOT = Path(__file__).parents[2]
_IMPORTS = re.compile(r"^from clusterctl\..*\n", re.MULTILINE)
_IMPORT = re.compile(r"^from ((?:clusterctl|payload)\.[a-z_.]+) import ", re.MULTILINE)

# Creates modules from (name, text) pairs, under their import names, and calls `main` of the last
# module. The program exits as soon as its stdout is closed, because clusterctl has then ended or
# given it up. Without arguments on the command line, both are read from descriptor 3. If python3 is
# older than the modules need, as 3.6 of EL 8 is, a newer Python on the PATH runs this command
# again.
BOOT = """\
import _thread, json, os, select, sys, types
if sys.version_info < (3, 9):
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\\0")[1:-1]
    for name in ["python3.%d" % minor for minor in range(14, 8, -1)]:
        try:
            os.execvp(name, [name.encode()] + words)
        except OSError:
            pass
    sys.exit("python3 is %d.%d, and no Python from 3.9 on is on the PATH" % sys.version_info[:2])
def watch():
    poll = select.poll()
    poll.register(1, 0)
    poll.poll()
    os._exit(141)
_thread.start_new_thread(watch, ())
texts, words = sys.argv[1:] or json.load(open(3))
for name, text in json.loads(texts):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
try:
    module.main(*json.loads(words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
except OSError as exc:
    place = os.path.abspath(os.fsdecode(exc.filename or "."))
    sys.exit(f"{place!r}: {exc.strerror or exc}")
"""
_PROGRAM = ("python3", "-IS", "-c", BOOT)


class Conversation(Protocol):
    """A running command with open stdin and stdout. It must read its input before it prints much.

    All methods raise NoAnswerError if no byte passes in either direction for too long. ``send`` and
    ``finish`` raise CommandError if the command exits too early or non-zero, UnreachableError if
    the connection breaks.
    """

    def send(self, data: bytes) -> None:
        """Write to the command's stdin; block while the command does not read."""

    def receive(self) -> bytes:
        """Return the next piece of stdout as soon as it arrives; b"" at the end of stdout."""

    def finish(self) -> None:
        """Close stdin, discard the rest of stdout, and wait until the command has exited."""


class Transport(Protocol):
    """Runs commands on a host as a given user. When clusterctl ends, they are killed, or their
    stdin closes.

    A clusterctl program on the host (see ``remote_argv``) also ends when its stdout is closed.
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
        """Run a command on the host and return its exit status and output.

        Bytes of stdout that are not UTF-8 become U+FFFD; ``stream`` returns stdout unchanged.

        Raises:
            CommandError: ``check`` is set, and the command exited non-zero, or a signal ended it
                (rc is -1).
            NoAnswerError: the command did not exit in ``timeout_s``. Children under sudo may keep
                running.
            UnreachableError: there is no connection to the host.
        """

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        """Run a command without stdin and yield its stdout in pieces. Raises errors like
        ``Conversation``.

        Closing the generator ends the command.
        """

    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        """Start a command that reads stdin and answers on stdout. Raises UnreachableError.

        If the context is left without ``finish``, stdin is closed and the command must end by
        itself.
        silence_s: seconds without a byte in either direction after which NoAnswerError is raised.
            Default: ``SILENCE_S``.
        """

    def begin(self, argv: Sequence[str]) -> None:
        """Start the command of a later ``converse`` early, if a connection is open. Raises no
        exception.
        """

    def leave(self) -> object:
        """End the commands of this transport. The connection stays open for other processes."""

    def close(self) -> None:
        """End the connection, which other processes may use, too. May be called twice."""


# Called with the name of a host; returns a transport to that host.
Connect = Callable[[str], Transport]


def enlarge_pipe(pipe: int) -> None:
    """Enlarge a pipe's buffer from 64 KiB, to reduce context switches when much data passes through
    it.
    """
    # A user without the right to enlarge pipes causes an OSError, and only Linux has the constant.
    with suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)


def checked_argv(argv: Sequence[str]) -> Sequence[str]:
    """Return the command unchanged; raise TransportError if an argument holds a NUL character."""
    if any("\0" in word for word in argv):
        raise TransportError(
            "an argument of the command holds a NUL character, which no command line can hold",
            code="option-invalid",
            about="null-byte",
            fix="remove the NUL character from the argument",
        )
    return argv


def wrap_command(
    argv: Sequence[str], env: Mapping[str, str] | None = None, *, reads: bool = True, path: str = ""
) -> tuple[str, bytes]:
    """Return (line, script): a login shell that gets the line, and the script first on stdin, runs
    ``argv``.

    The line holds no word of ``argv``, because every user of the host can read it in the list of
    processes.

    Raises TransportError if an argument holds a NUL character.
    env: variables to add to the command's environment.
    reads: whether the command reads the stdin after the script. Otherwise its stdin is empty, and
        the command ends when the SSH channel is closed.
    path: folders to append to the command's PATH, separated by colons. "": no folder.
    """
    variables = [f"{key}={value}" for key, value in (env or {}).items()]
    checked_argv([*variables, *argv])
    begin = "" if reads else f"{_END_WITH_CHANNEL}; "
    if path:
        begin += f"export PATH=$PATH:{shlex.quote(path)}; "
    if variables:
        begin += f"export {shlex.join(variables)}; "
    script = os.fsencode(f"{{ {begin}{_command(argv)}\n}}")
    return _WRAPPER.format(size=len(script)), script


def _command(argv: Sequence[str]) -> str:
    """Return the line that runs ``argv`` in a shell. It shows other users as few arguments as
    possible.

    The shell itself runs the script of `sh -c`, and `test`. It becomes any other command, so sshd
    reports the exit status or the signal of the command. A program of ``remote_argv`` reads its
    arguments from a pipe.
    """
    if tuple(argv[:2]) == ("sh", "-c"):
        return f"set -- {shlex.join(argv[4:])}\n{argv[2]}"
    if argv[0] == "test":
        return shlex.join(argv)
    if tuple(argv[: len(_PROGRAM)]) != _PROGRAM:
        return f"exec {shlex.join(argv)}"
    arguments = json.dumps(argv[len(_PROGRAM) :])
    return f"exec {shlex.join(_PROGRAM)} 3<<'arguments'\n{arguments}\narguments"


def shown_command(argv: Sequence[str], limit: int = 120) -> str:
    """Return the command as a printable line for a message, cut to ``limit`` characters."""
    line = printable(shlex.join(argv))
    return line if len(line) <= limit else line[:limit] + "..."


def command_error(host: str, argv: Sequence[str], rc: int, stderr: str) -> CommandError:
    """Return the error for a command on ``host`` if the command exited non-zero or a signal ended
    it.
    """
    if rc == _NOT_FOUND and argv[0] == _PROGRAM[0]:
        return CommandError(
            "the cluster has no Python for clusterctl's programs",
            code="not-found",
            about=PYTHON_GONE,
            rc=rc,
            stderr=stderr,
            where=host,
            fix="a site may have removed it as an old file: run `clusterctl attach` again, which "
            "sends it; on a cluster of your own, run `clusterctl up`",
            host=host,
        )
    outcome = "was ended by a signal" if rc == ENDED_BY_SIGNAL else f"failed with exit status {rc}"
    return CommandError(
        f"`{shown_command(argv)}` {outcome}",
        about="command",
        rc=rc,
        stderr=stderr,
        where=host,
        host=host,
    )


def unreachable_error(
    host: str, config: Path, problem: str, cause: Exception | str | None = None
) -> UnreachableError:
    """Return the error for a host that ssh can't connect to. config: its `ssh_config`. cause: ssh's
    error.
    """
    login = login_of(config)
    fix = "if the host is down, start it with `clusterctl up`"
    if login:
        fix = f"try `ssh {login}`"
    elif Workspace(config.parent).adopts_hosts:
        fix = "check that the machine is on, that sshd runs, and that no firewall blocks the port"
    return UnreachableError(
        f"{host}: {problem}", where=str(config), why=str(cause or ""), fix=fix, host=host
    )


def no_answer_error(host: str, argv: Sequence[str], seconds: float) -> NoAnswerError:
    """Return the error for a command that printed nothing, or did not exit, for ``seconds``."""
    return NoAnswerError(
        f"{host}: no answer from `{shown_command(argv)}` within {seconds:g} s",
        fix="run the command again; if it fails again, check the host's load "
        "and the commands in the account's ~/.bashrc on the host",
        host=host,
    )


@dataclass(frozen=True, slots=True)
class RootTransport:
    """Runs commands as root over another user's connection, which may use sudo.

    Commands that begin with sudo are run as they are.
    """

    transport: Transport

    @property
    def host(self) -> str:
        return self.transport.host

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        variables = [f"{key}={value}" for key, value in (env or {}).items()]
        words = self._argv(("env", *variables, *argv) if variables else argv)
        return self.transport.run(words, stdin=stdin, timeout_s=timeout_s, check=check)

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        return self.transport.stream(self._argv(argv))

    def converse(
        self, argv: Sequence[str], *, silence_s: float | None = None
    ) -> AbstractContextManager[Conversation]:
        return self.transport.converse(self._argv(argv), silence_s=silence_s)

    def begin(self, argv: Sequence[str]) -> None:
        self.transport.begin(self._argv(argv))

    def leave(self) -> object:
        return self.transport.leave()

    def close(self) -> None:
        self.transport.close()

    def _argv(self, argv: Sequence[str]) -> Sequence[str]:
        return argv if argv[0] == "sudo" else ("sudo", "-n", *argv)


def as_user(user: str) -> tuple[str, ...]:
    """Return the words before a command that run it as another user, with that user's HOME."""
    return ("sudo", "-n", "-H", "-u", user)


def remove_folder(transports: Sequence[Transport], folder: str) -> None:
    """Remove a job's folder from all hosts that can be reached."""
    remove_folders(transports, [folder])


def remove_folders(
    transports: Sequence[Transport], folders: Sequence[str], *, timeout_s: float = 60.0
) -> bool:
    """Remove folders from all hosts that can be reached. Return whether no host has them any
    more.
    """

    def remove(transport: Transport) -> bool:
        argv = ["rm", "-rf", "--", *folders]
        with suppress(UnreachableError):
            return transport.run(argv, timeout_s=timeout_s, check=False).rc == 0
        return False

    return all(parallel_map(transports, remove))


def split_lines(stream: Iterable[bytes], too_long: Exception) -> Iterator[bytes]:
    """Yield the lines of a stream, without line feeds; raise ``too_long`` at a line over
    LONGEST_LINE.
    """
    unfinished = b""
    for piece in stream:
        *whole, unfinished = (unfinished + piece).split(b"\n")
        yield from whole
        if len(unfinished) > LONGEST_LINE:
            raise too_long


def remote_argv(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main`` of a module such as ``clusterctl.jobs.remote_follow``
    on a host.

    The command carries the text of the module and of all clusterctl modules that it imports.
    Arguments are passed as JSON, because arguments may hold names that are not UTF-8 (from
    `os.fsdecode`). Python runs isolated, so that it imports no file from the account's home, such
    as a json.py left by a job.
    """
    return [*_PROGRAM, module_texts(module), json.dumps(arguments)]


def remote_program(module: str) -> str:
    """Return the text of a clusterctl module with the modules that it imports, as a single
    program.
    """
    texts = [text for _, text in json.loads(module_texts(module)) if text]
    return "\n\n".join(_IMPORTS.sub("", text) for text in texts)


@cache
def module_texts(module: str, root: Path = _ROOT) -> str:
    """Return a module and the modules below ``root`` that it imports, as JSON pairs of name and
    text.
    """
    texts: dict[str, str] = {}
    _add(module, root, texts)
    packages = {name[:end] for name in texts for end, char in enumerate(name) if char == "."}
    return json.dumps([*((name, "") for name in sorted(packages)), *texts.items()])


def _add(module: str, root: Path, texts: dict[str, str]) -> None:
    """Add a module's text to ``texts`` (name -> text), after the texts of the modules that it
    imports.
    """
    if module not in texts:
        text = (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for name in _IMPORT.findall(text):
            _add(name, root, texts)
        texts[module] = text
