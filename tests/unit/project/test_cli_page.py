"""docs/cli.md is written from the code; whoever changes a verb or an option writes it again."""

from __future__ import annotations

import typer

from clusterctl.cli.run import app
from scripts.cli_reference import PAGE, reference, verbs


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make reference`"


def test_every_verb_and_option_is_explained() -> None:
    for path, command in verbs(typer.main.get_command(app)):
        assert command.help, path
        for param in command.params:
            assert getattr(param, "help", ""), f"{' '.join(path)}: {param.name}"
