"""Texts of errors and notes are clauses, and name commands that exist, in backticks."""

from __future__ import annotations

import re

from scripts.message_reference import Message, messages
from tests.unit.project.test_manual import understood

COMMAND = re.compile(r"`(clusterctl [^`]*)`")
BARE = re.compile(
    r"\bclusterctl (up|down|status|ssh|logs|jobs|collect|cancel|submit|list|validate|cache|init)\b"
)


def placed() -> list[Message]:
    """The messages of places in the source."""
    return [message for message in messages()[0] if message.place]


def test_message_and_fix_are_clauses() -> None:
    texts = [(one.place, text) for one in placed() for text in (*one.whats, *one.fixes)]
    assert len(texts) > 100
    assert [each for each in texts if each[1].endswith((".", "!", "\n"))] == []


def test_commands_in_a_fix_exist_and_are_in_backticks() -> None:
    fixes = [(one.place, text) for one in placed() for text in one.fixes]
    commands = [(place, command) for place, fix in fixes for command in COMMAND.findall(fix)]
    assert commands
    assert [each for each in commands if not understood(each[1].split()[1:])] == []
    assert [each for each in fixes if BARE.search(COMMAND.sub("", each[1]))] == []
