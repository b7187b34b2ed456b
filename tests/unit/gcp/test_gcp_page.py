"""Lists in docs/gcp.md and docs/howto/first-day-gcp.md equal those in the code."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import yaml

from clusterctl.providers.gcp.provider import services
from clusterctl.spec.load import parse_spec
from clusterctl.spec.providers import gcp_machines
from tests.support.processes import ROOT
from tests.unit.gcp.recorded import SPEC

PAGE = (ROOT / "docs" / "gcp.md").read_text()
FIRST_DAY = (ROOT / "docs" / "howto" / "first-day-gcp.md").read_text()
DATA = files("clusterctl.providers.gcp") / "data"
API = re.compile(r"[a-z]+\.googleapis\.com")
FAMILY = re.compile(r"\b[A-Z]\d[A-Z]?\b")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n|---")[2]
    lines = text.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def of(more: str) -> set[str]:
    """Return the APIs that a cluster with this setting needs."""
    spec = parse_spec(
        SPEC.replace("zone: us-central1-a", f"zone: us-central1-a{more}"), "cluster.yaml"
    )
    return set(services(spec.provider))


def test_manual_lists_the_apis_that_up_needs() -> None:
    command, _, after = PAGE.partition("$ gcloud services enable ")[2].partition("```")
    needed = of("")
    assert set(API.findall(command)) == needed
    more = (
        of(", filestore: {tier: BASIC_SSD, capacity: 2560GiB}, bucket: {name: my-results}") - needed
    )
    assert set(API.findall(after.partition("\n\nThe hosts")[0])) == more
    by_hand = FIRST_DAY.partition("$ gcloud services enable ")[2].partition("\n")[0]
    assert set(API.findall(by_hand)) < needed


def test_manual_lists_the_machine_families() -> None:
    families = {name.upper(): one for name, one in gcp_machines.data()["families"].items()}
    del families["UNKNOWN"]  # of types that only the spec describes
    arm = {name for name, one in families.items() if one.get("arm")}
    text = PAGE.partition("\n## Machine types\n")[2].partition("```")[0]
    supported, _, refused = text.partition("Types with Arm processors")
    assert set(FAMILY.findall(supported)) == set(families) - arm
    assert set(FAMILY.findall(refused)) == arm


def test_manual_lists_the_prices_that_are_known() -> None:
    known = yaml.safe_load((DATA / "prices.yaml").read_text())
    listed = " ".join(PAGE.partition("Known are those of ")[2].partition("**unknown**")[0].split())
    families, _, gpus = listed.partition(" GPUs")[0].partition(", of ")
    priced = {name.partition("-")[0].upper() for name in (*known["families"], *known["machines"])}
    assert set(FAMILY.findall(families)) == priced
    assert {name.rpartition("-")[2].upper() for name in known["gpus"]} == set(
        re.findall(r"[A-Z]\d+", gpus)
    )
    assert all(tier.startswith("BASIC") for tier in known["filestore"])


@pytest.mark.parametrize("cells", rows("Failures"), ids=lambda cells: str(cells[0].split("`")[1]))
def test_manual_says_which_codes_are_retried(cells: list[str]) -> None:
    known = yaml.safe_load((DATA / "diagnoses.yaml").read_text())
    names = {entry.get("about", entry["code"]): entry.get("transient") for entry in known}
    for code in re.findall("`([a-z-]+)`", cells[0]):
        assert code in names
        assert bool(names[code]) is cells[2].startswith("yes")
