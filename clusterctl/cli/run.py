"""The whole of a run: parse, do, end. Whatever a user types or does, it ends with one answer and a code."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from types import FrameType

import typer
from typer._completion_classes import completion_init

from clusterctl.cli import app
from clusterctl.cli.completion import VARIABLE
from clusterctl.cli.options import INTERRUPTED
from clusterctl.cli.show import READER_GONE, Screen, silence
from clusterctl.errors import ClusterctlError, UsageError

_SIGNALLED = 128
_SOON_S = 0.05


def run() -> int:
    """Run the verb that ``sys.argv`` names, and return the exit code."""
    end_by_signals()
    if VARIABLE in os.environ:
        completion_init()
    try:
        code = app(prog_name="clusterctl", standalone_mode=False) or 0
        sys.stdout.flush()
    except typer.TyperException as exc:
        return _refuse(exc)
    except ClusterctlError as exc:  # showing a verb's error failed
        return _show(exc)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as exc:  # a verb's own errors never get here: this is what click itself writes, the help
        silence(sys.stdout)
        if isinstance(exc, BrokenPipeError):
            return READER_GONE
        return _show(ClusterctlError("the answer can't be written", why=exc.strerror or str(exc)))
    return int(code)


def end_by_signals() -> None:
    """Let `kill` and a closed terminal end us as Ctrl-C does: with everything that we started."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(_SIGNALLED + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` has set another
            signal.signal(number, end)
    sys.unraisablehook = _signal_again


def _signal_again(lost: sys.UnraisableHookArgs) -> None:
    """What a signal raises in a finalizer, Python only reports and forgets: signal again, soon after it."""
    match lost.exc_value:
        case KeyboardInterrupt():
            number = int(signal.SIGINT)
        case SystemExit(code=int(code)) if code > _SIGNALLED:
            number = code - _SIGNALLED
        case _:
            sys.__unraisablehook__(lost)
            return
    if not sys.is_finalizing():
        threading.Timer(_SOON_S, os.kill, (os.getpid(), number)).start()


def _refuse(exc: typer.TyperException) -> int:
    """A command that can't be understood."""
    context: typer.Context | None = getattr(exc, "ctx", None)
    path = context.command_path if context else "clusterctl"
    text = exc.format_message().replace("Value error, ", "")
    json = _wants_json()
    if text.startswith("Usage:"):  # no verb at all: click's message is the help itself
        if not json:
            typer.echo(text, err=True)
            return UsageError.exit_code
        text = "no verb was given"
    return _show(UsageError(text.rstrip("."), fix=f"`{path} --help` shows what can be said here"), json=json)


def _show(error: ClusterctlError, *, json: bool = False) -> int:
    color = "--no-color" not in sys.argv and not os.environ.get("NO_COLOR")
    Screen(json=json, color=color).error(error)
    return error.exit_code


def _wants_json() -> bool:
    """Whether the command asks for JSON, in words that click refused to read."""
    words = sys.argv[1:]
    words = words[: words.index("--")] if "--" in words else words
    return bool({"-ojson", "--output=json"} & set(words)) or any(
        option in {"-o", "--output"} and value == "json" for option, value in itertools.pairwise(words)
    )
