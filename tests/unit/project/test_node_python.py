"""What runs on hosts by their own Python keeps to 3.9, which Rocky Linux 9 has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OLDEST = (3, 9)
PUT_OFF = "from __future__ import annotations"
PROGRAMS = sorted(
    [
        *ROOT.glob("ansible/library/*.py"),
        *ROOT.glob("ansible/module_utils/*.py"),
        *ROOT.glob("clusterctl/**/remote_*.py"),
        *ROOT.glob("clusterctl/**/remote/*.py"),
        ROOT / "payload" / "node" / "claim.py",
        ROOT / "payload" / "node" / "hang.py",
        ROOT / "payload" / "node" / "job.py",
        ROOT / "payload" / "node" / "requeue.py",
        ROOT / "payload" / "node" / "native.py",
        ROOT / "payload" / "node" / "ports.py",
        ROOT / "payload" / "node" / "python_stacks.py",
        ROOT / "payload" / "node" / "restarts.py",
        ROOT / "payload" / "node" / "stacks.py",
        ROOT / "payload" / "node" / "task.py",
    ]
)
NEWER_NAMES = {"tomllib", "file_digest", "hardlink_to", "batched", "pairwise", "aclosing", "chdir"}
NEWER_KEYWORDS = {("zip", "strict"), ("dataclass", "slots"), ("dataclass", "kw_only")}


def newer(tree: ast.AST) -> Iterator[str]:
    """What of the standard library came after 3.9, as far as we are likely to use it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            for keyword in node.keywords:
                if (called, keyword.arg) in NEWER_KEYWORDS:
                    yield f"{called}({keyword.arg}=), line {node.lineno}"
        elif isinstance(node, ast.ImportFrom):
            names = {node.module, *(alias.name for alias in node.names)}
            if node.module == "datetime" and "UTC" in names:
                yield f"datetime.UTC, line {node.lineno}"
            yield from (
                f"{name}, line {node.lineno}" for name in sorted(names & NEWER_NAMES, key=str)
            )
        elif isinstance(node, ast.Import):
            yield from (
                f"{a.name}, line {node.lineno}" for a in node.names if a.name in NEWER_NAMES
            )
        elif isinstance(node, ast.Attribute) and node.attr in NEWER_NAMES - {"chdir"}:
            yield f"{node.attr}, line {node.lineno}"


def unions(tree: ast.AST) -> list[str]:
    """Annotations with `|`, which are evaluated unless they are put off."""
    said: list[ast.expr | None] = []
    for node in ast.walk(tree):
        said += [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [ast.unparse(each) for each in said if each is not None and " | " in ast.unparse(each)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_runs_on_python_3_9(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text, str(path), feature_version=OLDEST)
    assert PUT_OFF in text or not unions(tree)  # `X | None` came with 3.10
    assert not list(newer(tree))
