"""completion: what a shell reads to complete our words."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.show import Screen

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
    """Print a script that completes verbs, options, jobs and hosts.

    bash: eval "$(clusterctl completion bash)" in ~/.bashrc; zsh the same in ~/.zshrc, after compinit;
    fish: clusterctl completion fish > ~/.config/fish/completions/clusterctl.fish
    """
    from typer._completion_shared import get_completion_script

    del options
    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value)
    screen.document({"shell": shell.value, "script": script}, script)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(verb(completion))
