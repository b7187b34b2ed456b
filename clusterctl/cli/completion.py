"""The command completion."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from clusterctl.cli.main import COMPLETION_VARIABLE, PROGRAM, app
from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_KINDS: Final[Mapping[Shell, type[ShellComplete]]] = {
    Shell.BASH: BashComplete,
    Shell.ZSH: ZshComplete,
    Shell.FISH: FishComplete,
}


def completion(screen: Screen, shell: Annotated[Shell, argument("Your shell.")]) -> None:
    """Print the completion script of a shell.

    bash: eval "$(clusterctl completion bash)" in ~/.bashrc; zsh the same in ~/.zshrc, after
        compinit;
    fish: clusterctl completion fish > ~/.config/fish/completions/clusterctl.fish
    """
    script = _KINDS[shell](app, {}, PROGRAM, COMPLETION_VARIABLE).source().strip()
    screen.document({"shell": shell.value, "script": script}, script)
