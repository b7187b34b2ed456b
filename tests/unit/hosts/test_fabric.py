"""InfiniBand and RoCE ports in sysfs become environment variables of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.hosts import remote_probe
from clusterctl.hosts.fabric import FabricPort, job_variables

pytestmark = pytest.mark.platform("stand-in", "infiniband")

CAPTURES = Path(__file__).parent / "captures"


def sysfs(tmp_path: Path, capture: str) -> Path:
    """The tree of files that `grep -r . .` in /sys/class/infiniband printed."""
    root = tmp_path / "infiniband"
    root.mkdir()
    for line in (CAPTURES / f"infiniband-{capture}.txt").read_text().splitlines():
        name, _, content = line.partition(":")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("capture", "interface", "expected"),
    [
        # Two ports for jobs, a slower one for storage, and one without a cable.
        (
            "ndr-and-storage",
            "eno1",
            {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_3:1", "UCX_NET_DEVICES": "mlx5_0:1,mlx5_3:1"},
        ),
        # One adapter whose second port is on another network: RoCE over the cluster's alone.
        (
            "roce",
            "ens1f0np0",
            {"NCCL_IB_HCA": "=mlx5_0:1", "UCX_NET_DEVICES": "mlx5_0:1", "NCCL_IB_GID_INDEX": "3"},
        ),
        # Both ports are up, but the cluster's network is a third card.
        ("roce", "eno1", {"UCX_NET_DEVICES": "eno1", "OMPI_MCA_osc": "^ucx"}),
    ],
    ids=["infiniband", "roce", "roce elsewhere"],
)
def test_fabric_variables_name_the_ports_of_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capture: str,
    interface: str,
    expected: dict[str, str],
) -> None:
    monkeypatch.setattr(remote_probe, "ADAPTERS", str(sysfs(tmp_path, capture)))
    ports = [FabricPort.model_validate(port) for port in remote_probe.fabric_ports()]
    assert job_variables(ports, interface) == expected
