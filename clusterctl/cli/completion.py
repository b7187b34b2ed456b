"""The command completion, and the answers to a shell that completes a command line."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from enum import StrEnum
from typing import Annotated

import typer

from clusterctl.cli.main import COMPLETION_VARIABLE, PROGRAM, app
from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen


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
    os.environ[COMPLETION_VARIABLE] = f"source_{shell}"
    register_shells()
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        app(prog_name=PROGRAM)
    script = printed.getvalue().strip()
    screen.document({"shell": shell.value, "script": script}, script)


def register_shells() -> None:
    """Register shells with Typer, which does this only for programs with its completion options."""
    other_program = typer.Typer(add_completion=True)
    other_program.command()(lambda: None)
    typer.main.get_command(other_program)
