"""terraform/gcp, applied to a stand-in cloud: what is made, what another spec touches, and what is left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.provider import variables
from clusterctl.spec.models import ClusterSpec
from tests.support.google.module import CLUSTER_ID, PUBLIC_KEY, Module, spec_of

INSTANCE = "google_compute_instance"
NODE = 'module.nodes.module.node["{}"].google_compute_instance.host'
CONTROLLER = "module.controller.module.host.google_compute_instance.host"
REPLACED = ["delete", "create"]


@pytest.mark.parametrize("version", ["8.7.0", "6.50.0"])
def test_the_module_is_formatted_and_fits_the_schema(tmp_path: Path, version: str) -> None:
    module = Module(tmp_path, version=version)
    formatted = module.run("fmt", "-check", "-recursive", "-diff")
    assert formatted.rc == 0, formatted.stdout
    assert module.run("validate").rc == 0


def test_another_number_of_nodes_touches_only_those(tmp_path: Path) -> None:
    module = Module(tmp_path)
    spec = spec_of("t4")
    module.ask(spec, train=2)
    module.apply()
    hosts = module.outputs()["hosts"]
    assert {name: host["role"] for name, host in hosts.items()} == {
        "cheap-ctl": "controller",
        "cheap-train-1": "compute",
        "cheap-train-2": "compute",
    }
    assert {name: host["address"] for name, host in hosts.items()} == {
        name: each["network_interface"][0]["network_ip"] for name, each in module.cloud.instances.items()
    }
    assert module.plan() == {}

    assert _done(module, spec, train=5) == {("create", INSTANCE, f"cheap-train-{i}") for i in (3, 4, 5)}
    assert _done(module, spec, train=1) == {("delete", INSTANCE, f"cheap-train-{i}") for i in (2, 3, 4, 5)}
    assert module.plan() == {}
    module.destroy()
    assert module.cloud.resources() == {}


def test_what_is_changed_is_replaced_on_nodes_and_kept_on_the_controller(tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.set(_asked())
    module.apply()
    module.set(_asked(all_hosts={"machine_type": "n2-standard-8"}))
    plan = module.plan()
    assert plan[CONTROLLER] == ["update"]
    assert plan[NODE.format("spot-train-1")] == REPLACED
    assert all(address.startswith(("module.controller.", "module.nodes.")) for address in plan)
    node, controller = (module.cloud.instances[name] for name in ("spot-train-1", "spot-ctl"))
    module.apply()
    assert module.cloud.instances["spot-train-1"]["instance_id"] != node["instance_id"]
    assert module.cloud.instances["spot-ctl"]["instance_id"] == controller["instance_id"]
    assert module.cloud.instances["spot-ctl"]["machine_type"] == "n2-standard-8"
    assert module.plan() == {}, "a node that was replaced has its grants again"


def test_labels_change_in_place_and_what_is_gone_or_stopped_comes_back(tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.set(_asked())
    module.apply()
    module.set(_asked(labels={"team": "vision"}))
    assert set(map(tuple, module.plan().values())) == {("update",)}
    module.apply()
    assert module.cloud.instances["spot-train-1"]["effective_labels"]["team"] == "vision"

    module.cloud.stop("spot-ctl")
    module.cloud.lose("spot-train-1")
    plan = module.plan()
    assert (plan[CONTROLLER], plan[NODE.format("spot-train-1")]) == (["update"], ["create"])
    module.apply()
    assert {each["current_status"] for each in module.cloud.instances.values()} == {"RUNNING"}


def test_a_newer_image_of_the_family_replaces_nothing_and_another_family_does(tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.set(_asked())
    module.apply()
    with module.cloud.store.change() as world:  # as Google's provider says which one the family stood for
        for each in world["resources"][INSTANCE].values():
            each["boot_disk"][0]["initialize_params"][0]["image"] = "projects/p/global/images/of-last-month"
    assert module.plan() == {}
    module.set(_asked(image={"project": "my-images", "family": "rocky-10", "name": None}))
    assert module.plan()[NODE.format("spot-train-1")] == REPLACED


def test_further_disks_come_and_go_while_the_host_stays(tmp_path: Path) -> None:
    module = Module(tmp_path)
    fast, slow = ({"size_gib": 100, "type": kind} for kind in ("pd-ssd", "pd-standard"))
    module.set(_asked(all_hosts={"extra_disks": [fast, slow]}))
    module.apply()
    before = {name: each["instance_id"] for name, each in module.cloud.instances.items()}
    module.set(_asked(all_hosts={"extra_disks": [slow]}))
    module.apply()
    assert before == {name: each["instance_id"] for name, each in module.cloud.instances.items()}
    disks = module.cloud.resources("google_compute_disk").values()
    assert {each["type"] for each in disks} == {"pd-standard"}
    attached = [each["attached_disk"] for each in module.cloud.instances.values()]
    assert sorted(one["source"] for (one,) in attached) == sorted(each["self_link"] for each in disks)

    key = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    module.set({**_asked(all_hosts={"extra_disks": [slow]}), "kms_key": key})
    module.apply()
    assert module.plan() == {}


def test_a_filestore_instance_may_call_back_for_locks_and_goes_with_its_rule(tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.set(variables(spec_of("filestore"), CLUSTER_ID, PUBLIC_KEY))
    module.apply()
    (share,) = module.cloud.resources("google_filestore_instance").values()
    rules = module.cloud.resources("google_compute_firewall").values()
    (lets_in,) = (
        each for each in rules if each["source_ranges"] == [share["networks"][0]["reserved_ip_range"]]
    )
    assert {each["protocol"] for each in lets_in["allow"]} == {"tcp", "udp"}
    assert lets_in["priority"] < next(each["priority"] for each in rules if each["deny"])
    accounts = {each["email"] for each in module.cloud.resources("google_service_account").values()}
    assert set(lets_in["target_service_accounts"]) == accounts
    assert module.plan() == {}
    module.destroy()
    assert module.cloud.resources() == {}


def test_a_reservation_of_newer_gpus_binds_its_instances(tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.ask(spec_of("reservation"), train=1)
    module.apply()
    scheduling = {name: each["scheduling"][0] for name, each in module.cloud.instances.items()}
    models = {name: each["provisioning_model"] for name, each in scheduling.items()}
    assert models == {"booked-ctl": "STANDARD", "booked-train-1": "RESERVATION_BOUND"}


def test_a_bucket_that_holds_something_is_left_and_all_else_is_gone(tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.set({**_asked(), "bucket": {"name": "my-results", "create": True}})
    module.apply()
    module.cloud.fill("my-results")
    destroyed = module.run("destroy", "-auto-approve")
    assert destroyed.rc == 1
    assert "Error trying to delete bucket my-results containing objects" in destroyed.said
    assert module.cloud.resources() == {"my-results": "google_storage_bucket"}
    assert module.run("state", "rm", "module.bucket").rc == 0
    module.destroy()


def test_no_secret_is_in_state_plan_or_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "GOOGLE_OAUTH_ACCESS_TOKEN": "ya29.planted-token",
        "GOOGLE_CREDENTIALS": '{"type": "service_account", "private_key": "planted-key"}',
        "TF_VAR_munge_key": "planted-munge",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TF_LOG", "INFO")
    monkeypatch.setenv("TF_LOG_PATH", str(tmp_path / "terraform.log"))
    module = Module(tmp_path)
    module.set(_asked())
    said = module.apply() + module.run("plan", "-out=plan.tfplan").said
    said += module.run("show", "-json", "plan.tfplan").said + module.run("output", "-json").said
    written = "".join(_texts(tmp_path))
    assert "ssh-ed25519 AAAA" in written, "the state was read"
    assert [word for word in ("ya29", "planted") if word in said + written] == []


def test_every_shared_spec_has_only_public_keys_and_names(tmp_path: Path) -> None:
    """A path to a secret that a spec could take does not exist: the variables are these, and no others."""
    declared = (Path(__file__).parents[3] / "terraform/gcp/variables.tf").read_text()
    names = {line.split('"')[1] for line in declared.splitlines() if line.startswith("variable ")}
    assert set(variables(spec_of("cmek"), CLUSTER_ID, PUBLIC_KEY)) == names


def _done(module: Module, spec: ClusterSpec, **nodes: int) -> set[tuple[str, str, str]]:
    """What applying another number of nodes does."""
    module.cloud.forget_log()
    module.ask(spec, **nodes)
    module.apply()
    return set(module.cloud.done())


def _asked(
    *,
    all_hosts: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    image: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A controller and a spot node, without what is made for every cluster alike."""
    values = variables(spec_of("spot"), CLUSTER_ID, PUBLIC_KEY)
    more = {**(all_hosts or {}), **({"image": image} if image else {})}
    hosts = {name: {**host, **more} for name, host in values["hosts"].items() if name[-1] not in "23"}
    return {**values, "hosts": hosts, "labels": labels or {}, "enable_apis": False}


def _texts(folder: Path) -> Iterable[str]:
    """All that Terraform wrote, the log among it."""
    for path in folder.rglob("*"):
        inside = {".terraform", "home", "modules", "mirror"} & set(path.relative_to(folder).parts)
        if path.is_file() and not inside:
            yield path.read_bytes().decode("utf-8", "replace")
