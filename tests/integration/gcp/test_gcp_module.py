"""terraform/gcp on the cloud double: created resources, changes by another spec, and removal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.apply import host_changes
from clusterctl.providers.gcp.provider import variables
from clusterctl.providers.gcp.terraform import TerraformPlan, read_changes
from clusterctl.util.assets import data_folder
from tests.support.google.provider.schema import VERSION
from tests.unit.gcp.many import copies
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY, Module, spec_of
from tests.unit.gcp.sent import REQUESTS

INSTANCE = "google_compute_instance"
PARTS = ("module.controller.", "module.nodes.")
SECRETS = {
    "GOOGLE_OAUTH_ACCESS_TOKEN": "ya29.planted-token",
    "GOOGLE_CREDENTIALS": '{"type": "service_account", "private_key": "planted-key"}',
    "TF_VAR_munge_key": "planted-munge",
}


def test_terraform_module_is_formatted_and_valid(tmp_path: Path) -> None:
    module = Module(tmp_path)
    formatted = module.run("fmt", "-check", "-recursive", "-diff")
    assert formatted.rc == 0, formatted.stdout
    assert module.run("validate").rc == 0


def test_module_pins_one_minor_version_of_the_provider() -> None:
    """It is the one whose schema and code the double knows."""
    pins = [
        match[1]
        for path in (data_folder("terraform") / "gcp").rglob("versions.tf")
        for match in re.finditer(r'^ +version += "(.*)"$', path.read_text(), re.MULTILINE)
    ]
    assert pins == [f"~> {VERSION}"]


def test_changed_variables_change_only_their_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    module = Module(tmp_path)
    nodes: dict[str, dict[str, Any]] = {f"whole-{letter}": {} for letter in "abcdef"}
    module.set(_asked(nodes))
    with monkeypatch.context() as logging:
        logging.setenv("TF_LOG", "INFO")
        logging.setenv("TF_LOG_PATH", str(tmp_path / "terraform.log"))
        said = module.apply() + module.run("output", "-json").said
    _assert_that_outputs_and_rules_fit(module)
    _assert_that_order_is_as_recorded(module)
    before = {name: each["instance_id"] for name, each in module.cloud.instances.items()}

    # As Google's provider says which one the family stood for.
    with module.cloud.store.change() as world:
        for each in world["resources"][INSTANCE].values():
            each["boot_disk"][0]["initialize_params"][0]["image"] = (
                "projects/p/global/images/of-last-month"
            )
            # By hand, which would take our account's key and sudo away.
            if each["name"] == "whole-d":
                each["metadata"]["enable-oslogin"] = "TRUE"
    module.cloud.lose("whole-f")
    changed = _changed(nodes)
    module.set(_asked(changed, machine_type="n2-standard-16"))
    planned = module.planned()
    _assert_that_calls_are_counted_on_the_project(planned)
    _assert_that_each_change_is_said(planned)
    said += module.apply()
    kept = {
        name
        for name, each in module.cloud.instances.items()
        if each["instance_id"] == before.get(name)
    }
    assert kept == {"whole-ctl", "whole-c", "whole-d"}
    assert module.cloud.instances["whole-d"]["metadata"]["enable-oslogin"] == "FALSE"

    module.cloud.stop("whole-ctl")
    relabelled = _asked(changed, machine_type="n2-standard-16", labels={"team": "vision"})
    module.set(relabelled)
    assert set(map(tuple, module.plan().values())) == {("update",)}
    module.set(relabelled | {"kms_key": "projects/p/locations/l/keyRings/r/cryptoKeys/k"})
    said += module.apply()
    _assert_that_google_shows_it_otherwise(module)
    # Nodes that were replaced have their grants again, and local SSDs of a machine type are no
    # change.
    assert module.plan() == {}
    assert {each["current_status"] for each in module.cloud.instances.values()} == {"RUNNING"}
    assert {each["effective_labels"]["team"] for each in module.cloud.instances.values()} == {
        "vision"
    }

    module.cloud.fill("my-results")
    destroyed = module.run("destroy", "-auto-approve")
    assert destroyed.rc == 0
    assert module.cloud.resources() == {"my-results": "google_storage_bucket"}
    written = "".join(_texts(tmp_path))
    # The state was read.
    assert "ssh-ed25519 AAAA" in written
    assert [word for word in ("ya29", "planted") if word in said + destroyed.said + written] == []


def test_shared_vpc_gets_rules_in_its_host_project_or_none(tmp_path: Path) -> None:
    module = Module(tmp_path)
    with module.cloud.store.change() as world:
        world["host_projects"] = ["net-host"]
    network = {"network": "lan", "subnetwork": "lan-1", "host_project": "net-host"}
    asked = _asked({"whole-a": {}}) | {"network": network, "bucket": None}
    module.set(asked)
    module.apply()
    (lan,) = {
        each["network_interface"][0]["subnetwork"] for each in module.cloud.instances.values()
    }
    assert lan.endswith("/projects/net-host/regions/europe-west4/subnetworks/lan-1")
    rules = module.cloud.resources("google_compute_firewall")
    assert len(rules) == 4
    assert {each["project"] for each in rules.values()} == {"net-host"}
    assert all(each["network"].endswith("net-host/global/networks/lan") for each in rules.values())
    (share,) = module.cloud.resources("google_filestore_instance").values()
    assert share["project"] == "my-project"
    assert share["networks"][0]["connect_mode"] == "PRIVATE_SERVICE_ACCESS"
    assert module.plan() == {}
    module.set(asked | {"network": {**network, "firewall": False}})
    assert set(map(tuple, module.plan().values())) == {("delete",)}
    module.apply()
    assert module.cloud.resources("google_compute_firewall") == {}


def _assert_that_calls_are_counted_on_the_project(planned: dict[str, Any]) -> None:
    """Whatever project the login or the environment names."""
    settings = planned["configuration"]["provider_config"]["google"]["expressions"]
    assert settings["user_project_override"] == {"constant_value": True}
    assert settings["billing_project"] == {"references": ["var.project"]}


def _assert_that_outputs_and_rules_fit(module: Module) -> None:
    """Outputs name the hosts, and firewall rules let Filestore call back for locks."""
    hosts = module.outputs()["hosts"]
    assert {name: host["address"] for name, host in hosts.items()} == {
        name: each["network_interface"][0]["network_ip"]
        for name, each in module.cloud.instances.items()
    }
    assert {name for name, host in hosts.items() if host["role"] == "controller"} == {"whole-ctl"}
    (share,) = module.cloud.resources("google_filestore_instance").values()
    rules = module.cloud.resources("google_compute_firewall").values()
    (server,) = share["networks"][0]["ip_addresses"]
    (lets_in,) = (each for each in rules if each["name"].endswith("-filestore"))
    # The block of a basic tier, which Google reserves for the instance.
    assert lets_in["source_ranges"] == [str(ip_network(f"{server}/29", strict=False))]
    assert {each["protocol"] for each in lets_in["allow"]} == {"tcp", "udp"}
    assert lets_in["priority"] < next(each["priority"] for each in rules if each["deny"])
    accounts = {each["email"] for each in module.cloud.resources("google_service_account").values()}
    assert set(lets_in["target_service_accounts"]) == accounts


def _assert_that_order_is_as_recorded(module: Module) -> None:
    """Terraform creates each resource after the resources that recordings have before it."""
    edges: dict[str, set[str]] = {}
    for after, before in re.findall('"([^"]+)" -> "([^"]+)"', module.run("graph").stdout):
        edges.setdefault(after, set()).add(before)

    def before_it(address: str) -> set[str]:
        return {address}.union(*map(before_it, edges.get(address, ())))

    for order in REQUESTS.order:
        made = [address for address in edges if f".{order.after}." in address]
        assert made
        for address in made:
            kinds = {word for each in before_it(address) for word in each.split(".")}
            assert kinds >= set(order.before), address


def _changed(nodes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Change the variables of `whole-a` and `whole-b`, remove `whole-e`, and add `whole-g`."""
    image = {"project": "my-images", "family": "rocky-10", "name": None}
    changed = {"whole-a": {"machine_type": "g2-standard-48"}, "whole-b": {"image": image}}
    new = {"machine_type": "a3-highgpu-8g", "local_ssds": 0}
    changed |= {"whole-g": new}
    return {name: each for name, each in (nodes | changed).items() if name != "whole-e"}


def _assert_that_each_change_is_said(planned: dict[str, Any]) -> None:
    plan = TerraformPlan(Path("plan.tfplan"), "", read_changes(planned))
    assert {host.name: (host.action, host.why) for host in host_changes(plan)} == {
        "whole-a": ("replace", "machine type changes"),
        "whole-b": ("replace", "image changes"),
        "whole-c": ("keep", ""),
        "whole-ctl": ("change", "machine type changes"),
        "whole-d": ("change", "metadata changes"),
        "whole-e": ("remove", "it is no longer in the spec"),
        "whole-f": ("make", ""),
        "whole-g": ("make", ""),
    }
    assert {host.name for host in host_changes(plan) if host.ends_jobs} == {"whole-ctl"}
    elsewhere = [
        change.address for change in plan.real_changes if not change.address.startswith(PARTS)
    ]
    assert elsewhere == []


def _assert_that_google_shows_it_otherwise(module: Module) -> None:
    """Google shows full links, image families, and attributes of the machine type."""
    shown = module.cloud.instances["whole-d"]
    assert shown["network_interface"][0]["subnetwork"].startswith("https://")
    assert shown["guest_accelerator"][0]["type"].endswith("/acceleratorTypes/nvidia-l4")
    new = module.cloud.instances["whole-g"]
    assert new["boot_disk"][0]["initialize_params"][0]["image"].endswith("-v20261101")
    assert len(new["scratch_disk"]) == 16


def test_variables_of_a_spec_are_those_that_the_module_declares() -> None:
    """No variable of the module is a path to a secret."""
    declared = (Path(__file__).parents[3] / "terraform/gcp/variables.tf").read_text()
    names = {line.split('"')[1] for line in declared.splitlines() if line.startswith("variable ")}
    assert set(variables(spec_of("kept"), CLUSTER_ID, PUBLIC_KEY)) == names


def _asked(
    nodes: dict[str, dict[str, Any]], *, labels: dict[str, str] | None = None, **controller: str
) -> dict[str, Any]:
    """Return the variables of a controller and these nodes, each in a partition of its own, without
    resources that every cluster has.
    """
    values = variables(spec_of("everything"), CLUSTER_ID, PUBLIC_KEY)
    node = values["hosts"]["whole-serve-1"]
    hosts = {"whole-ctl": values["hosts"]["whole-ctl"] | controller}
    hosts |= {name: node | {"partition": name} | changed for name, changed in nodes.items()}
    values |= {"hosts": hosts, "labels": labels or {}, "placements": []}
    return {**values, "enable_apis": False, "auto_down": True}


def _texts(folder: Path) -> Iterable[str]:
    """Return all files that Terraform wrote, with its log."""
    for path in folder.rglob("*"):
        inside = {".terraform", "home", "modules", "mirror"} & set(path.relative_to(folder).parts)
        if path.is_file() and not inside:
            yield path.read_bytes().decode("utf-8", "replace")


WRONG_VALUES = {
    "nowhere": (
        {"storage": {"name": "s"}},
        "storage must have either a disk or a filestore",
    ),
    "project": ({"project": "My Project"}, "project must be a project id"),
    "region": ({"region": "us-central1-a"}, "region must be the name of a region"),
    "zone": ({"zone": "us-central1"}, "zone must be the name of a zone"),
    "cluster": ({"cluster": "a-name-of-more-than-20"}, "cluster must be a lower-case letter"),
    "id": ({"cluster_id": "0123"}, "cluster_id must be six hex digits"),
    "labels": ({"labels": {"Team": "vision"}}, "labels must consist of lower-case letters"),
    "admin": ({"admin_user": "root"}, "admin_user must be the name of an account other than root"),
    "key": ({"admin_public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "never a private key"),
    "service": ({"services": ["compute"]}, "services must be names of Google APIs, such as"),
    "cidr": ({"network": {"cidr": "10.80.0.0"}}, "network.cidr must be a range"),
    "half": ({"network": {"network": "company"}}, "must be set together"),
    "host": ({"network": {"host_project": "net-host"}}, "are for an existing network"),
    "ruleless": ({"network": {"firewall": False}}, "are for an existing network"),
    "kms": ({"kms_key": "hpc"}, "kms_key must be projects/PROJECT"),
    "tier": ({"filestore": {"tier": "FAST", "capacity_gib": 1024}}, "filestore.tier must be"),
    "controllers": ({"hosts": {}}, "Exactly one host must have the role"),
}
WRONG_HOSTS = {
    "role": ({"role": "login"}, 'or "compute" with a partition'),
    "image": ({"image": {"project": "p", "family": "f", "name": "n"}}, "either a family or a name"),
    "taken": ({"termination_action": "SLEEP"}, "termination_action must be STOP or DELETE"),
    "nic": ({"nic_type": "E1000"}, "nic_type must be GVNIC or VIRTIO_NET"),
    "added": ({"guest_accelerator": {"type": "nvidia-l4", "count": 1}}, "is for N1 machines only"),
}


def test_module_rejects_wrong_values_with_the_rule(tmp_path: Path) -> None:
    asked = variables(spec_of("everything"), CLUSTER_ID, PUBLIC_KEY)
    node = asked["hosts"]["whole-train-1"]
    calls = {name: {**asked, **wrong} for name, (wrong, _) in WRONG_VALUES.items()}
    for name, (wrong, _) in WRONG_HOSTS.items():
        calls[name] = {**asked, "hosts": {**asked["hosts"], "whole-train-1": {**node, **wrong}}}
    said = copies(tmp_path, calls, files="variables.tf").run("plan").said
    assert [
        name for name, (_, words) in {**WRONG_VALUES, **WRONG_HOSTS}.items() if words not in said
    ] == []
