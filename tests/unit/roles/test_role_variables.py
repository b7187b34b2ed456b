"""The variables that roles use are defined: Ansible notices others only on the host that needs
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2.meta
import pytest
import yaml

from clusterctl.util.assets import data_folder

ROLES = data_folder("ansible") / "roles"
NAMES = sorted(path.name for path in ROLES.iterdir())
# Keywords whose value is an expression without braces.
EXPRESSIONS = {"when", "until", "failed_when", "changed_when", "that"}
# Ansible's own, and those of the loop.
OF_ANSIBLE = {
    *("ansible_check_mode", "ansible_facts", "ansible_managed", "ansible_play_hosts_all"),
    *("groups", "hostvars", "inventory_hostname", "item", "lookup", "omit", "query", "role_path"),
}
# The inventory's, for every role.
OF_INVENTORY = {"clusterctl_image", "clusterctl_keeps", "clusterctl_release"}
# Registered by playbooks.
OF_PLAYBOOKS: set[str] = set()


class AnyName(dict[str, Any]):
    """All filters or tests: those of Ansible are not known to Jinja."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ARG002
        return bool


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def tasks_of(role: str) -> list[Any]:
    parts = ("tasks", "handlers")
    return [document(path) for part in parts for path in sorted(ROLES.glob(f"{role}/{part}/*.yml"))]


@cache
def defined_by(role: str) -> set[str]:
    """What a role defines by its files, and what its caller must give it."""
    found = set[str]()
    for path in (*ROLES.glob(f"{role}/defaults/*.yml"), *ROLES.glob(f"{role}/vars/*.yml")):
        found |= (document(path) or {}).keys()
    for one in document(ROLES / role / "meta/argument_specs.yml")["argument_specs"].values():
        found |= one.get("options", {}).keys()
    for key, value in values_of(tasks_of(role)):
        if key in {"register", "loop_var"}:
            found.add(value)
        elif key in {"vars", "ansible.builtin.set_fact"} and isinstance(value, dict):
            found |= value.keys()
    return found


def values_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values of a document, with the key that each has or that is above its list."""
    yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from values_of(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from values_of(inner, key)


def used_by(role: str) -> set[str]:
    """The variables in the role's expressions and templates."""
    files = [*ROLES.glob(f"{role}/defaults/*.yml"), *ROLES.glob(f"{role}/vars/*.yml")]
    documents = [*tasks_of(role), *(document(path) for path in files)]
    texts = [path.read_text() for path in ROLES.glob(f"{role}/templates/*.j2")]
    for key, value in (pair for one in documents for pair in values_of(one)):
        if isinstance(value, str):
            texts.append(f"{{{{ {value} }}}}" if key in EXPRESSIONS else value)
    environment = jinja2.Environment()  # noqa: S701  # nothing is rendered
    environment.filters = AnyName()
    environment.tests = AnyName()
    trees = [environment.parse(text) for text in texts]
    return set().union(*map(jinja2.meta.find_undeclared_variables, trees))


@pytest.mark.parametrize("role", NAMES)
def test_variables_that_a_role_uses_are_defined(role: str) -> None:
    known = OF_ANSIBLE | OF_INVENTORY | OF_PLAYBOOKS
    # Roles use variables of others, too.
    assert used_by(role) - known.union(*map(defined_by, NAMES)) == set()


@pytest.mark.parametrize("role", NAMES)
def test_variables_of_a_distribution_family_are_loaded(role: str) -> None:
    if (ROLES / role / "vars/Debian.yml").exists():
        loaded = [value for key, value in values_of(tasks_of(role)) if key.endswith("include_vars")]
        assert "{{ ansible_facts.os_family }}.yml" in loaded
