"""A provider is known by its protocol: outside `providers/` and `spec/` no module asks which one it
is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from clusterctl.providers.base import Provider
from clusterctl.spec.models import PROVIDERS

PACKAGE = Path(__file__).parents[3] / "clusterctl"
OUTSIDE = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in {"providers", "spec"}
)
SETTINGS = {settings.__name__ for settings in PROVIDERS.values()}
FOLDERS = tuple(f"clusterctl.providers.{name}" for name in PROVIDERS)


def questions(tree: ast.AST) -> Iterator[str]:
    """The places that ask which provider it is."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                full = [module, *(f"{module}.{one.name}" for one in names)]
                if any(
                    name == folder or name.startswith(f"{folder}.")
                    for name in full
                    for folder in FOLDERS
                ):
                    yield f"line {node.lineno}: imports {module}"
                if SETTINGS & {one.name for one in names}:
                    yield f"line {node.lineno}: imports the settings of one provider"
            case ast.Compare(left=ast.Attribute(attr="kind")):
                # Of the shared folder, which may be `existing`.
                continue
            case ast.Compare():
                told = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
                if any(value in PROVIDERS for value in told if isinstance(value, str)):
                    yield f"line {node.lineno}: compares with the name of one provider"
            case ast.MatchValue(value=ast.Constant(value=str(value))) if value in PROVIDERS:
                yield f"line {node.lineno}: matches the name of one provider"


@pytest.mark.parametrize("name", PROVIDERS)
def test_each_provider_is_found_by_its_type(name: str) -> None:
    module = import_module(f"clusterctl.providers.{name}.provider")
    assert Provider in getattr(module, f"{name.title()}Provider").__mro__


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_outside_asks_which_provider_it_is(path: Path) -> None:
    assert list(questions(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_neither_cluster_nor_cli_asks_which_scheduler_it_is(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] in {"cluster", "cli"}:
        asked = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert not asked & {"has_slurm", "scheduler_type"}


@pytest.mark.parametrize(
    "code",
    [
        "from clusterctl.providers.onprem import release",
        "from clusterctl.providers import gcp",
        "from clusterctl.providers.local.provider import LocalProvider",
        "from clusterctl.spec.gcp import GcpSettings",
        "if spec.provider.type == 'gcp': pass",
        "limit = chosen if inventory.provider in ('onprem', 'local') else ()",
        "match provider:\n    case 'local': pass",
    ],
)
def test_each_way_to_ask_is_found(code: str) -> None:
    assert len(list(questions(ast.parse(code)))) >= 1


@pytest.mark.parametrize(
    "code",
    [
        "from clusterctl.providers.registry import provider_of",
        "if spec.provider.user_owned: pass",
        "if there != spec.provider.type: pass",
        "provider = 'local'",
    ],
)
def test_what_goes_through_the_protocol_is_not(code: str) -> None:
    assert list(questions(ast.parse(code))) == []
