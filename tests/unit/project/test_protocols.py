"""Schedulers are known by their protocol: outside of scheduler/ nothing names the class of one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import clusterctl

PACKAGE = Path(clusterctl.__file__).parent
CLIENTS = {"SlurmClient", "SlurmNodes", "MpirunClient"}
MODULES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in {"scheduler", "_assets"}
)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_outside_scheduler_names_a_schedulers_client(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names |= {alias.name for node in imported for alias in node.names}
    assert not names & CLIENTS
