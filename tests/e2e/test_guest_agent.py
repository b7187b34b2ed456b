"""Google's real guest agent, from Debian's package, compared with the stand-in.

Both get the metadata that the Terraform module gives to an instance.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clusterctl.providers.gcp.api import Api, host_keys
from clusterctl.providers.gcp.provider import variables
from clusterctl.spec.load import parse_spec
from clusterctl.util.assets import data_folder
from tests.support.google import guest
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.lab import Lab, lab
from tests.support.processes import eventually

pytestmark = pytest.mark.platform("real", "google-guest-agent")

ZONE = "us-central1-a"
# which machine has which agent
REAL = "demo-ctl"
PLAYED = "demo-train-1"
HOSTS = {REAL: "node1", PLAYED: "node2"}
SPEC = f"""\
version: 1
name: demo
provider: {{type: gcp, project: {PROJECT}, zone: {ZONE}}}
partitions: [{{name: train, nodes: 1}}]
"""
PACKAGE = "google-guest-agent"
# The road to the metadata server, which Google's routers have.
INSTALL = f"""\
printf '\\n[Route]\\nDestination=169.254.169.254/32\\nScope=link\\n' >> /etc/systemd/network/10-host0.network
export DEBIAN_FRONTEND=noninteractive
apt-get -q update
apt-get -q -y --no-install-recommends install {PACKAGE}
"""
# All that an agent has made for accounts.
ACCOUNTS = """\
cat /etc/passwd /etc/group
cut -d: -f1,2 /etc/shadow
stat -c '%n %a %U:%G' ~clusterctl ~clusterctl/.ssh ~clusterctl/.ssh/* /etc/sudoers.d/google_sudoers
cat ~clusterctl/.ssh/authorized_keys /etc/sudoers.d/google_sudoers
"""


@dataclass(frozen=True)
class Instances:
    """Machines of a lab that stand for instances of a cloud."""

    lab: Lab
    cloud: GoogleCloud
    module: Path
    key: Path  # clusterctl's, private

    def apply(self, key: Path) -> None:
        """Create or update the instances with the Terraform module."""
        values = variables(parse_spec(SPEC, "cluster.yaml"), "a1b2c3", public(key))
        (self.module / "clusterctl.auto.tfvars.json").write_text(json.dumps(values))
        for words in ("init", "apply -auto-approve"):
            argv = [self.cloud.terraform, *words.split(), "-no-color"]
            env = {**os.environ, **self.cloud.env}
            done = subprocess.run(
                argv,
                cwd=self.module,
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr

    def sh(self, instance: str, script: str) -> str:
        """Run a script as root on the machine, without sshd."""
        return self.lab.host(HOSTS[instance]).inside.sh(script, timeout_s=300)

    def published(self) -> Mapping[str, Any]:
        """Return the host keys that each instance has published."""
        published: dict[str, Any] = self.cloud.store.read().get("guest_attributes", {})
        return published

    def login(self, instance: str, key: Path) -> subprocess.CompletedProcess[str]:
        """Log in like clusterctl, with the host key from the guest attributes."""
        address = self.lab.host(HOSTS[instance]).address
        known = self.module / "known_hosts"
        api = Api(PROJECT)
        known.write_text(f"{address} {host_keys(api, ZONE, [instance])[instance]}\n")
        options = [
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            f"UserKnownHostsFile={known}",
            "HostKeyAlgorithms=ssh-ed25519",
        ]
        argv = [
            "ssh",
            "-F",
            "none",
            "-i",
            str(key),
            *(word for one in options for word in ("-o", one)),
        ]
        argv += [f"clusterctl@{address}", "sudo --non-interactive id --user"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    def may_log_in(self, instance: str, key: Path) -> bool:
        return self.login(instance, key).stdout == "0\n"


def new_key(folder: Path, name: str) -> Path:
    """Create a key pair, and return the file of the private key."""
    path = folder / name
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)], check=True
    )
    return path


def public(key: Path) -> str:
    return key.with_suffix(".pub").read_text().strip()


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory, no_residue: None) -> Iterator[Instances]:
    """Two machines, one with the real agent, one with the stand-in, created as instances."""
    folder = tmp_path_factory.mktemp("google")
    cloud = GoogleCloud(folder)
    module = folder / "terraform"
    shutil.copytree(data_folder("terraform") / "gcp", module)
    with lab("debian", 2, internet=True) as machines, Google(cloud.store) as google:
        cloud.addresses({name: machines.host(host).address for name, host in HOSTS.items()})
        with cloud.store.change() as world:
            world["guest_attributes"] = {name: {} for name in HOSTS}
            world["project_metadata"] = {
                "enable-oslogin": "TRUE",
                "ssh-keys": "mallory:ssh-ed25519 AAAA",
            }
        with (
            pytest.MonkeyPatch.context() as patch,
            guest.metadata(cloud.store, machines.id, machines.network),
        ):
            for name, value in google.environment.items():
                patch.setenv(name, value)
            one = Instances(machines, cloud, module, new_key(folder, "first"))
            one.sh(REAL, INSTALL)
            guest.start_agent(partial(machines.ssh, HOSTS[PLAYED]))
            one.apply(one.key)
            boot(one)
            eventually(lambda: all(one.published().values()))
            for name in HOSTS:
                eventually(partial(one.may_log_in, name, one.key))
            yield one
    assert not google.violations


def boot(instances: Instances) -> None:
    """Boot the machine with the real agent, with its metadata available, as a new instance boots."""
    before = instances.lab.host(HOSTS[REAL]).leader
    instances.lab.enter(HOSTS[REAL], ["systemctl", "reboot"])

    def is_another() -> bool:
        with suppress(AssertionError):
            return instances.lab.host(HOSTS[REAL]).leader != before
        return False

    eventually(is_another)


def test_accounts_are_those_of_the_real_agent(instances: Instances) -> None:
    """The project has OS Login on, and a key of its own: neither counts on the cluster's
    instances.
    """
    accounts = {name: instances.sh(name, ACCOUNTS) for name in HOSTS}
    assert accounts[PLAYED] == accounts[REAL]
    assert "mallory" not in accounts[REAL]


@pytest.mark.parametrize("name", HOSTS)
def test_host_keys_are_published(instances: Instances, name: str) -> None:
    files = instances.sh(name, "cat /etc/ssh/ssh_host_*_key.pub").splitlines()
    assert instances.published()[name] == dict(line.split()[:2] for line in files)
    assert "ssh-ed25519" in instances.published()[name]


def test_sshd_starts_after_the_real_agent_published_new_keys(instances: Instances) -> None:
    """As cloud-image-tests, test_suites/ssh/ssh_service_test.go:32, demands of Google's images.

    So the keys are there at the first answer of sshd. The account comes after that: the first login
    may fail.
    """
    show = "systemctl show --value --property=ActiveEnterTimestampMonotonic"
    agent, sshd = (int(instances.sh(REAL, f"{show} {unit}")) for unit in (PACKAGE, "ssh"))
    assert 0 < agent <= sshd
    kind, of_the_image = instances.lab.host(HOSTS[REAL]).host_key.split()
    assert instances.published()[REAL][kind] != of_the_image


def test_changed_key_replaces_the_old_on_a_running_instance(instances: Instances) -> None:
    """Terraform changes the metadata, and the agent waits for that."""
    second = new_key(instances.module.parent, "second")
    before = instances.cloud.done("create")
    instances.apply(second)
    eventually(partial(instances.may_log_in, REAL, second))
    assert instances.login(REAL, instances.key).returncode == 255
    instances.apply(instances.key)
    eventually(partial(instances.may_log_in, REAL, instances.key))
    assert instances.cloud.done("create") == before
