#!/usr/bin/python
"""Ansible module: the ports of a host's fast network (InfiniBand, RoCE) that its jobs use.

The ports are read from /sys/class/infiniband, where the kernel shows the adapters of all vendors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: fabric_facts
short_description: Variables for NCCL and UCX, by the InfiniBand and RoCE ports of a host
description:
  - Chooses among the ports that are up. Jobs use the fastest InfiniBand ports or, without InfiniBand, the
    RoCE ports with an interface on the cluster's network.
  - Without such ports, UCX uses the interface on the cluster's network, and Open MPI does not use UCX for
    windows.
options:
  interface:
    description: The host's interface on the cluster's network.
    type: str
    required: true
  root:
    description: Folder in which the kernel shows the adapters.
    type: path
    default: /sys/class/infiniband
"""

ACTIVE = "4: ACTIVE"
INFINIBAND = "InfiniBand"
ETHERNET = "Ethernet"
ROCE_V2 = "RoCE v2"
IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"


class Port(NamedTuple):
    """A port of a network adapter that is up.

    rate: in Gbit/s. gid_index: index of the GID with its IPv4 address under RoCE v2, None without
        RoCE.
    """

    device: str
    number: int
    link_layer: str
    rate: float
    interfaces: tuple[str, ...] = ()
    gid_index: int | None = None

    @property
    def name(self) -> str:
        """The port's name for UCX and NCCL, such as mlx5_0:1."""
        return f"{self.device}:{self.number}"

    def __str__(self) -> str:
        return f"{self.name} {self.link_layer} {self.rate:g} Gbit/s"


def read(path: Path) -> str:
    """Return the text of a file in sysfs; "" if it can't be read, such as the file of an unused
    GID.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def ports(root: Path, interface: str) -> Iterator[Port]:
    """Yield the ports in ``root`` that are up. interface: the network interface for RoCE."""
    for folder in sorted(
        root.glob("*/ports/*"), key=lambda path: (path.parent.parent.name, path.name)
    ):
        if read(folder / "state") != ACTIVE:
            continue
        words = read(folder / "rate").split()
        yield Port(
            device=folder.parent.parent.name,
            number=int(folder.name),
            link_layer=read(folder / "link_layer"),
            rate=float(words[0]) if words else 0.0,
            interfaces=tuple(
                sorted({read(path) for path in folder.glob("gid_attrs/ndevs/*")} - {""})
            ),
            gid_index=roce_index(folder, interface),
        )


def roce_index(port: Path, interface: str) -> int | None:
    """Return the index of the interface's IPv4 address for RoCE v2 in a port's GID table. None: no
    index.
    """
    for index in sorted(int(path.name) for path in port.glob("gids/*")):
        attributes = port / "gid_attrs"
        is_ours = read(attributes / "ndevs" / str(index)) == interface
        is_v2 = read(attributes / "types" / str(index)) == ROCE_V2
        if is_ours and is_v2 and read(port / "gids" / str(index)).startswith(IPV4_MAPPED):
            return index
    return None


def ports_for_jobs(active: Iterable[Port], interface: str) -> list[Port]:
    """Return the fastest InfiniBand ports; without InfiniBand, the fastest RoCE ports of
    ``interface``.
    """
    every = list(active)
    fast = [port for port in every if port.link_layer == INFINIBAND]
    if not fast:
        fast = [
            port for port in every if port.link_layer == ETHERNET and interface in port.interfaces
        ]
    best = max((port.rate for port in fast), default=0.0)
    return [port for port in fast if port.rate == best]


def variables(chosen: list[Port], interface: str) -> dict[str, str]:
    """Return the environment variables for jobs. In NCCL_IB_HCA, `=` means exact names, not
    prefixes.
    """
    if not chosen:
        # Open MPI reports an error for each window if it tries UCX for windows without a fast
        # network.
        return {"UCX_NET_DEVICES": interface, "OMPI_MCA_osc": "^ucx"}
    names = ",".join(port.name for port in chosen)
    indices = {port.gid_index for port in chosen}
    index = indices.pop() if len(indices) == 1 else None
    return {
        "NCCL_IB_HCA": f"={names}",
        "UCX_NET_DEVICES": names,
        **({"NCCL_IB_GID_INDEX": str(index)} if index is not None else {}),
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "interface": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/sys/class/infiniband"},
        },
        supports_check_mode=True,
    )
    interface = module.params["interface"]
    active = list(ports(Path(module.params["root"]), interface))
    module.exit_json(
        changed=False,
        variables=variables(ports_for_jobs(active, interface), interface),
        ports=[str(port) for port in active],
    )


if __name__ == "__main__":
    main()
