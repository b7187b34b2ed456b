"""The whole of a run: parse, do, end. Whatever a user types or does, it ends with one answer and a code."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any, Final

import typer
from typer._completion_classes import completion_init

from clusterctl.cli import access, bundle, cluster, job, node, options, spec, submit, up
from clusterctl.cli.options import INTERRUPTED, Options, verb
from clusterctl.cli.output import READER_GONE, Screen, silence
from clusterctl.errors import ClusterctlError, UsageError

PROGRAM = "clusterctl"
VARIABLE = "_CLUSTERCTL_COMPLETE"  # set by the shell's script when it asks for words


class Shell(StrEnum):
    """Shells that can be served."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    screen: Screen, options: Options, shell: Annotated[Shell, typer.Argument(help="Your shell.")]
) -> None:
    """Print the completion script of a shell.

    bash: eval "$(clusterctl completion bash)" in ~/.bashrc; zsh the same in ~/.zshrc, after compinit;
    fish: clusterctl completion fish > ~/.config/fish/completions/clusterctl.fish
    """
    from typer._completion_shared import get_completion_script

    del options
    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value)
    screen.document({"shell": shell.value, "script": script}, script)


app = typer.Typer(
    name="clusterctl",
    help="One typed file creates a Slurm cluster, trains on it, and collects the results.",
    no_args_is_help=True,
    add_completion=False,  # there is a verb for it
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(options.root)


def _group(name: str, summary: str) -> typer.Typer:
    group = typer.Typer(help=summary, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name=name)
    return group


_cache = _group("cache", "The cache of node images.")
_node = _group("node", "Operate on single nodes, without effect on the others.")
_bundle = _group("bundle", "Packages and programs for air-gapped hosts, in one file.")
VERBS: Final[tuple[tuple[typer.Typer, dict[str, Callable[..., int | None]]], ...]] = (
    (app, {"init": spec.init, "validate": spec.validate, "schema": spec.schema, "doctor": spec.doctor}),
    (app, {"plan": up.plan, "up": up.up}),
    (app, {"down": cluster.down, "status": cluster.status, "list": cluster.list_}),
    (_cache, {"list": cluster.cache_list, "prune": cluster.cache_prune}),
    (_node, {"drain": node.drain, "resume": node.resume, "reboot": node.reboot, "remove": node.remove}),
    (_node, {"forget": node.forget, "add": node.add, "replace": node.replace}),
    (app, {"submit": submit.submit, "jobs": job.jobs_, "logs": job.logs, "cancel": job.cancel}),
    (app, {"collect": job.collect, "ssh": access.ssh, "shell": access.shell}),
    (app, {"put": access.put, "get": access.get}),
    (_bundle, {"create": bundle.create, "verify": bundle.verify, "show": bundle.show}),
    (app, {"completion": completion}),
)
_FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    "submit": submit.JOB_FLAGS,
    "shell": access.SHELL_FLAGS,
    "add": node.JOINING,
    "replace": node.JOINING,
}
for group, verbs in VERBS:
    for word, function in verbs.items():
        group.command(word)(verb(function, long_file=word == "logs", flags=_FLAGS.get(word, {})))


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
