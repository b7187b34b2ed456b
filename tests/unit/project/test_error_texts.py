"""Errors have one shape: what happened, as a clause; commands in backticks, and ones that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.manual import ROOT
from tests.unit.project.test_manual import understood

COMMAND = re.compile(r"`(clusterctl [^`]*)`")
BARE = re.compile(
    r"\bclusterctl (up|down|status|ssh|logs|jobs|collect|cancel|submit|list|validate|cache|init)\b"
)


def errors_raised() -> Iterator[tuple[str, ast.Call]]:
    """Every place in the program that makes one."""
    for path in sorted((ROOT / "clusterctl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and makes_an_error(node.func):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def makes_an_error(function: ast.expr) -> bool:
    """Whether it is a class of errors, or a method of one such as ``of_hosts``."""
    named = function.value if isinstance(function, ast.Attribute) else function
    return isinstance(named, ast.Name) and named.id.endswith("Error")


def text(node: ast.expr) -> str:
    """A literal, with `…` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            text(part) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return ""


def test_what_and_fix_are_clauses() -> None:
    wrong = []
    for where, call in errors_raised():
        said = [text(argument) for argument in call.args]
        said += [text(keyword.value) for keyword in call.keywords if keyword.arg == "fix"]
        wrong += [f"{where}: {one!r}" for one in said if one.endswith((".", "!", "\n"))]
    assert not wrong


def test_commands_in_a_fix_are_marked_and_exist() -> None:
    wrong = []
    for where, call in errors_raised():
        for keyword in call.keywords:
            fix = text(keyword.value) if keyword.arg == "fix" else ""
            wrong += [
                f"{where}: {c}" for c in COMMAND.findall(fix) if not understood(c.split()[1:])
            ]
            if BARE.search(COMMAND.sub("", fix)):
                wrong.append(f"{where}: a command without backticks: {fix!r}")
    assert not wrong


def test_errors_are_found() -> None:
    assert len(list(errors_raised())) > 100
