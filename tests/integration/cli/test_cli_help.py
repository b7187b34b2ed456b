"""The help: the usual options of a command with many, all of them, and the groups of commands."""

from __future__ import annotations

from clusterctl.cli.help import HelpOption
from clusterctl.cli.main import LazyVerb
from clusterctl.cli.verbs import GROUPS, VERBS, Panel
from tests.support.verbs import Clusterctl


def options_of(verb: str) -> list[HelpOption]:
    params = LazyVerb(verb).load().params
    return [each for each in params if isinstance(each, HelpOption) and not each.hidden]


def test_help_of_submit_has_the_usual_options_and_help_all_each(cli: Clusterctl) -> None:
    short, whole = cli("submit", "--help").stdout, cli("submit", "--help-all").stdout
    for each in options_of("submit"):
        assert f"{each.opts[0]} " in f"{whole} "
        assert (f"{each.opts[0]} " in short) == each.is_usual
    assert "--help-all" in short
    assert len(short.splitlines()) < 40


def test_help_of_few_options_has_all(cli: Clusterctl) -> None:
    shown = cli("logs", "--help").stdout
    assert all(each.opts[0] in shown for each in options_of("logs"))
    assert "--help-all" not in shown


def test_help_of_the_program_has_each_command_below_its_panel(cli: Clusterctl) -> None:
    shown = cli("--help").stdout
    for panel in Panel:
        section = shown.partition(f"\n{panel.value}:\n")[2].partition("\n\n")[0]
        names = [line.split()[0] for line in section.splitlines()]
        verbs = {words.split()[0] for words, verb in VERBS.items() if verb.panel is panel}
        groups = {name for name, group in GROUPS.items() if group.panel is panel}
        assert {*names} == verbs | groups
