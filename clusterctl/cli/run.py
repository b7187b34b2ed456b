"""The entry point: parse the command line, run a command, turn errors and signals into an exit
code.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import re
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from clusterctl.cli import options
from clusterctl.cli.options import INTERRUPTED, argument, verb
from clusterctl.cli.output import Screen, Terminated, silence, writing
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.spec.names import did_you_mean

PROGRAM = "clusterctl"
# The error that Typer raises for a wrong command line. It has no public name in all versions of
# Typer.
_CommandLineError: Final[Any] = typer.BadParameter.__base__
# A shell's completion script sets this variable to get completions. If it is source_SHELL, Typer
# prints the script.
VARIABLE = "_CLUSTERCTL_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(screen: Screen, shell: Annotated[Shell, argument("Your shell.")]) -> None:
    """Print the completion script of a shell.

    bash: eval "$(clusterctl completion bash)" in ~/.bashrc; zsh the same in ~/.zshrc, after
        compinit;
    fish: clusterctl completion fish > ~/.config/fish/completions/clusterctl.fish
    """
    os.environ[VARIABLE] = f"source_{shell}"
    _register_shells()
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        app(prog_name=PROGRAM)
    script = printed.getvalue().strip()
    screen.document({"shell": shell.value, "script": script}, script)


def _register_shells() -> None:
    """Register shells with Typer. Typer does this only for programs with Typer's completion
    options.
    """
    other_program = typer.Typer(add_completion=True)
    other_program.command()(lambda: None)
    typer.main.get_command(other_program)


# Command -> its module and function, and the first sentence of its help.
VERBS: Final = {
    "init": ("spec:init", "Write a commented cluster.yaml."),
    "validate": ("spec:validate", "Validate a spec, and report all errors with their lines."),
    "schema": ("spec:schema", "Print the JSON Schema of the spec, for editors."),
    "doctor": ("plan:doctor", "Check the hosts and report problems."),
    "attach": ("attach:attach", "Use an existing Slurm cluster with your own account."),
    "detach": ("attach:detach", "Remove clusterctl's files from an attached cluster."),
    "plan": ("plan:plan", "Show what `up` would change, and its cost."),
    "up": ("up:up", "Create or repair the cluster."),
    "down": ("down:down", "Collect runs, remove the cluster, and verify the cleanup."),
    "status": ("jobs:status", "Show the state of nodes and jobs."),
    "list": ("listing:list_", "List your clusters, kept storage, and orphans on this machine."),
    "submit": ("submit:submit", "Submit a bundled job, your own script, or a job file."),
    "rehearse": ("rehearse:rehearse", "Cause faults in your job, and show whether it survives."),
    "replay": ("replay:replay", "Submit a collected run again, unchanged."),
    "jobs": ("jobs:jobs", "List your jobs, newest first, or show a single job in full."),
    "logs": ("job:logs", "Print a job's stdout and stderr."),
    "stacks": ("job:stacks", "Show where the ranks of a running job are."),
    "cancel": ("job:cancel", "Cancel jobs."),
    "collect": ("collect:collect", "Copy runs from the cluster, with the SHA-256 of each file."),
    "runs list": ("runs:list_", "List collected runs, newest first."),
    "runs show": ("runs:show", "Show a collected run in full."),
    "runs diff": ("runs:diff", "Compare two runs."),
    "runs rm": ("runs:rm", "Remove collected runs from this machine, after asking."),
    "report": ("runs:report", "Write the report of a run, a sweep, or several runs."),
    "ssh": ("access:ssh", "Open a shell on a host, or run a command there."),
    "shell": ("access:shell", "Open a shell, or run a command, on allocated nodes."),
    "code": ("access:code", "Connect ssh, and editors that use it, to a running job."),
    "put": ("files:put", "Copy files and folders to the cluster."),
    "get": ("files:get", "Copy files and folders from the cluster."),
    "completion": ("run:completion", "Print the completion script of a shell."),
    "image bake": (
        "up:bake",
        "Build the image for new nodes, unless it exists for this configuration.",
    ),
    "cache list": (
        "listing:cache_list",
        (
            "List the cached node images; for a cloud spec, also the images in its project, "
            "with their cost."
        ),
    ),
    "cache prune": (
        "listing:cache_prune",
        (
            "Remove cached node images that no cluster uses; with --images, also the images in "
            "a cloud project."
        ),
    ),
    "storage list": ("listing:storage_list", "List the kept storage of all clusters."),
    "storage remove": ("down:storage_remove", "Remove kept storage with all data on it."),
    "orphans list": (
        "down:orphans_list",
        "List orphans: clusters with this name but no workspace, with their cost.",
    ),
    "orphans remove": (
        "down:orphans_remove",
        "Remove orphans: clusters with this name but no workspace.",
    ),
    "node drain": ("node:drain", "Drain nodes: no new jobs start, running jobs continue."),
    "node resume": ("node:resume", "Resume nodes, so that jobs can start on them again."),
    "node reboot": (
        "node:reboot",
        "Reboot nodes once idle: drain them, wait for running jobs, then reboot.",
    ),
    "node remove": ("node:remove", "Remove nodes from the cluster and restore the machines."),
    "node forget": (
        "node:forget",
        "Forget removed nodes that could not be restored and no longer exist.",
    ),
    "node add": ("node:add", "Add machines of the spec to the running cluster."),
    "node replace": ("node:replace", "Replace the machines of nodes; the node names stay."),
    "bundle create": (
        "bundle:create",
        "Pack OS packages with dependencies and Python wheels into a file.",
    ),
    "bundle verify": (
        "bundle:verify",
        "Verify that a bundle is intact and matches clusterctl and the spec.",
    ),
    "bundle show": ("bundle:show", "Show the manifest of a bundle."),
}
_GROUPS: Final = {
    "image": "Images that nodes start from.",
    "cache": "The cache of node images.",
    "runs": "Collected runs. Without a command, `clusterctl runs` is `clusterctl runs list`.",
    "storage": "Storage that outlived its cluster (storage.keep).",
    "orphans": "Clusters without a workspace.",
    "node": "Manage individual nodes without affecting the others.",
    "bundle": "Packages and programs for air-gapped hosts, in a single file.",
}
# Commands and options of other tools -> the equivalent command line of clusterctl. A key is an
# unknown command, or a command or group and the argument after it.
HABITS: Final = {
    "apply": "up",
    "create": "up",
    "delete": "down",
    "exec": "ssh",
    "kill": "cancel",
    "ls": "list",
    "ps": "jobs",
    "rm": "down",
    "run": "submit",
    "sacct": "jobs --all",
    "salloc": "shell",
    "sbatch": "submit",
    "scancel": "cancel",
    "sinfo": "status",
    "squeue": "jobs",
    "srun": "shell --",
    "tail": "logs -f",
    "runs compare": "runs diff",
    "jobs --follow": "jobs --watch",
    "submit mpirun": "submit SCRIPT -- ARGUMENTS",
    "submit python": "submit SCRIPT -- ARGUMENTS",
    "submit torchrun": "submit SCRIPT --launcher torchrun -- ARGUMENTS",
}


class LazyVerb(TyperCommand):
    """A command that imports its module only when it is called or its help is shown."""

    def __init__(self, name: str, target: str, summary: str) -> None:
        super().__init__(name, help=summary, rich_markup_mode=None)
        self._target = target

    def load(self) -> TyperCommand:
        """Import the module of the command. Return the command with its parameters and its full
        help.
        """
        name, _, function = self._target.partition(":")
        module = importlib.import_module(f"clusterctl.cli.{name}")
        return command(str(self.name), verb(getattr(module, function)))

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        loaded = self.load()
        typed = tuple(args)
        try:
            context = loaded.make_context(info_name, args, parent, **extra)
        except _CommandLineError as exc:
            # With a context, the message contains the name of the command.
            if getattr(exc, "ctx", self) is None:
                context = typer.Context(loaded, info_name=info_name, parent=parent)
                exc.ctx = context
            raise
        # During completion, the command line is incomplete.
        if self.name in {"submit", "rehearse"} and not context.resilient_parsing:
            _reject_words_before_dashes(self.name, typed, context.params)
        return context


class _Group(TyperGroup):
    """A group of commands. Without a command, it runs its command ``list``, if there is such a
    command.
    """

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
        for name, summary in _GROUPS.items()
    }
    for words, (target, summary) in VERBS.items():
        *group, name = words.split()
        (groups[group[0]] if group else program).add_command(LazyVerb(name, target, summary))
    for group_of_verbs in groups.values():
        program.add_command(group_of_verbs)
    return program


app: Final = _program()

_SIGNALLED = 128
_SPEC_AS_ARGUMENT = re.compile(r"unexpected extra argument.*\(([^()]+\.ya?ml)\)")
_UNKNOWN_WORD = re.compile(r"No such (?:command '(.+?)'|option:? '?([^\s']+)'?)")
_NEGATION = re.compile("^--(no-?)?")
_SOON_S = 0.05


def run() -> int:
    """Run the command in ``sys.argv``, and return the exit code."""
    end_by_signals()
    if VARIABLE in os.environ:
        _register_shells()
    try:
        # Commands handle errors of their own output; `writing` handles errors of click's output,
        # the help.
        with writing(sys.stdout):
            code = app(prog_name=PROGRAM, standalone_mode=False) or 0
            sys.stdout.flush()
    except _CommandLineError as exc:
        return _refuse(exc)
    except ClusterctlError as exc:
        # The command line is wrong, or the error of a command could not be shown.
        return _show(exc, json=isinstance(exc, UsageError) and _wants_json())
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(code)


def end_by_signals() -> None:
    """Make SIGTERM and SIGHUP end clusterctl like Ctrl-C, together with the processes that it
    started.
    """

    def end(number: int, _: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr) if number == signal.SIGHUP else ():
            # A character device is the terminal, which is closed.
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                silence(stream)
        raise Terminated(_SIGNALLED + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        # A handler set by `nohup` is kept.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    sys.unraisablehook = _signal_again


def _signal_again(lost: sys.UnraisableHookArgs) -> None:
    """Send clusterctl a signal again if Python dropped the signal's exception, as it does in
    finalizers.
    """
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


def _refuse(exc: Any) -> int:
    context: typer.Context | None = getattr(exc, "ctx", None)
    path = context.command_path if context else "clusterctl"
    near = ""
    if context is not None and getattr(exc, "possibilities", None) and hasattr(exc, "option_name"):
        exc.possibilities = _safe_guesses(exc.possibilities, _typed(exc.option_name), context)
        near = did_you_mean(exc.option_name, exc.possibilities)
    text = exc.format_message().replace("Value error, ", "")
    json = _wants_json()
    # Without a command, click's message is the help.
    if text.startswith("Usage:"):
        if not json:
            typer.echo(text, err=True)
            return UsageError.exit_code
        text = "no command was given"
    is_group = context is not None and isinstance(context.command, TyperGroup)
    fix = f"`{path} --help` lists the {'commands' if is_group else 'options'}"
    text, fix = _explain_unknown(text, fix, context)
    if match := _SPEC_AS_ARGUMENT.search(text):
        # The option -f of `logs` is --follow.
        option = "--file" if path.endswith(" logs") else "-f"
        fix = f"name a spec file with `{shlex.join([option, match[1]])}`"
    error = UsageError(text.rstrip("."), code="bad-command-line", fix=fix)
    error.fix = " Otherwise ".join(filter(None, (near, error.fix)))
    return _show(error, json=json)


def _explain_unknown(text: str, fix: str, context: typer.Context | None) -> tuple[str, str]:
    unknown = _UNKNOWN_WORD.match(text)
    if unknown is None or context is None:
        return text, fix
    word = unknown[1] or unknown[2]
    verb = context.command_path.removeprefix(PROGRAM).lstrip()
    of_group = next((words for words in VERBS if not verb and words.endswith(f" {word}")), None)
    habit = HABITS.get(f"{verb} {word}".lstrip(), of_group)
    if habit:
        return unknown[0], f"`{PROGRAM} {habit}`"
    if verb == "submit":
        fix = f"`{PROGRAM} submit JOB -- {word}` passes it to the program"
        if advice := _advice_for_sbatch_option(word):
            return f"{unknown[0]}, which is an option of sbatch", f"{advice}; {fix}"
    return text, fix


def _advice_for_sbatch_option(word: str) -> str:
    """Return the fix for an option of sbatch, such as ``-w``, or an empty text for another unknown
    option.
    """
    # Other commands do not need the options of sbatch.
    from clusterctl.spec.job_options import flags_for
    from clusterctl.spec.sbatch import requests

    request = next(requests((0, text) for text in _typed(word)))
    option = request.option
    if option is None or word not in {request.own_name, f"-{option.letter}"}:
        return ""
    if option.role and not option.use:
        return f"leave it out, because clusterctl sets {word}"
    if flags := flags_for(request):
        return f"use `{PROGRAM} submit JOB {flags}`"
    value = "=VALUE" if option.value == "required" and request.value is None else ""
    return f"`{PROGRAM} submit JOB --slurm {shlex.quote(f'{request}{value}')}` passes it to sbatch"


def _typed(option: str) -> list[str]:
    """Return an unknown option as the user typed it, and the next word unless this is an option."""
    # A value can be part of the word: --nodelist=a-1, -wa-1.
    beginning = f"{option}=" if option.startswith("--") else option
    for index, word in enumerate(sys.argv):
        if word == option or word.startswith(beginning):
            return [
                word,
                *(text for text in sys.argv[index + 1 : index + 2] if not text.startswith("-")),
            ]
    return [option]


def _safe_guesses(names: Sequence[str], typed: Sequence[str], context: typer.Context) -> list[str]:
    """Return the names that neither mean the opposite of an unknown option nor misread the word
    after it.
    """
    params = [
        param for param in context.command.get_params(context) if getattr(param, "is_flag", False)
    ]
    flags = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    word, equals, _ = typed[0].partition("=")
    if equals:
        names = [name for name in names if name not in flags]
    elif len(typed) == 1:
        names = [name for name in names if name in flags]
    return [name for name in names if _NEGATION.sub("", name) != _NEGATION.sub("", word)]


def _reject_words_before_dashes(
    verb: str, typed: Sequence[str], parameters: Mapping[str, Any]
) -> None:
    """Reject arguments between JOB and ``--``, because they may be meant for the verb or for the
    program.

    Also reject a missing JOB. typed: all arguments after the verb. parameters: name -> value found
        by click.
    """
    target = parameters["target"]
    args = parameters["args"] or ()
    if parameters.get("module") is not None:
        args = [*filter(None, [target]), *args]
    elif not target:
        raise UsageError(
            "JOB is missing",
            code="bad-command-line",
            fix=f"`{PROGRAM} {verb} --help` lists the jobs and options",
        )
    count_after = len(typed) - typed.index("--") - 1 if "--" in typed else 0
    words = shlex.join(args[: max(0, len(args) - count_after)])
    if words:
        correct = HABITS.get(f"submit {target}", f"{verb} JOB [OPTIONS] -- {words}")
        raise UsageError(
            f"arguments of the program must come after --: {words}",
            code="words-before-dashes",
            fix=f"run `{PROGRAM} {correct}`",
        )


def _show(error: ClusterctlError, *, json: bool = False) -> int:
    color = "--no-color" not in sys.argv and not os.environ.get("NO_COLOR")
    Screen(json=json, color=color).error(error)
    return error.exit_code


def _wants_json() -> bool:
    """Return whether the command line, which click may have rejected, asks for JSON."""
    words = itertools.takewhile(lambda word: word != "--", sys.argv[1:])
    return re.search("(^| )(-o ?|--output[ =])json( |$)", " ".join(words)) is not None
