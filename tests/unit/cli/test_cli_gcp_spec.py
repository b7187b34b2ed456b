"""A spec for Google Cloud on the command line, before anything is made."""

from __future__ import annotations

from pathlib import Path

from tests.support.verbs import Clusterctl

MANUAL = Path(__file__).parents[3] / "docs" / "spec.md"


def test_the_machine_types_of_a_spec_are_shown(cli: Clusterctl) -> None:
    cli("init", "--provider", "gcp")
    shown = cli("validate").stdout
    assert shown == (
        "valid: cluster 'demo', provider gcp, 2 nodes\n"
        "  the controller: e2-standard-4\n"
        "  train: 2 x g2-standard-4 with 1 x l4\n"
    )
    assert f"```text\n{shown}```" in MANUAL.read_text()
    assert cli("validate", "-o", "json").json["machine_types"] == {"train": "g2-standard-4"}
