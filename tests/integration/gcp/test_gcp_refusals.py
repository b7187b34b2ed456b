"""Google's refusals while Terraform creates and removes."""

from __future__ import annotations

from clusterctl.errors import TerraformError
from tests.integration.gcp.terraformed import Terraformed
from tests.support.google.refusals import REFUSALS
from tests.support.messages import refused


def test_up_retries_every_transient_refusal(cluster: Terraformed) -> None:
    for name, each in REFUSALS.items():
        if each.transient and each.on == "create" and each.type != "google_filestore_instance":
            cluster.cloud.fail(name, of=each.type, times=1)
    cluster.up()
    assert set(cluster.cloud.instances) == {"demo-ctl", "demo-train-1", "demo-train-2"}
    assert cluster.waited
    assert cluster.terraform.plan().is_empty
    cluster.down()
    assert cluster.resources == set()


def test_down_names_refused_deletions_and_completes_later(cluster: Terraformed) -> None:
    # In the order in which they are deleted.
    names = [
        "protected",
        "subnetwork_in_use",
        "network_in_use",
    ]
    lasting = {name for name, each in REFUSALS.items() if each.on == "delete"}
    assert lasting == set(names)
    cluster.nodes(1)
    cluster.up()
    for name in names:
        cluster.cloud.fail(name, of=REFUSALS[name].type, on="delete")
        with refused(REFUSALS[name].code, TerraformError):
            cluster.down()
        assert cluster.cloud.resources(REFUSALS[name].type)
        cluster.cloud.heal()
    cluster.down()
    assert cluster.resources == set()
