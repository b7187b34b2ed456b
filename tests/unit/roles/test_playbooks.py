"""The playbooks contain every role, and need no collection of Ansible's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.util.assets import data_folder

ANSIBLE = data_folder("ansible")


def named(value: Any) -> Iterator[str]:
    """Each role that a playbook includes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.rpartition(".")[2] in {"include_role", "import_role"}:
                # A loop is a list, or an expression that makes one of the names in it.
                several = re.findall(r"\w+", str(value.get("loop")))
                yield from several if "{{" in inner["name"] else [inner["name"]]
            yield from named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner)


@pytest.mark.parametrize("part", ["install", "configure"])
def test_every_role_with_a_part_is_in_the_playbook_of_that_part(part: str) -> None:
    """A forgotten role would drift on every `up`."""
    have = {path.parts[-3] for path in ANSIBLE.glob(f"roles/*/tasks/{part}.yml")}
    playbook = YAML(typ="safe").load(ANSIBLE / f"{part}.yml")
    assert have - set(named(playbook)) == set()


def keys(value: Any) -> Iterator[str]:
    """Each key of a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_tasks_need_only_modules_of_ansible_core() -> None:
    """The package ansible-core has no others, and modules without a full name may be in a collection."""
    files = [*ANSIBLE.glob("*.yml"), *ANSIBLE.glob("tasks/*.yml")]
    files += [*ANSIBLE.glob("roles/*/tasks/*.yml"), *ANSIBLE.glob("roles/*/handlers/*.yml")]
    used = {key for path in files for key in keys(YAML(typ="safe").load(path))}
    full = {key for key in used if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+){2,}", key)}
    assert len(full) > 10
    assert {key for key in full if not key.startswith("ansible.builtin.")} == set()
