"""A spec for Google Cloud on the command line, before anything is made."""

from __future__ import annotations

from pathlib import Path

from tests.support.messages import codes
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


def test_a_spec_that_google_would_refuse_ends_with_2_before_google_is_asked(cli: Clusterctl) -> None:
    cli("init", "--provider", "gcp")
    path = cli.cwd / "cluster.yaml"
    path.write_text(path.read_text().replace("type: l4", "type: h200"))
    ran = cli("-o", "json", "up", rc=2)
    assert codes(ran) == ["gpu-count"]
    assert all(part in ran.stderr for part in ("partitions[0].gpus.count: ", "1 x h200", "count: 8"))
