"""Facts about Google's images that roles, Terraform and doubles rely on, each with its source."""

from __future__ import annotations

import datetime as dt
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from clusterctl.hosts import probe
from clusterctl.providers.gcp import api
from clusterctl.spec.providers.gcp_nodes import GPU_IMAGE, PLAIN_IMAGE
from clusterctl.util.assets import data_folder
from tests.support.el.packages import packages
from tests.support.google import guest_agent
from tests.support.processes import ROOT
from tests.unit.gcp.recorded import demo

TABLE = ROOT / "tests" / "support" / "google" / "images.toml"
OF_ANY_DEFAULT = {
    "account",
    "automatic-updates",
    "boot",
    "disk",
    "guest-agent",
    "interface",
    "local-ssd",
}
INTERFACE = re.compile(r"\b(?:eth|ens|enp|eno)\d\w*")
OF_GPUS = {"cuda-repository", "driver", "ofed", "open-mpi", "rdma"}


@dataclass(frozen=True)
class Fact:
    """A fact of images.toml."""

    id: str
    images: str
    value: str
    source: str
    ours: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Repository:
    """Where sources are."""

    name: str
    commit: str
    date: dt.date


@dataclass(frozen=True)
class Facts:
    """All of images.toml."""

    repositories: Mapping[str, Repository]
    fact: tuple[Fact, ...]


FACTS = TypeAdapter(Facts).validate_python(tomllib.loads(TABLE.read_text()))
BY_ID = {fact.id: fact for fact in FACTS.fact}


@pytest.mark.parametrize("fact", FACTS.fact, ids=[fact.id for fact in FACTS.fact])
def test_fact_has_a_source_and_holds_in_our_files(fact: Fact) -> None:
    repository, _, line = fact.source.partition(":")
    assert re.fullmatch("[0-9a-f]{40}", FACTS.repositories[repository].commit)
    assert re.fullmatch(r"[\w./-]+:\d+", line)
    for path, text in fact.ours.items():
        assert fact.value in text
        assert text in (ROOT / path).read_text(), path


@pytest.mark.parametrize(
    ("family", "needed"), [(PLAIN_IMAGE.family, set()), (GPU_IMAGE.family, OF_GPUS)]
)
def test_default_images_have_facts(family: str, needed: set[str]) -> None:
    """Another default image needs facts of its own, because its paths may differ."""
    known = {fact.id for fact in FACTS.fact if re.search(fact.images, family)}
    assert known >= OF_ANY_DEFAULT | needed


def test_network_has_the_largest_mtu() -> None:
    (network,) = (one.after for one in demo() if one.type == "google_compute_network")
    assert network
    assert str(network["mtu"]) == BY_ID["largest-mtu"].value


def test_new_hosts_are_awaited_for_longer_than_a_boot() -> None:
    assert min(probe.NEW_TIMEOUT_S, api.WAIT_S) > int(BY_ID["boot"].value)


def test_guest_agent_double_has_the_groups_of_the_agent() -> None:
    """All that it makes of accounts: tests/e2e/test_guest_agent.py."""
    assert ",".join(guest_agent.GROUPS) == BY_ID["groups"].value


def test_el_machine_has_open_mpi_at_the_path_of_nvidia() -> None:
    (package,) = (
        package for package in packages() if (package.repo, package.name) == ("doca", "openmpi")
    )
    (place,) = (text.partition(" -> ")[2] for text in package.holds.files if "/bin/" in text)
    assert fnmatch(place, f"{BY_ID['open-mpi'].value}/bin/")
    assert ("doca", BY_ID["rdma"].value) in {(package.repo, package.name) for package in packages()}


def test_no_shipped_file_names_a_network_interface() -> None:
    """The image decides the name: eth0 in some images, ens4 in others."""
    assert INTERFACE.fullmatch(BY_ID["interface"].value)
    assert not [
        (path, found[0]) for path in shipped() for found in INTERFACE.finditer(path.read_text())
    ]


def shipped() -> Iterator[Path]:
    """Return all files that run on hosts or create them."""
    for folder in ("ansible", "templates", "terraform"):
        for path in data_folder(folder).rglob("*"):
            if path.suffix in {".yml", ".j2", ".py", ".sh", ".tf"}:
                yield path
