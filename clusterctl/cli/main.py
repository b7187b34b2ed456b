"""Parse the command line, run a command, and turn errors and signals into an exit code."""

from __future__ import annotations

import itertools
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from clusterctl.cli import options
from clusterctl.cli.options import end_of, verb
from clusterctl.cli.output import ENDINGS, Screen, Terminated, silence, writing
from clusterctl.cli.refusals import is_help, refusal_of, reject_words_before_dashes
from clusterctl.cli.verbs import GROUPS, VERBS, Import
from clusterctl.errors import ClusterctlError, UsageError

PROGRAM = "clusterctl"
# The error that Typer raises for a wrong command line. It has no public name in all versions of
# Typer.
CommandLineError: Final[Any] = typer.BadParameter.__base__
# A shell's completion script sets this variable to get completions. If it is source_SHELL, Typer
# prints the script.
COMPLETION_VARIABLE = "_CLUSTERCTL_COMPLETE"


class LazyVerb(TyperCommand):
    """A command that imports its module only when it is called or its help is shown."""

    def __init__(self, name: str, load_function: Import, summary: str) -> None:
        super().__init__(name, help=summary, rich_markup_mode=None)
        self._load_function = load_function

    def load(self) -> TyperCommand:
        """Import the command's function. Return the command with its parameters and full help."""
        return command(str(self.name), verb(self._load_function()))

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        loaded = self.load()
        typed = tuple(args)
        try:
            context = loaded.make_context(info_name, args, parent, **extra)
        except CommandLineError as exc:
            # With a context, the message contains the name of the command.
            if exc.ctx is None:
                context = typer.Context(loaded, info_name=info_name, parent=parent)
                exc.ctx = context
            raise
        # During completion, the command line is incomplete.
        if self.name in {"submit", "rehearse"} and not context.resilient_parsing:
            reject_words_before_dashes(self.name, typed, context.params)
        return context


class _Group(TyperGroup):
    """A group of commands. Without a command, it runs its command ``list``, if it has one."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        names_none = args[0].startswith("-") and args[0] not in {"-h", "--help"} if args else True
        # During completion, the command may still follow.
        if names_none and "list" in self.commands and not extra.get("resilient_parsing"):
            args = ["list", *args]
        return super().make_context(info_name, args, parent, **extra)


def command(name: str, function: Callable[..., None]) -> TyperCommand:
    typer_app = typer.Typer(rich_markup_mode=None, add_completion=False)
    typer_app.command(name)(function)
    return typer.main.get_command(typer_app)  # type: ignore[return-value]


def _program() -> TyperGroup:
    root = typer.Typer(
        name=PROGRAM,
        help="Create a Slurm cluster from one YAML file, run jobs on it, and collect their "
        "results.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    root.callback()(options.root)
    program = typer.main.get_group(root)
    groups = {
        name: _Group(name=name, help=summary, no_args_is_help=True, rich_markup_mode=None)
        for name, summary in GROUPS.items()
    }
    for words, (load_function, summary) in VERBS.items():
        *group, name = words.split()
        owner = groups[group[0]] if group else program
        owner.add_command(LazyVerb(name, load_function, summary))
    for group_of_verbs in groups.values():
        program.add_command(group_of_verbs)
    return program


app: Final = _program()

_SIGNALLED = 128
_AGAIN_S = 0.05


def run() -> int:
    """Run the command in ``sys.argv``, and return the exit code."""
    end_by_signals()
    if COMPLETION_VARIABLE in os.environ:
        from clusterctl.cli.completion import register_shells

        register_shells()
    try:
        # Commands handle errors of their own output; `writing` handles errors of click's output,
        # the help.
        with writing(sys.stdout):
            code = app(prog_name=PROGRAM, standalone_mode=False) or 0
            sys.stdout.flush()
    except CommandLineError as exc:
        return _refuse(exc)
    except ClusterctlError as exc:
        # The command line is wrong, or the error of a command could not be shown.
        return _show(exc, json=isinstance(exc, UsageError) and _wants_json())
    except (Exception, *ENDINGS) as exc:
        # The command line was being read.
        return end_of(exc, _screen(json=_wants_json()))
    return int(code)


def end_by_signals() -> None:
    """Make SIGTERM and SIGHUP end clusterctl and the processes that it started, like Ctrl-C."""

    def end(number: int, _: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr) if number == signal.SIGHUP else ():
            # A character device is the terminal, which is closed.
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                silence(stream)
        raise Terminated.by(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        # A handler set by `nohup` is kept.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    sys.unraisablehook = _signal_again


def _signal_again(lost: sys.UnraisableHookArgs) -> None:
    """Send a signal again if Python dropped the signal's exception, as it does in finalizers."""
    match lost.exc_value:
        case KeyboardInterrupt():
            number = int(signal.SIGINT)
        case SystemExit(code=int(code)) if code > _SIGNALLED:
            number = code - _SIGNALLED
        case _:
            sys.__unraisablehook__(lost)
            return
    if not sys.is_finalizing():
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def _refuse(exc: Any) -> int:
    json = _wants_json()
    message = exc.format_message()
    if is_help(message) and not json:
        typer.echo(message, err=True)
        return UsageError.exit_code
    return _show(refusal_of(exc), json=json)


def _show(error: ClusterctlError, *, json: bool = False) -> int:
    _screen(json=json).error(error)
    return error.exit_code


def _screen(*, json: bool) -> Screen:
    color = "--no-color" not in sys.argv and not os.environ.get("NO_COLOR")
    return Screen(json=json, color=color)


def _wants_json() -> bool:
    """Return whether the command line, which click may have rejected, asks for JSON."""
    words = itertools.takewhile(lambda word: word != "--", sys.argv[1:])
    # -o may follow letters of options without a value, such as -v.
    return re.search("(^| )(-v*o[ =]?|--output[ =])json( |$)", " ".join(words)) is not None
