"""Machine types of Google Cloud, and which of them the nodes of a spec get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from clusterctl.errors import BadValueError, SpecError
from clusterctl.spec.base import PATTERNS
from clusterctl.spec.common import Gpus, Partition
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp, gcp_machines, gcp_nodes
from clusterctl.spec.providers.gcp_nodes import GcpDisk
from tests.support.messages import refused

DISK_TYPES = set(get_args(get_args(GcpDisk.model_fields["type"].annotation)[0]))


@pytest.mark.parametrize(
    ("name", "vcpus", "memory_gib", "gpu", "accelerator"),
    [
        ("e2-standard-4", 4, 16, None, None),
        ("n2d-standard-224", 224, 896, None, None),
        ("c3-highmem-176", 176, 1408, None, None),
        ("g2-standard-24", 24, 96, Gpus(type="l4", count=2), "nvidia-l4"),
        ("g4-standard-48", 48, 180, Gpus(type="rtx-pro-6000", count=1), "nvidia-rtx-pro-6000"),
        ("a2-highgpu-8g", 96, 680, Gpus(type="a100", count=8), "nvidia-tesla-a100"),
        ("a2-ultragpu-1g", 12, 170, Gpus(type="a100-80gb", count=1), "nvidia-a100-80gb"),
        ("a3-megagpu-8g", 208, 1872, Gpus(type="h100-mega", count=8), "nvidia-h100-mega-80gb"),
        ("c3d-highcpu-90", 90, 177, None, None),
        ("c4-standard-8", 8, 30, None, None),
        ("c4d-highcpu-2", 2, 3, None, None),
        ("h3-standard-88", 88, 352, None, None),
        ("h4d-standard-192", 192, 720, None, None),
        ("n4-highmem-80", 80, 640, None, None),
        ("n4d-standard-96", 96, 384, None, None),
        ("z3-highmem-8-highlssd", 8, 64, None, None),
        ("g4-standard-6", 6, 22, Gpus(type="rtx-pro-6000", count=1), "nvidia-rtx-pro-6000"),
        ("a4x-highgpu-4g", 140, 884, Gpus(type="gb200", count=4), "nvidia-gb200"),
        ("a4-highgpu-8g", 224, 3968, Gpus(type="b200", count=8), "nvidia-b200"),
    ],
)
def test_machine_type_has_cpus_memory_and_gpus(
    name: str, vcpus: int, memory_gib: int, gpu: Gpus | None, accelerator: str | None
) -> None:
    one = gcp_machines.machines().get(name)
    assert one is not None
    assert (one.name, one.vcpus, one.memory_mib) == (name, vcpus, memory_gib * 1024)
    assert (one.gpu, one.accelerator, one.guest_accelerator) == (gpu, accelerator, False)


def test_facts_of_machine_types_are_consistent() -> None:
    for name, one in gcp_machines.machines().items():
        assert PATTERNS["machine_type"].matches(name)
        assert one.family == name.split("-")[0]
        assert one.disk_types, name
        assert {*one.disk_types} <= DISK_TYPES


@pytest.mark.parametrize("gpu", gcp_machines.data()["gpus"])
def test_default_machine_exists_for_each_number_of_gpus(gpu: str) -> None:
    assert gcp_machines.counts(gpu)
    for count in gcp_machines.counts(gpu):
        wanted = Gpus(type=gpu, count=count)
        one = gcp_machines.default_machine(wanted)
        assert one.gpu == wanted
        limit = gcp_machines.most_vcpus(wanted)
        assert one.guest_accelerator is (limit is not None)
        assert limit is None or one.vcpus <= limit


@pytest.mark.parametrize("name", ["l4", "nvidia-l4"])
def test_gpu_type_accepts_both_names(name: str) -> None:
    assert gcp_machines.gpu_type(name) == "l4"


GCP = "version: 1\nname: demo\nprovider: {type: gcp, project: my-project, zone: us-central1-a%s}\n"
TRAIN = "partitions: [{name: train, nodes: 1%s}]\n"


@pytest.mark.parametrize(
    ("provider", "partition", "resolved"),
    [
        ("", ", gpus: {type: t4, count: 1}", "n1-standard-4 1 x t4"),
        ("", ", gpus: {type: l4, count: 2}", "g2-standard-24 2 x l4"),
        ("", ", gpus: {type: l4, count: 4}", "g2-standard-48 4 x l4"),
        ("", ", gpus: {type: a100, count: 8}", "a2-highgpu-8g 8 x a100"),
        ("", ", gpus: {type: h100, count: 8}", "a3-highgpu-8g 8 x h100"),
        (
            ", partitions: {train: {spot: true}}",
            ", gpus: {type: b200, count: 8}",
            "a4-highgpu-8g 8 x b200",
        ),
        (
            ", partitions: {train: {flex_start: 2d}}",
            ", gpus: {type: h100, count: 2}",
            "a3-highgpu-2g 2 x h100",
        ),
        (
            ", partitions: {train: {spot: true}}",
            ", gpus: {type: l4, count: 1}",
            "g2-standard-4 1 x l4",
        ),
        (", partitions: {train: {machine_type: c2-standard-60}}", "", "c2-standard-60 None"),
        ("", "", "e2-standard-4 None"),
    ],
)
def test_machine_type_of_a_partition(provider: str, partition: str, resolved: str) -> None:
    spec = parse_spec(GCP % provider + TRAIN % partition, "cluster.yaml")
    found = gcp.machine_of(spec, spec.partitions[0])
    assert f"{found.name} {found.gpu}" == resolved


def test_machine_type_that_the_spec_describes() -> None:
    facts = "vcpus: 16, memory: 60GiB, gpus: {type: l4}, disk_types: [pd-ssd], bundled_ssds: 2"
    more = (
        f", machine_types: {{g9-x-1: {{{facts}}}}}, partitions: {{train: {{machine_type: g9-x-1}}}}"
    )
    spec = parse_spec(GCP % more + TRAIN % "", "cluster.yaml")
    found = gcp.machine_of(spec, spec.partitions[0])
    assert (found.vcpus, found.memory_mib, found.gpu) == (16, 60 * 1024, Gpus(type="l4", count=1))
    assert (found.disk_types, found.bundled_ssds) == (("pd-ssd",), 2)
    with refused("unknown-machine-type", SpecError, "machine_types"):
        parse_spec(GCP % more.replace("type: g9-x-1", "type: g9-x-2") + TRAIN % "", "cluster.yaml")


def test_known_machine_type_keeps_facts_that_the_spec_lacks() -> None:
    """As `machine-type-differs` advises it to be described."""
    known = gcp_machines.machines()["a3-ultragpu-8g"]
    facts = gcp_machines.MachineFacts.model_validate({"vcpus": 200, "memory": "2TiB"})
    described = gcp_machines.with_stated({known.name: facts})[known.name]
    assert (known.only, known.reservation_bound) == (("spot", "flex_start", "reservation"), True)
    assert described == replace(known, vcpus=200, memory_mib=2 * 1024 * 1024)
    fewer = facts.model_copy(update={"bundled_ssds": 0})
    assert gcp_machines.with_stated({known.name: fewer})[known.name].bundled_ssds == 0


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ("vcpus: many, memory: 8GiB", "vcpus"),
        ("vcpus: 2, memory: 8GiB, gpus: {type: l4, count: many}", "gpus.count"),
    ],
)
def test_mistakes_in_a_described_machine_type_are_reported(facts: str, key: str) -> None:
    with refused("wrong-type", SpecError, f"machine_types.g9-x-1.{key}: "):
        parse_spec(GCP % f", machine_types: {{g9-x-1: {{{facts}}}}}" + TRAIN % "", "cluster.yaml")


ARM_IMAGE = "image: {project: my-images, family: rocky-9-arm}"


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("", "a4x-highgpu-4g"),
        (", machine_types: {c4a-standard-4: {vcpus: 4, memory: 16GiB}}", "c4a-standard-4"),
    ],
)
def test_arm_processors_are_refused_with_any_image(stated: str, name: str) -> None:
    nodes = f"{stated}, partitions: {{train: {{machine_type: {name}, {ARM_IMAGE}}}}}"
    with refused("machine-architecture", SpecError, "machine_type"):
        parse_spec(GCP % nodes + TRAIN % "", "cluster.yaml")


def test_machine_type_of_the_controller() -> None:
    named = ", controller: {machine_type: n2-standard-8}"
    for provider, name in (("", gcp_machines.PLAIN), (named, "n2-standard-8")):
        assert (
            gcp.controller_machine(parse_spec(GCP % provider + TRAIN % "", "c.yaml")).name == name
        )


def test_local_nodes_have_no_machine_type() -> None:
    partition = Partition(name="train", nodes=1)
    with refused("needs-cloud", BadValueError):
        gcp.machine_of(ClusterSpec(version=1, name="demo", partitions=(partition,)), partition)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("e2-standard-4", None, "pd-balanced"),
        ("a4-highgpu-8g", None, "hyperdisk-balanced"),
        ("g2-standard-4", "pd-ssd", "pd-ssd"),
    ],
)
def test_type_of_a_disk(name: str, asked: str | None, expected: str) -> None:
    disk = GcpDisk.model_validate({"size": "100GiB", "type": asked})
    assert gcp_nodes.disk_type(disk, gcp_machines.machines()[name].disk_types) == expected


def test_manual_names_every_gpu() -> None:
    text = (Path(__file__).parents[3] / "docs" / "spec.md").read_text()
    listed = ", ".join(f"`{gpu}`" for gpu in gcp_machines.data()["gpus"])
    assert listed in " ".join(text.replace(" or", ",").split())
