"""Each package that an installation brings is used by the program."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].values()
DEPENDENCIES = sorted(
    canonicalize_name(Requirement(line).name)
    for lines in (PROJECT["dependencies"], *EXTRAS)
    for line in lines
)

# Modules with another name than their package.
MODULES = {
    "ansible-core": "ansible",
    "clustershell": "ClusterShell",
    "cupy-cuda12x": "cupy",
    "google-auth": "google.auth",
    "pyyaml": "yaml",
    "ruamel-yaml": "ruamel.yaml",
}
# Packages that are run as programs: a file that does it, and the words for it there.
PROGRAMS = {
    "pip": ("clusterctl/packages/wheelhouse.py", '"-m", "pip"'),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports when it runs, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imported(ast.Module([other], []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """The modules that our files import, each also by the names of its packages."""
    files = [
        file for top in ("clusterctl", "payload", "ansible") for file in (ROOT / top).rglob("*.py")
    ]
    names = {name for file in files for name in imported(ast.parse(file.read_text()))}
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.|$", name)}


@pytest.mark.parametrize("package", DEPENDENCIES)
def test_dependency_is_used(package: str, modules: set[str]) -> None:
    if package in PROGRAMS:
        file, word = PROGRAMS[package]
        assert word in (ROOT / file).read_text()
    else:
        assert MODULES.get(package, package.replace("-", "_")) in modules
