"""The table of codes in docs/json.md has the kinds of failures that the source raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Calls whose ``code`` names a cause, a finding or a mistake, which are not failures.
OTHERS = {"Cause", "Notice", "Problem"}


def codes(tree: ast.AST) -> Iterator[str]:
    """Yield the codes of failures that a module names."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Failure"), args=[ast.Constant(value=str(code)), *_]):
                yield code
            case ast.Call(func=ast.Name(id=name)) if name in OTHERS:
                continue
            case ast.Call(keywords=keywords) | ast.ClassDef(keywords=keywords):
                given = [keyword.value for keyword in keywords if keyword.arg == "code"]
                for value in given:
                    is_choice = isinstance(value, ast.IfExp)
                    for each in [value.body, value.orelse] if is_choice else [value]:
                        if isinstance(each, ast.Constant):
                            yield str(each.value)


def test_table_of_codes_has_each_kind_of_failure() -> None:
    files = (ROOT / "clusterctl").rglob("*.py")
    raised = {code for file in files for code in codes(ast.parse(file.read_text()))}
    for name in (
        "providers/gcp/data/diagnoses.yaml",
        "providers/onprem/data/refusals.yaml",
        "transport/data/sudo.yaml",
        "transport/data/tunnels.yaml",
    ):
        text = (ROOT / "clusterctl" / name).read_text()
        raised |= set(re.findall(r"^- code: ([\w-]+)$", text, re.MULTILINE))
    section = (ROOT / "docs/json.md").read_text().partition("\n## Codes\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE))
    assert (raised - listed - {""}, listed - raised) == (set(), set())


def test_code_that_is_raised_is_found() -> None:
    source = "raise UsageError('x', code='new-kind')\nclass A(B, code='of-class'): ...\nFailure('plain', 'x')"
    source += "\nraise UsageError('x', code='one' if x else 'other')"
    assert {*codes(ast.parse(source))} == {"new-kind", "of-class", "plain", "one", "other"}
