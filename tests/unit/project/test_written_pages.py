"""docs/cli.md and docs/platforms.md are written from the code and the tests, and are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cli.run import app
from scripts import cli_reference, platforms
from scripts.cli_reference import verbs


def test_the_pages_are_up_to_date() -> None:
    assert cli_reference.PAGE.read_text() == cli_reference.reference(), "run `make reference`"
    assert platforms.PAGE.read_text() == platforms.page(), "run `make reference`"


@pytest.mark.parametrize("words", ['"real", "debian-14"', '"nearly", "debian-12"'])
def test_a_marker_of_an_unknown_platform_or_way_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(f"pytestmark = pytest.mark.platform({words})\n")
    monkeypatch.setattr(platforms, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="no such platform or way"):
        platforms.page()


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
