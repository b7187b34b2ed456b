"""Parse the command line, run a command, and turn errors and signals into an exit code."""

from __future__ import annotations

import itertools
import os
import re
import signal
import stat
import sys
import threading
from types import FrameType
from typing import Any, Final

import click
from click.shell_completion import shell_complete
from typer.core import TyperCommand, TyperGroup

from clusterctl import __version__
from clusterctl.cli.help import showing_option
from clusterctl.cli.options import COMMON, command, end_of, parameter_of
from clusterctl.cli.output import ENDINGS, Screen, Terminated, silence, writing
from clusterctl.cli.refusals import is_help, refusal_of, reject_words_before_dashes
from clusterctl.cli.verbs import GROUPS, VERBS, Panel
from clusterctl.errors import ClusterctlError, UsageError

PROGRAM = "clusterctl"
# A shell's completion script sets this variable to get completions.
COMPLETION_VARIABLE = "_CLUSTERCTL_COMPLETE"


class LazyVerb(TyperCommand):
    """A command that imports its module only when it is called or its help is shown."""

    def __init__(self, words: str) -> None:
        super().__init__(words.rpartition(" ")[2], help=VERBS[words].summary, rich_markup_mode=None)
        self._words = words

    def load(self) -> click.Command:
        """Import the command's function. Return the command with its parameters and full help."""
        verb = VERBS[self._words]
        return command(str(self.name), verb.load(), verb.without)

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        loaded = self.load()
        typed = tuple(args)
        try:
            context = loaded.make_context(info_name, args, parent, **extra)
        except click.UsageError as exc:
            # With a context, the message contains the name of the command.
            if exc.ctx is None:
                exc.ctx = click.Context(loaded, info_name=info_name, parent=parent)
            raise
        # During completion, the command line is incomplete.
        if self.name in {"submit", "rehearse"} and not context.resilient_parsing:
            reject_words_before_dashes(self.name, typed, context.params)
        return context


class _Group(TyperGroup):
    """A group of commands. Without a command, it runs its command ``list``, if it has one."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        names_none = args[0].startswith("-") and args[0] not in {"-h", "--help"} if args else True
        # During completion, the command may still follow.
        if names_none and "list" in self.commands and not extra.get("resilient_parsing"):
            args = ["list", *args]
        return super().make_context(info_name, args, parent, **extra)


class _Program(TyperGroup):
    """The program. Its help lists the commands below the headings of their panels."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.commands))
        for panel in Panel:
            rows = [
                (name.ljust(widest), each.get_short_help_str(formatter.width))
                for name, each in self.commands.items()
                if PANELS[name] is panel
            ]
            with formatter.section(panel.value):
                formatter.write_dl(rows)


# Command or group of commands -> its panel, in the order of the help.
PANELS: Final = {
    words.partition(" ")[0]: VERBS[words].panel or GROUPS[words.partition(" ")[0]].panel
    for words in VERBS
}


def _version(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        click.echo(f"clusterctl {__version__}")
        ctx.exit()


def _program() -> click.Group:
    version = showing_option("--version", _version, "Show the version.")

    @click.pass_context
    def root(ctx: click.Context, /, **common: Any) -> None:
        ctx.obj = common

    program = _Program(
        name=PROGRAM,
        callback=root,
        params=[*(parameter_of(name, kind, None) for name, kind in COMMON.items()), version],
        help="Create a Slurm cluster from one YAML file, run jobs on it, and collect their "
        "results.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    for name in PANELS:
        if name in VERBS:
            program.add_command(LazyVerb(name))
            continue
        group = _Group(
            name=name, help=GROUPS[name].summary, no_args_is_help=True, rich_markup_mode=None
        )
        for words in VERBS:
            if words.startswith(f"{name} "):
                group.add_command(LazyVerb(words))
        program.add_command(group)
    return program


app: Final = _program()

_SIGNALLED = 128
_AGAIN_S = 0.05


def run() -> int:
    """Run the command in ``sys.argv``, and return the exit code."""
    end_by_signals()
    try:
        # Commands handle errors of their own output; `writing` handles errors of click's output,
        # the help.
        with writing(sys.stdout):
            if instruction := os.environ.get(COMPLETION_VARIABLE):
                # Typer's own completion is for the scripts that it writes.
                return shell_complete(app, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
            code = app(prog_name=PROGRAM, standalone_mode=False) or 0
            sys.stdout.flush()
    except click.UsageError as exc:
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


def _refuse(exc: click.UsageError) -> int:
    json = _wants_json()
    message = exc.format_message()
    if is_help(message) and not json:
        click.echo(message, err=True)
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
