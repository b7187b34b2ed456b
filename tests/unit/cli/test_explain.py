"""The verb explain: the texts of a code, all codes, and a code that does not exist."""

from __future__ import annotations

import tomllib

import pytest

from clusterctl.cli import explain as module
from clusterctl.cli.explain import explain, explanations
from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError
from tests.support.messages import refused

SCREEN = Screen(json=False, color=False)


def test_explain_code_shows_its_texts_and_what_they_leave_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
    explain(SCREEN, "plan-changed")
    printed = capfd.readouterr().out.splitlines()
    known = explanations()["plan-changed"]
    assert known.messages
    assert known.more
    assert printed[-1] == known.more.splitlines()[-1]
    texts = [f"    {text}" for text in (*known.messages, *known.fixes)]
    assert [text for text in texts if text not in printed] == []


def test_explain_without_code_lists_every_code(capfd: pytest.CaptureFixture[str]) -> None:
    explain(SCREEN)
    listed = [line.split()[0] for line in capfd.readouterr().out.splitlines()[1:]]
    assert listed == list(explanations())
    assert len(listed) > 500


def test_explain_unknown_code_is_refused_with_a_similar_one() -> None:
    with refused("unknown-code", UsageError, "plan-changed"):
        explain(SCREEN, "plan-chnged")


def test_every_code_with_more_to_say_exists() -> None:
    more = tomllib.loads((module._DATA / "explanations.toml").read_text())
    assert more.keys() - explanations().keys() == set()
