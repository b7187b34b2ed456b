"""InfiniBand and RoCE ports in sysfs become environment variables of jobs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.plays import load_module, program, run_tasks

pytestmark = pytest.mark.platform("stand-in", "infiniband")

CAPTURES = Path(__file__).parent / "captures"


@pytest.fixture(scope="module")
def fabric() -> ModuleType:
    return load_module("fabric_facts")


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
    fabric: ModuleType, tmp_path: Path, capture: str, interface: str, expected: dict[str, str]
) -> None:
    found = list(fabric.ports(sysfs(tmp_path, capture), interface))
    got = fabric.variables(fabric.ports_for_jobs(found, interface), interface)
    assert got == expected


def test_job_env_role_writes_fabric_variables_unless_the_inventory_sets_them(
    tmp_path: Path,
) -> None:
    program(tmp_path, "ip", """echo '[{"ifname": "eno1"}]'""")
    done = run_tasks(
        tmp_path,
        "job_env",
        "variables",
        job_env_root=str(tmp_path),
        job_env_network="10.0.0.0/24",
        job_env_looks_at_fabric=True,
        job_env_adapters=str(sysfs(tmp_path, "ndr-and-storage")),
        job_env_variables={"UCX_NET_DEVICES": "mlx5_0:1", "NCCL_DEBUG": "WARN"},
    )
    assert done.returncode == 0, done.stdout
    assert set((tmp_path / "job-variables").read_text().splitlines()) == {
        "NCCL_IB_HCA==mlx5_0:1,mlx5_3:1",
        "UCX_NET_DEVICES=mlx5_0:1",
        "NCCL_DEBUG=WARN",
    }
