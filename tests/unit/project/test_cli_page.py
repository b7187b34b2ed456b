"""docs/cli.md is written from the code; whoever changes a verb or an option writes it again."""

from __future__ import annotations

from clusterctl.cli.run import app
from scripts.cli_reference import PAGE, reference, verbs


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make reference`"


def test_every_verb_and_option_is_explained() -> None:
    for path, command in verbs(app):
        assert command.help, path
        for param in command.params:
            assert getattr(param, "help", ""), f"{' '.join(path)}: {param.name}"


def test_the_list_of_verbs_says_the_first_sentence_of_each() -> None:
    for path, command in verbs(app):
        *group, name = path
        verb = app.commands[group[0]].commands[name] if group else app.commands[name]
        assert f"{command.help} ".replace("\n", " ").startswith(f"{verb.help} "), path
