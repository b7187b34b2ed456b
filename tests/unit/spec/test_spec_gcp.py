"""Specs for Google Cloud as a whole: those of the tests, and a local one that moves there."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import SpecError
from clusterctl.spec.load import dump_spec, load_spec, parse_spec, starter_spec
from clusterctl.spec.providers import gcp

SPECS = Path(__file__).parents[1] / "gcp" / "specs"
BASE = Path(__file__).with_name("gcp-base.yaml")


@pytest.mark.parametrize("path", [BASE, *sorted(SPECS.glob("*.yaml"))], ids=lambda path: path.stem)
def test_gcp_spec_dumped_loads_equal(path: Path) -> None:
    spec = load_spec(path)
    assert parse_spec(dump_spec(spec), "dump.yaml") == spec


def test_local_spec_is_valid_with_the_gcp_provider() -> None:
    text = starter_spec("local")
    moved = text.replace(
        "  type: local\n", "  type: gcp\n  project: my-project\n  zone: us-central1-a\n"
    ).replace("    nodes: 2\n", "    nodes: 2\n    gpus: {type: l4}\n")
    spec = parse_spec(moved, "cluster.yaml")
    assert spec.provider.type == "gcp"
    assert gcp.machine_of(spec, spec.partitions[0]).name == "g2-standard-4"


@pytest.mark.parametrize("gpu", ["p4", "p100", "v100"])
def test_gpus_that_the_default_images_driver_lacks_want_an_image(gpu: str) -> None:
    text = (SPECS / "t4.yaml").read_text().replace("t4", gpu)
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "cluster.yaml")
    (problem,) = caught.value.problems
    assert problem.code == "gpu-needs-closed-driver"
    assert gpu in problem.message
    assert "580" in problem.hint
    image = "image: {project: my-images, family: rocky-9-driver-535}"
    named = text.replace("  zone: ", f"  partitions: {{train: {{{image}}}}}\n  zone: ")
    assert parse_spec(named, "cluster.yaml").name
