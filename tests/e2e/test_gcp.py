"""A cluster on Google Cloud, whose instances are machines on this host.

Terraform is real; its provider, Google's API, `gcloud` and the guest agent are stand-ins. After the
inventory, all is as on other providers: Ansible, Slurm, jobs, runs. Outputs are compared with
docs/howto/first-day-gcp.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from clusterctl.providers.local.provider import LocalProvider
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace, cache_home
from clusterctl.transport.master import end_all_connections
from tests.support.cluster import provision, shell
from tests.support.google import gcloud, guest
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.manual import ROOT, assert_shown
from tests.support.nvidia import machines as nvidia
from tests.support.nvidia.machines import furnish
from tests.support.terminal import plain, terminal
from tests.support.verbs import Clusterctl, CommandResult

pytestmark = pytest.mark.platform("stand-in", "google-machines", "google-api", "google-terraform")

FIRST_DAY = ROOT / "docs" / "howto" / "first-day-gcp.md"
ZONE = "us-central1-a"
MOST_NODES = 3
WITH_DRIVER = "{project: deeplearning-platform-release, family: common-cu128-debian-12}"
SPEC = """\
version: 1
name: {name}
provider:
  type: gcp
  project: {project}
  zone: {zone}
  network: {{cidr: {subnet}}}
  controller: {{image: {{project: debian-cloud, family: debian-12}}}}
  partitions: {{train: {{machine_type: g2-standard-4, image: {image}}}}}
partitions:
  - {{name: train, nodes: {nodes}, gpus: {{type: nvidia-l4, count: 1}}}}
software: {{cupy: false}}
storage: {{name: e2e-data}}
"""
L4 = {"gpus": [nvidia.gpu(0, "NVIDIA L4")]}
# The machines have a share of this one each, and their shared folder is mounted already.
OVERRIDE = """\
output "shared" { value = { kind = "existing", server = null, path = null } }
output "hosts" {
  value = {
    for name, host in merge(module.nodes.hosts, { (local.controller.name) = module.controller.host }) :
    name => merge(host, { cpus = 1, memory_mib = 900 })
  }
}
"""


@dataclass(frozen=True)
class Gcp:
    """A cluster that is up. cloud: the cloud of its instances. google: the API of that cloud."""

    name: str
    runner: Clusterctl
    cloud: GoogleCloud
    google: Google
    subnet: str

    @property
    def spec(self) -> Path:
        return self.runner.cwd / "cluster.yaml"

    @property
    def workspace(self) -> Path:
        return self.runner.home / self.name

    def ask_for(self, nodes: int) -> None:
        """Write the spec."""
        words = {"project": PROJECT, "zone": ZONE, "subnet": self.subnet, "image": WITH_DRIVER}
        text = SPEC.format(name=self.name, nodes=nodes, **words)
        self.spec.write_text(text)

    def json(self, *argv: str | Path, rc: int = 0) -> dict[str, Any]:
        """Return the answer of a verb with `-o json`."""
        answer: dict[str, Any] = self.runner("-o", "json", *argv, rc=rc).json
        return answer

    def answered(self, verb: str) -> str:
        """Return the output of a verb for a user who answers yes, as the page of the first day has
        it.
        """
        size = (60, 200)
        with terminal(self.runner, verb, size=size, **self.runner.environ) as window:
            window.read_until("[y/N] ", timeout_s=120)
            window.type("y\n")
            code = window.end()
        assert code == 0, window.shown
        self.as_shown(plain(window.shown), f"clusterctl {verb}")
        return window.shown

    def as_shown(self, output: CommandResult | str, text: str) -> None:
        """Assert that the page shows this output."""
        if isinstance(output, CommandResult):
            output = f"{output.stderr}{output.stdout}"
        assert_shown(FIRST_DAY, text, output, {self.name: "demo"})

    def ssh(self, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        """Plain `ssh -F` with the file that clusterctl wrote; ``path``: a PATH without gcloud."""
        argv = ["ssh", "-F", str(self.workspace / "ssh_config"), *words]
        env = {**os.environ, "PATH": path or self.runner.environ["PATH"]}
        return subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture(scope="module")
def machines(cluster_name: str, clusterctl_home: Path) -> Iterator[tuple[Workspace, Inventory]]:
    """The controller and the nodes, booted and not configured, with known host keys."""
    spec = ClusterSpec.model_validate(
        {"version": 1, "name": cluster_name, "partitions": [{"name": "train", "nodes": MOST_NODES}]}
    )
    # So that what they leave is seen.
    workspace = Workspace(clusterctl_home / ".machines" / cluster_name)
    try:
        inventory = provision(spec, workspace)
        for number in (1, 2):
            furnish(partial(shell, workspace, f"{cluster_name}-train-{number}"), L4)
        yield workspace, inventory
    finally:
        local = LocalProvider(LocalSettings())
        local.destroy(workspace.cluster_id(), workspace=workspace)


@pytest.fixture(scope="module")
def gcp(
    machines: tuple[Workspace, Inventory],
    cluster_name: str,
    clusterctl_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Gcp]:
    """A cluster of all machines but the last."""
    beneath, inventory = machines
    folder = tmp_path_factory.mktemp("google")
    cloud = GoogleCloud(folder, lag=1)
    cloud.addresses({host.name: host.address for host in inventory.hosts})
    world = cloud.store
    with world.change() as state:
        # Until the agent publishes.
        state["guest_attributes"] = {host.name: {} for host in inventory.hosts}
        theirs = f"mallory:{inventory.hosts[0].host_key}"
        state["project_metadata"] = {"enable-oslogin": "TRUE", "ssh-keys": theirs}
    path = f"{gcloud.install(folder, cloud.store.path)}:{cloud.env['PATH']}"
    with Google(world) as google, guest.metadata(world, inventory.cluster_id, inventory.network):
        shell(
            beneath, f"{cluster_name}-ctl", "sudo useradd --uid 1000 packer"
        )  # its image has an account more
        for host in inventory.hosts:
            guest.start_agent(partial(shell, beneath, host.name))
        environ = {
            **cloud.env,
            **google.environment,
            "PATH": path,
            "HOME": os.environ.get("HOME", "/"),
            "XDG_CACHE_HOME": str(cache_home().parent),
        }
        runner = Clusterctl(clusterctl_home, tmp_path_factory.mktemp("cwd"), environ)
        cluster = Gcp(cluster_name, runner, cloud, google, str(IPv4Network(inventory.network)))
        settle_in(cluster.workspace, beneath)
        cluster.ask_for(MOST_NODES - 1)
        try:
            cluster.answered("up")
            yield cluster
        finally:
            google.faults.clear()
            if cluster.workspace.is_dir():
                runner("-f", cluster.spec, "down", "--yes", "--discard", rc=None)
                runner(
                    "-f",
                    cluster.spec,
                    "storage",
                    "remove",
                    "e2e-data",
                    "--yes",
                    "--discard",
                    rc=None,
                )
    assert not google.violations


def settle_in(workspace: Path, beneath: Workspace) -> None:
    """Set the host keys of the machines, and facts that the Terraform module can't know."""
    (workspace / "terraform").mkdir(parents=True, mode=0o700)
    workspace.chmod(0o700)
    for key in (beneath.key, beneath.public_key):
        shutil.copy(key, workspace / key.name)
    (workspace / "terraform" / "test_override.tf").write_text(OVERRIDE)


def test_up_creates_the_instances_once(gcp: Gcp) -> None:
    made = [name for _, kind, name in gcp.cloud.done("create") if kind == "google_compute_instance"]
    assert sorted(made) == sorted(gcp.cloud.instances)
    nodes = [f"{gcp.name}-train-{number}" for number in range(1, MOST_NODES)]
    assert sorted(gcp.cloud.instances) == [f"{gcp.name}-ctl", *nodes]


def test_instances_have_the_accounts_of_the_guest_agent(gcp: Gcp) -> None:
    """`up` was refused at first, and asked again.

    The project has OS Login on, and keys of its own: neither counts on the cluster's instances.
    The agent's group and account take the numbers from 1000 on: the account others on one host,
    whose image has more accounts.
    """
    for host in gcp.cloud.instances:
        first = 1001 if host == f"{gcp.name}-ctl" else 1000
        output = gcp.ssh(
            host,
            "getent group google-sudoers; id --user; id --group --name; id --group; stat -c %U "
            ".ssh/*;getent passwd mallory;sudo --non-interactive id --user",
        )
        group = f"google-sudoers:x:{first}:clusterctl"
        owned = ["clusterctl", str(first + 1), "clusterctl"]
        assert output.stdout.split() == [group, str(first), *owned, "0"], output
        said_by_sshd = "sudo journalctl --quiet --identifier={sshd,sshd-session}"
        refused = gcp.ssh(host, f"{said_by_sshd} | grep --count 'Invalid user clusterctl'")
        assert int(refused.stdout) >= 1


def test_plain_ssh_goes_through_the_tunnel(gcp: Gcp) -> None:
    node = f"{gcp.name}-train-1"
    done = gcp.ssh(node, "hostname")
    assert done.stdout == f"{node}\n", done.stderr
    # Otherwise, the next ssh would use the connection to the controller that this one left.
    end_all_connections(gcp.workspace / "ssh_config")
    assert gcp.ssh(node, "hostname", path=os.environ["PATH"]).returncode == 255
    # A shared connection hides its ProxyCommand's messages.
    alone = ("-o", "ControlPath=none", f"{gcp.name}-ctl")
    without = gcp.ssh(*alone, "hostname", path=os.environ["PATH"])
    assert without.returncode == 255
    assert "gcloud" in without.stderr


def test_second_up_changes_nothing(gcp: Gcp) -> None:
    output = gcp.json("status")
    assert (output["ready"], output["provider"], len(output["nodes"])) == (
        True,
        "gcp",
        MOST_NODES - 1,
    )
    gcp.as_shown(gcp.runner("status"), "clusterctl status")
    gcp.as_shown(gcp.runner("doctor"), "clusterctl doctor")
    gcp.cloud.forget_log()
    gcp.runner("plan", "--check")
    output = gcp.json("up", "--yes")
    assert not gcp.cloud.done("create", "update", "delete")
    assert not output["repaired"]


def test_training_runs_and_is_collected(gcp: Gcp) -> None:
    for text in (
        "submit probe --nodes 2 --wait",
        "submit train --nodes 2 --follow -- --epochs 3",
        "collect",
    ):
        gcp.as_shown(gcp.runner(*text.split()), f"clusterctl {text}")
    (run,) = gcp.runner.cwd.glob("runs/*-train")
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "COMPLETED"
    assert sorted(record["nodes"]) == [f"{gcp.name}-train-1", f"{gcp.name}-train-2"]


def test_job_has_nccl_variables_unless_it_sets_them(gcp: Gcp) -> None:
    script = gcp.runner.cwd / "show.sh"
    script.write_text(
        "env | grep ^NCCL_ | sort; srun --ntasks=1 sh -c 'env | grep ^NCCL_ | sort'\n"
    )
    ours = [
        "NCCL_DEBUG=WARN",
        "NCCL_NSOCKS_PERTHREAD=1",
        "NCCL_SOCKET_IFNAME==host0",
        "NCCL_SOCKET_NTHREADS=4",
    ]
    assert of_job(gcp, script) == ours * 2
    theirs = [line.replace("WARN", "INFO") for line in ours]
    assert of_job(gcp, script, "--env", "NCCL_DEBUG=INFO") == theirs * 2
    user = YAML(typ="safe").load(gcp.workspace / "spec.yaml")["users"][0]["name"]
    by_hand = gcp.ssh("-l", user, f"{gcp.name}-ctl", "srun --ntasks=1 env").stdout.splitlines()
    assert [line for line in sorted(by_hand) if line.startswith("NCCL_")] == ours


def of_job(gcp: Gcp, script: Path, *options: str) -> list[str]:
    done = gcp.json("submit", script, "--wait", *options)
    (run,) = gcp.json("collect", str(done["job_id"]))["runs"]
    return (Path(run["dir"]) / "stdout.log").read_text().splitlines()


def test_down_names_remaining_storage_with_its_cost(gcp: Gcp) -> None:
    cluster_id = (gcp.workspace / "id").read_text().strip()
    labels = {"clusterctl-cluster": gcp.name, "clusterctl-id": cluster_id}
    disk = {
        "zone": ZONE,
        "project": PROJECT,
        "size": 500,
        "type": "pd-ssd",
        "effective_labels": labels,
    }
    gcp.google.world.put(
        "google_compute_disk", f"projects/{PROJECT}/zones/{ZONE}/disks/forgotten", **disk
    )
    gcp.google.fail(
        "compute.disks.delete", 403, times=100, message="Required 'compute.disks.delete' permission"
    )
    output = gcp.json("down", "--yes", "--discard", rc=1)
    (why,) = [one["cause"] for one in output["failures"] if "forgotten" in one["cause"]]
    left = rf"disk forgotten in {ZONE} \(0\.\d+ USD an hour\): .*compute\.disks\.delete"
    assert re.match(left, why), why
    gcp.google.faults.clear()
    gcp.answered("down")
    assert in_the_cloud(gcp) == ["google_compute_disk"], "the shared folder's"
    assert not gcp.workspace.exists()


def test_storage_is_listed_used_again_and_removed(gcp: Gcp) -> None:
    (kept,) = gcp.json("storage", "list")["storage"]
    assert (kept["size_mib"], kept["usd_per_month"]) == (100 * 1024, pytest.approx(10.0, rel=0.1))
    planned = gcp.json("plan")
    assert any(kept["what"] in note for note in planned["notes"])
    refused = gcp.runner("storage", "remove", "e2e-data", "--yes", rc=1).stderr
    # Nobody can look at it.
    assert f"{kept['what']} (100GiB, 10.00 USD a month)" in refused
    gcp.runner("storage", "remove", "e2e-data", "--discard", "--yes")
    assert in_the_cloud(gcp) == []
    assert gcp.json("storage", "list")["storage"] == []
    text = f"orphans list {gcp.name} --project {PROJECT}"
    output = gcp.runner(*text.split())
    gcp.as_shown(output, "clusterctl orphans list demo --project my-project")


def in_the_cloud(gcp: Gcp) -> list[str]:
    """Return the resources of the cloud, without enabled APIs and images of nodes, which `down`
    leaves.
    """
    known = {"google_project_service", "google_compute_image"}
    return sorted(kind for kind in gcp.cloud.resources().values() if kind not in known)
