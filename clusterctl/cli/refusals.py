"""Errors for wrong command lines, with the command to type instead."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from clusterctl.cli.verbs import VERBS
from clusterctl.errors import UsageError
from clusterctl.spec.names import did_you_mean, is_near
from clusterctl.state.workspace import Workspace

# Commands and options of other tools -> the equivalent command line of clusterctl, or several,
# separated by " | ". A key is an unknown command, or a command or group and the argument after it.
HABITS: Final = {
    "apply": "up",
    "cp": "put | get",
    "create": "up",
    "delete": "down",
    "destroy": "down",
    "exec": "ssh",
    "kill": "cancel",
    "log": "logs",
    "login": "ssh",
    "ls": "list",
    "nodes": "status",
    "ps": "jobs",
    "queue": "jobs",
    "rm": "down",
    "run": "submit",
    "sacct": "jobs --all",
    "salloc": "shell",
    "sbatch": "submit",
    "scancel": "cancel",
    "scp": "put | get",
    "sinfo": "status",
    "squeue": "jobs",
    "srun": "shell --",
    "start": "up",
    "stop": "cancel | down",
    "tail": "logs -f",
    "terminate": "down",
    "init gcp": "init --provider gcp",
    "init local": "init --provider local",
    "init onprem": "init --provider onprem",
    "node list": "status",
    "runs compare": "runs diff",
    "jobs --follow": "top",
    "submit mpirun": "submit SCRIPT -- ARGUMENTS",
    "submit python": "submit SCRIPT -- ARGUMENTS",
    "submit torchrun": "submit SCRIPT --launcher torchrun -- ARGUMENTS",
}

# The argument given to a verb without arguments, such as a cluster's name.
_EXTRA = re.compile(r"unexpected extra argument.*\(([a-z][a-z0-9-]*)\)")
_SPEC_AS_ARGUMENT = re.compile(r"unexpected extra argument.*\(([^()]+\.ya?ml)\)")
_UNKNOWN_WORD = re.compile(r"No such (?:command '(.+?)'|option:? '?([^\s']+)'?)")
# Click and Typer both suggest names of commands.
_SUGGESTED_AGAIN = re.compile(r"(Did you mean [^?]*\?) Did you mean .*")
_NEGATION = re.compile("^--(no-?)?")


def is_help(message: str) -> bool:
    """Return whether click's message is the help, which it is if no command is given."""
    return message.startswith("Usage:")


def refusal_of(exc: click.UsageError) -> UsageError:
    """Return the error for a wrong command line."""
    context = exc.ctx
    path = context.command_path if context else "clusterctl"
    near = ""
    if context is not None and isinstance(exc, click.NoSuchOption) and exc.possibilities:
        guesses = _safe_guesses(exc.possibilities, _typed(exc.option_name), context)
        near = did_you_mean(exc.option_name, guesses)
        exc = click.NoSuchOption(exc.option_name, possibilities=guesses, ctx=context)
    text = _SUGGESTED_AGAIN.sub(r"\1", exc.format_message())
    is_group = context is not None and isinstance(context.command, click.Group)
    fix = f"`{path} --help` lists the {'commands' if is_group else 'options'}"
    if is_help(text):
        text = "no command was given"
    elif match := _SPEC_AS_ARGUMENT.search(text):
        # The option -f of `logs` is --follow.
        option = "--file" if path.endswith(" logs") else "-f"
        fix = f"name a spec file with `{shlex.join([option, match[1]])}`"
    elif extra := _EXTRA.search(text):
        fix = _fix_for_extra_word(path.removeprefix("clusterctl").lstrip(), extra[1]) or fix
    elif context is not None and (unknown := _UNKNOWN_WORD.match(text)):
        verb = path.removeprefix("clusterctl").lstrip()
        text, fix = _explain_unknown(unknown, verb, fix)
    error = UsageError(text.rstrip("."), about="command-line", fix=fix)
    if near:
        error.fix = f"{near} Otherwise {error.fix}"
    return error


def _explain_unknown(unknown: re.Match[str], verb: str, fix: str) -> tuple[str, str]:
    """Return the message and the fix for an unknown command or option of a verb or group.

    fix: returned if no other fix is known.
    """
    word = unknown[1] or unknown[2]
    if equivalent := _equivalent(verb, word):
        return unknown[0], _shown(equivalent)
    if verb != "submit":
        return unknown.string, fix
    fix = f"`clusterctl submit JOB -- {word}` passes it to the program"
    if advice := _advice_for_sbatch_option(word):
        return f"{unknown[0]}, which is an option of sbatch", f"{advice}; {fix}"
    return unknown.string, fix


def _shown(lines: str) -> str:
    """Return the command lines of an entry of HABITS as the text of a fix."""
    return " or ".join(f"`clusterctl {line}`" for line in lines.split(" | "))


def _fix_for_extra_word(verb: str, word: str) -> str:
    """Return the fix for an argument of a verb without arguments. "": no fix is known."""
    if habit := HABITS.get(f"{verb} {word}"):
        return _shown(habit)
    if Workspace.of(word).root.is_dir():
        return f"choose the cluster with an option: `clusterctl {verb} --cluster {word}`"
    return ""


def _equivalent(verb: str, word: str) -> str | None:
    """Return the command line for a word of another tool, for a command in other letters, or for a
    command without its group, such as ``runs diff`` for ``diff``.
    """
    words = f"{verb} {word}".lstrip()
    if habit := HABITS.get(words):
        return habit
    if (lower := words.lower()) in VERBS:
        return lower
    if verb:
        return None
    return next((words for words in VERBS if words.endswith(f" {word}")), None)


def _advice_for_sbatch_option(word: str) -> str:
    """Return the fix for an option of sbatch, such as ``-w``; "" for another unknown option."""
    # Other commands do not need the options of sbatch.
    from clusterctl.spec.job_options import flags_for
    from clusterctl.spec.sbatch import directives_in

    directive = next(directives_in((0, text) for text in _typed(word)))
    option = directive.option
    if option is None or word not in {directive.own_name, f"-{option.letter}"}:
        return ""
    if option.role and not option.use:
        why = f": {option.instead}" if option.instead else f", because clusterctl sets {word}"
        return f"leave it out{why}"
    if flags := flags_for(directive):
        return f"use `clusterctl submit JOB {flags}`"
    value = "=VALUE" if option.value == "required" and directive.value is None else ""
    return (
        f"`clusterctl submit JOB --slurm {shlex.quote(f'{directive}{value}')}` passes it to sbatch"
    )


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


def _safe_guesses(names: Sequence[str], typed: Sequence[str], context: click.Context) -> list[str]:
    """Return the names that neither mean an option's opposite nor misread the word after it."""
    params = [
        param for param in context.command.get_params(context) if getattr(param, "is_flag", False)
    ]
    flags = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    word, equals, _ = typed[0].partition("=")
    if equals:
        names = [name for name in names if name not in flags]
    elif len(typed) == 1:
        names = [name for name in names if name in flags]
    return [
        name
        for name in names
        if _NEGATION.sub("", name) != _NEGATION.sub("", word) and is_near(name, word)
    ]


def reject_words_before_dashes(
    verb: str, typed: Sequence[str], parameters: Mapping[str, Any]
) -> None:
    """Reject arguments between JOB and ``--``, which may be meant for verb or program.

    Also reject a missing JOB. typed: all arguments after the verb. parameters: name -> value found
        by click.
    """
    target = parameters["target"]
    args = parameters["args"] or ()
    if parameters.get("run_module") is not None:
        args = [*filter(None, [target]), *args]
    elif not target:
        raise UsageError(
            "JOB is missing",
            about="command-line",
            fix=f"`clusterctl {verb} --help` lists the jobs and options",
        )
    count_after = len(typed) - typed.index("--") - 1 if "--" in typed else 0
    words = shlex.join(args[: max(0, len(args) - count_after)])
    if words:
        correct = HABITS.get(f"submit {target}", f"{verb} JOB [OPTIONS] -- {words}")
        raise UsageError(
            f"arguments of the program must come after --: {words}",
            about="program-arguments",
            fix=f"run `clusterctl {correct}`",
        )
