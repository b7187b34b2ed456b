"""What Google may fill in never replaces a resource: terraform/gcp says it, or ignores it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clusterctl.util.assets import data_folder
from tests.support.google.provider.schema import VERSION, load
from tests.support.google.provider.world import KNOWN

FOLDER = data_folder("terraform") / "gcp"
MAY_BE_FILLED = KNOWN["may_be_filled"]
HEAD = re.compile(r'^resource "(?P<kind>google_\w+)" "(?P<name>\w+)" \{$')
OPENS = re.compile(r'^(?:dynamic "(?P<dynamic>\w+)"|(?P<block>\w+)) \{$')
SETS = re.compile(r"^(?P<name>\w+) *= *(?P<value>.*)$")
INDEX = re.compile(r"\[\d+\]")


@dataclass
class Resource:
    """A resource of the module: the names of what it says and ignores, those of blocks with
    dots.
    """

    path: Path
    kind: str
    name: str
    given: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)

    def covers(self, attribute: str) -> bool:
        """Whether it says the attribute, or ignores it or a block around it."""
        words = attribute.split(".")
        around = {".".join(words[:length]) for length in range(1, len(words) + 1)}
        return attribute in self.given or bool(around & self.ignored)


def read(path: Path) -> Iterator[Resource]:
    """The resources of Google's provider in a file that `terraform fmt` has formatted."""
    resource: Resource | None = None
    blocks: list[str] = []
    for line in path.read_text().splitlines():
        words = line.partition("#")[0].strip()
        if match := HEAD.match(words):
            resource, blocks = Resource(path, match["kind"], match["name"]), []
        elif resource is None:
            continue
        elif words == "}" and not blocks:
            yield resource
            resource = None
        elif words in {"}", "]", "})", "]))"}:
            blocks.pop()
        elif match := OPENS.match(words):
            blocks.append(match["dynamic"] or match["block"])
            resource.given.add(_path(blocks))
        elif match := SETS.match(words):
            resource.given.add(_path([*blocks, match["name"]]))
            opened = match["value"].endswith(("{", "[", "("))
            if match["name"] == "ignore_changes":
                names = match["value"].strip("[]").split(",")
                resource.ignored |= {INDEX.sub("", name.strip()) for name in names if name.strip()}
            if opened:
                blocks.append(match["name"])
        elif blocks and blocks[-1] == "ignore_changes":
            resource.ignored.add(INDEX.sub("", words.rstrip(",")))


def _path(blocks: list[str]) -> str:
    return ".".join(block for block in blocks if block != "content")


RESOURCES = [resource for path in sorted(FOLDER.rglob("*.tf")) for resource in read(path)]


def test_module_pins_one_minor_version_of_the_provider() -> None:
    """It is the one whose schema and code these tests know."""
    pins = [
        match[1]
        for path in FOLDER.rglob("versions.tf")
        for match in re.finditer(r'^ +version += "(.*)"$', path.read_text(), re.MULTILINE)
    ]
    assert pins == [f"~> {VERSION}"]


def test_module_has_every_kind_of_resource_that_the_list_knows() -> None:
    kinds = {resource.kind for resource in RESOURCES}
    assert set(MAY_BE_FILLED) <= kinds
    # These have no such attribute.
    others = {"google_project_service", "google_service_account"}
    assert {kind for kind in kinds if not kind.endswith("_iam_member")} - set(
        MAY_BE_FILLED
    ) == others


@pytest.mark.parametrize(
    "resource", RESOURCES, ids=[f"{one.path.parent.name} {one.name}" for one in RESOURCES]
)
def test_attribute_that_google_may_fill_in_is_given_or_ignored(resource: Resource) -> None:
    names = MAY_BE_FILLED.get(resource.kind, ())
    assert [name for name in names if not resource.covers(name)] == []


@pytest.mark.parametrize("kind", sorted(MAY_BE_FILLED))
def test_list_of_what_google_may_fill_in_fits_the_schema(kind: str) -> None:
    """Each name is of the provider's release, forces a replacement, and is optional."""
    forced = KNOWN["forces_new"][kind]
    for name in MAY_BE_FILLED[kind]:
        assert any(one == name or one.startswith(f"{name}.") for one in forced), name
        block = load()["resource_schemas"][kind]["block"]
        *around, last = name.split(".")
        for word in around:
            block = block["block_types"][word]["block"]
        attribute = block["attributes"].get(last, block.get("block_types", {}).get(last))
        assert attribute is not None, name
        assert not attribute.get("required"), name
        assert not attribute.get("computed"), name
