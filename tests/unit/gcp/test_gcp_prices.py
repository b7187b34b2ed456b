"""Prices: the table yields Google's own examples, and unknown prices are not guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp import costs
from clusterctl.providers.gcp.provider import variables
from clusterctl.providers.registry import provider_of
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp_machines
from tests.unit.gcp.module import NAMES, spec_of

# A machine without disks, as Google's price pages show it for us-central1.
PUBLISHED = {
    "e2-standard-4": 0.134012,
    "n1-standard-4": 0.189999,
    "n2-standard-4": 0.194236,
    "n2d-standard-4": 0.168984,
    "c2-standard-4": 0.20881,
    "g2-standard-4": 0.706832,
    "g2-standard-8": 0.853624,
    "g2-standard-24": 2.000883,
    "a2-highgpu-1g": 3.673385,
    "a2-highgpu-8g": 29.387,
    "a2-ultragpu-1g": 5.068798,
    "a3-highgpu-8g": 88.490000,
}


def of(name: str, gpus: dict[str, int] | None = None, *, spot: bool = False) -> float | None:
    return costs.of_machine(name, gpus or {}, model="SPOT" if spot else "STANDARD")


@pytest.mark.parametrize("name", PUBLISHED)
def test_machine_prices_equal_those_of_google(name: str) -> None:
    assert of(name) == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_price_includes_added_gpus() -> None:
    assert of("n1-standard-4", {"nvidia-tesla-t4": 2}) == pytest.approx(0.189999 + 0.70, rel=1e-4)
    assert of("n1-standard-4", {"nvidia-tesla-t4": 2}, spot=True) == pytest.approx(
        0.0523 + 0.35, rel=1e-2
    )


@pytest.mark.parametrize(
    ("name", "gpus", "spot"),
    [
        ("no-such-1", {}, False),
        ("c3-standard-4", {}, False),  # a family without a price
        ("n1-standard-4", {"nvidia-tesla-p4": 1}, False),  # a GPU without one
        ("a3-highgpu-8g", {}, True),  # no spot price
        ("n2-standard-4", {}, True),
        ("a4-highgpu-8g", {}, False),
    ],
)
def test_price_of_an_unknown_machine_is_none(name: str, gpus: dict[str, int], spot: bool) -> None:
    assert of(name, gpus, spot=spot) is None


def test_spot_price_is_below_on_demand() -> None:
    both = 0
    for name in gcp_machines.machines():
        plain = of(name)
        spot = of(name, spot=True)
        if plain is not None and spot is not None:
            both += 1
            assert spot < plain, name
    assert both > 20


def test_price_table_has_only_known_machine_types() -> None:
    known = gcp_machines.machines()
    table = costs.table()
    assert set(table["machines"]) <= set(known)
    assert set(table["families"]) <= {machine.family for machine in known.values()}
    assert set(table["gpus"]) <= {facts["google"] for facts in gcp_machines.data()["gpus"].values()}


def test_price_caveat_names_another_region() -> None:
    assert costs.table()["date"] == "2026-11-20"
    assert costs.caveat("us-central1") == ""
    assert "for us-central1; prices in europe-west4" in costs.caveat("europe-west4")


def test_price_of_cloud_nat_depends_on_up_to_32_machines() -> None:
    assert costs.of_nat(3) == pytest.approx(3 * 0.0014 + 0.005)
    assert costs.of_nat(100) == costs.of_nat(32)


def instance(name: str = "demo-train-1", **more: Any) -> dict[str, Any]:
    """Return an instance as Terraform plans it."""
    disk = {"initialize_params": [{"size": 73, "type": "pd-balanced"}]}
    return {"name": name, "machine_type": "g2-standard-4", "boot_disk": [disk], **more}


def spec(price_per_hour: float | None = None, **provider: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "demo",
            "provider": {
                "type": "gcp",
                "project": "my-project",
                "zone": "us-central1-a",
                **provider,
            },
            "partitions": [
                {"name": "train", "nodes": 2, "price_per_hour": price_per_hour},
                {"name": "other-part", "nodes": 1},
            ],
        }
    )


class TestHosts:
    def test_host_price_is_machine_and_disks(self) -> None:
        price = costs.HostPrices.by(spec()).of
        assert price(instance()) == pytest.approx(0.706824 + 0.01)
        with_ssds = price(instance(scratch_disk=[{"interface": "NVME"}] * 2))
        assert with_ssds == pytest.approx(0.706824 + 0.01 + 2 * 375 * 0.08 / 730)

    def test_host_price_reads_spot_and_added_gpus(self) -> None:
        price = costs.HostPrices.by(spec()).of
        spot = price(instance(scheduling=[{"provisioning_model": "SPOT"}]))
        assert spot == pytest.approx(0.05872 + 0.2231 + 0.01, rel=1e-3)
        gpu = [{"type": "projects/p/zones/z/acceleratorTypes/nvidia-tesla-t4", "count": 1}]
        assert price(
            instance(machine_type="n1-standard-4", guest_accelerator=gpu)
        ) == pytest.approx(0.55, rel=1e-3)

    def test_host_price_includes_bundled_local_ssds(self) -> None:
        machine = gcp_machines.machines().get("a2-ultragpu-1g")
        assert machine is not None
        bundled = [{"interface": "NVME"}] * machine.bundled_ssds
        price = costs.HostPrices.by(spec()).of(
            instance(machine_type="a2-ultragpu-1g", scratch_disk=bundled)
        )
        assert price == pytest.approx(5.068798 + 0.01)

    def test_host_price_of_the_spec_has_precedence(self) -> None:
        assert costs.HostPrices.by(spec(2.5)).of(instance()) == 2.5
        for name in ("demo-other-part-1", "demo-ctl"):
            assert costs.HostPrices.by(spec(2.5)).of(instance(name)) == pytest.approx(0.716824)

    def test_host_price_with_an_unknown_part_is_none(self) -> None:
        price = costs.HostPrices.by(spec()).of
        assert price(instance(machine_type="c3-standard-4")) is None
        assert (
            price(instance(scratch_disk=[{}], scheduling=[{"provisioning_model": "SPOT"}])) is None
        )


def node_price(of_it: ClusterSpec, partition: str) -> float | None:
    return provider_of(of_it.provider).node_price(of_it, partition)


class TestNodes:
    """The price of a node, which `cost_usd` of a run is computed from."""

    def test_node_price_equals_the_planned_host_price(self) -> None:
        checked = 0
        for name in NAMES:
            of_it = spec_of(name)
            planned = variables(of_it, "0123ab", "ssh-ed25519 AAAA")["hosts"]
            for partition in of_it.partitions:
                host = planned[of_it.node_names(partition)[0]]
                node_usd = node_price(of_it, partition.name)
                assert node_usd == costs.HostPrices.by(of_it).of(
                    as_instance(of_it.node_names(partition)[0], host)
                ), name
                checked += node_usd is not None
        assert checked >= 5

    def test_node_price_of_a_partition_counts_with_any_provider(self) -> None:
        local = ClusterSpec.model_validate(
            {
                "version": 1,
                "name": "demo",
                "partitions": [{"name": "train", "nodes": 1, "price_per_hour": 0.3}],
            }
        )
        assert node_price(local, "train") == 0.3
        assert node_price(local, "gone") is None
        assert node_price(spec(2.5), "train") == 2.5

    def test_node_price_includes_the_boot_disk(self) -> None:
        usual = {"machine_type": "g2-standard-4"}
        large = usual | {"boot_disk": {"size": "780GiB"}}
        prices = [node_price(spec(partitions={"train": each}), "train") for each in (large, usual)]
        with_more, without = filter(None, prices)
        assert with_more - without == pytest.approx(0.1)


def _model(host: dict[str, Any]) -> str:
    return "SPOT" if host["spot"] else "FLEX_START" if host["flex_start"] else "STANDARD"


def as_instance(name: str, host: dict[str, Any]) -> dict[str, Any]:
    """Return the planned instance of a host in the module's variables."""
    disk = {"size": host["boot_disk"]["size_gib"], "type": host["boot_disk"]["type"]}
    machine = gcp_machines.machines().get(host["machine_type"])
    assert machine is not None
    return {
        "name": name,
        "machine_type": host["machine_type"],
        "guest_accelerator": [host["guest_accelerator"]] if host["guest_accelerator"] else [],
        "scheduling": [{"provisioning_model": _model(host)}],
        "scratch_disk": [{}] * (host["local_ssds"] + machine.bundled_ssds),
        "boot_disk": [{"initialize_params": [disk]}],
    }


def test_other_costs_has_filestore_and_nat() -> None:
    share = {"tier": "ZONAL", "file_shares": [{"capacity_gb": 1024}], "name": "demo-shared"}
    known, unknown = costs.other_costs(
        [
            ("google_compute_instance", instance()),
            ("google_compute_instance", instance("demo-train-2")),
            ("google_filestore_instance", share),
            ("google_compute_router_nat", {"name": "demo-nat"}),
            ("google_compute_network", {"name": "demo-net"}),
        ]
    )
    assert known == pytest.approx(2 * 0.0014 + 0.005)
    assert unknown == ("demo-shared",)


@pytest.mark.parametrize(("status", "cost"), [("RUNNING", 0.28182), ("TERMINATED", 0.0)])
def test_stopped_instance_costs_only_its_disks(status: str, cost: float) -> None:
    row = {
        "status": status,
        "machineType": "https://www.googleapis.com/compute/v1/projects/p/zones/z/machineTypes/g2-standard-4",
        "scheduling": {"provisioningModel": "SPOT"},
    }
    assert costs.of_row("instance", row) == pytest.approx(cost, rel=1e-3)


def test_recorded_cost_is_unknown_if_the_state_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "terraform.tfstate").write_text('{"resources": []}')
    assert costs.recorded_cost(spec(), tmp_path) == 0
    (tmp_path / ".terraform").mkdir()
    (tmp_path / ".terraform/terraform.tfstate").write_text("{}")
    assert costs.recorded_cost(spec(), tmp_path) is None
