"""Commands that texts of the program advise exist, and have the arguments that they need."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from clusterctl.cli.main import LazyVerb, app

CORE = Path(__file__).parents[3] / "clusterctl"
COMMAND = re.compile(r"`clusterctl ([^`]+)`")


def texts() -> Iterator[tuple[str, str]]:
    """Yield the strings of the source, except docstrings, and the data files, with "1" for each
    value.
    """
    for file in sorted(CORE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            match node:
                case ast.Constant() if node in docstrings:
                    continue
                case ast.Constant(value=str(text)):
                    yield f"{file.name}:{node.lineno}", text
                case ast.JoinedStr(values=parts):
                    shown = (str(p.value) if isinstance(p, ast.Constant) else "1" for p in parts)
                    yield f"{file.name}:{node.lineno}", "".join(shown)
    for file in sorted(CORE.rglob("data/*")):
        yield file.name, re.sub(r"\{[^{}]*\}", "1", file.read_text())


def fault_of(command: str) -> str:
    """Return why a command line is wrong. "" if it is right."""
    words = shlex.split(command)
    known: click.Command = app
    while isinstance(known, click.Group) and words and words[0] in known.commands:
        known = known.commands[words.pop(0)]
    if isinstance(known, click.Group) and words and not words[0].startswith("-"):
        return f"no command {words[0]}"
    try:
        (known.load() if isinstance(known, LazyVerb) else known).make_context(command, words)
    except click.UsageError as exc:
        return str(exc)
    return ""


def test_commands_in_texts_exist_and_have_their_arguments() -> None:
    found = [(place, command) for place, text in texts() for command in COMMAND.findall(text)]
    assert len(found) > 200
    # A verb may be a value.
    is_known = re.compile(r"[a-z]+ (?!1|.*--help)|[a-z]+$")
    checked = [(place, command) for place, command in found if is_known.match(command)]
    wrong = [(place, command, fault_of(command)) for place, command in checked]
    assert [each for each in wrong if each[2]] == []


def test_command_with_a_typing_error_or_without_its_argument_is_found() -> None:
    assert fault_of("colect 3")
    assert fault_of("replay")
    assert not fault_of("replay 3")
