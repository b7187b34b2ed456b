"""Local nodes on an EL-shaped machine, created by dnf and the same roles.

clusterctl is installed on the machine (tests/support/el) as by a user. Programs of Debian on it
come to the nodes as one more package (tests/support/el_tree.sh). docs/local.md lists what this
can't show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import wheelhouse
from clusterctl.spec.distributions import distribution_of
from clusterctl.util.assets import data_folder
from tests.support.install import build_wheel, lock_of_wheels
from tests.support.lab import lab
from tests.support.nested import CLUSTERCTL, PLACE, UV, Host
from tests.support.processes import ROOT

# minutes; it boots machines in a machine
pytestmark = [pytest.mark.sweep, pytest.mark.alone, pytest.mark.platform("stand-in", "rocky-9")]

SPEC = "{version: 1, name: inner, provider: {type: local}, partitions: [{name: train, nodes: 2}]}"
LENT = "/srv/lent"
# Python 3.11 is what clusterctl itself needs. No index is in reach: the wheels of jobs are in the
# cache.
INSTALL = f"""\
dnf -q -y install python3.11
uv() {{ {LENT}/uv --quiet --no-cache --offline "$@"; }}
uv venv --python /usr/bin/python3.11 {PLACE}
into="--python {PLACE}/bin/python --no-index --no-deps --link-mode copy"
uv pip install $into --require-hashes --find-links {LENT}/runtime -r {LENT}/runtime.lock
uv pip install $into {LENT}/dist/*.whl
mkdir -p ~/.cache/clusterctl
ln -s {LENT}/jobs ~/.cache/clusterctl/$(cat {LENT}/jobs.name)
echo '{SPEC}' >~/cluster.yaml
"""


@pytest.fixture(scope="module")
def host(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    lent = tmp_path_factory.mktemp("lent")
    (lent / "dist").mkdir()
    build_wheel(lent / "dist")
    (lent / "runtime.lock").write_text(lock_of_wheels())
    jobs = wheelhouse(
        data_folder("payload") / "requirements.lock", NodePlatform.of(distribution_of("rocky-9"))
    )
    (lent / "jobs.name").write_text(jobs.name)
    runtime = wheelhouse(lent / "runtime.lock", NodePlatform("3.11", 34))  # AppStream's python3.11
    options = ["--capability=all", "--system-call-filter=@known", f"--bind-ro={lent}:{LENT}"]
    for path, name in {UV: "uv", runtime: "runtime", jobs: "jobs"}.items():
        if path.is_dir():
            (lent / name).mkdir()
        else:
            (lent / name).touch()
        options.append(f"--bind-ro={path}:{LENT}/{name}")
    # An overlay's upper folder can't lie on an overlay, which its root is.
    options += ["--tmpfs=/var/lib/clusterctl:mode=755", "--tmpfs=/var/cache/clusterctl:mode=755"]
    with lab("el", 1, options=options) as one:
        inside = one.host("node1").inside
        inside.sh(INSTALL, timeout_s=300)
        yield inside


def clusterctl(host: Host, *argv: str, rc: int = 0) -> Any:
    """Return the answer of a verb with `-o json`."""
    return host(CLUSTERCTL, "-o", "json", *argv, rc=rc, timeout_s=900).json


@pytest.fixture(scope="module")
def cluster(host: Host) -> dict[str, Any]:
    """The answer of `up`, after the missing package was installed."""
    (failure,) = clusterctl(host, "up", rc=1)["failures"]
    assert "systemd-nspawn" in failure["cause"]
    assert failure["fix"] == "dnf install systemd-container"
    host.sh(f"{failure['fix']} -q -y", timeout_s=120)
    host.sh((ROOT / "tests/support/el_tree.sh").read_text(), timeout_s=300)
    answer: dict[str, Any] = clusterctl(host, "up")
    return answer


def on(host: Host, node: str, *command: str) -> str:
    """Return the output of a command on a node."""
    return host(CLUSTERCTL, "ssh", node, "--", *command).stdout


def test_nodes_have_the_distribution_of_the_machine(host: Host, cluster: dict[str, Any]) -> None:
    assert cluster["ready"]
    for node in ("inner-ctl", "inner-train-1"):
        assert on(host, node, "cat", "/etc/redhat-release").startswith("Rocky Linux")
        assert "systemd-networkd" not in on(host, node, "systemctl", "list-unit-files")
    assert "slurm-slurmd-22.05.9" in on(
        host, "inner-train-1", "rpm", "-q", "slurm-slurmd", "openmpi"
    )


def test_job_runs_across_the_nodes(host: Host, cluster: dict[str, Any]) -> None:
    assert clusterctl(host, "submit", "probe", "--nodes", "2", "--wait")["state"] == "COMPLETED"


def test_second_up_changes_nothing(host: Host, cluster: dict[str, Any]) -> None:
    assert clusterctl(host, "up")["repaired"] == []


def test_down_leaves_nothing_on_the_machine(host: Host, cluster: dict[str, Any]) -> None:
    clusterctl(host, "down", "--yes", "--discard")
    assert json.loads(host("machinectl", "list", "--output=json").stdout) == []
    assert host.sh("ls -A /var/lib/clusterctl") == host.sh("ip netns") == ""
