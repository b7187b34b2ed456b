"""The ports of a host's fast network (InfiniBand, RoCE), and the variables by which jobs use them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import BaseModel, ConfigDict

INFINIBAND = "InfiniBand"
ETHERNET = "Ethernet"


class FabricPort(BaseModel):
    """A port of a network adapter that is up.

    name: for UCX and NCCL, such as mlx5_0:1. layer: its link layer. rate: in Gbit/s.
    interfaces: its network interfaces. gids: interface -> index of the interface's IPv4 address for
        RoCE v2 in the port's table of GIDs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    layer: str
    rate: float
    interfaces: tuple[str, ...] = ()
    gids: Mapping[str, int] = {}


def job_variables(ports: Collection[FabricPort], interface: str) -> dict[str, str]:
    """Return the environment variables of jobs. In NCCL_IB_HCA, `=` means exact names, not
    prefixes.

    interface: the host's on the cluster's network. Without ports for jobs, UCX uses it.
    """
    chosen = _for_jobs(ports, interface)
    if not chosen:
        # Open MPI reports an error for each window if it tries UCX for windows without a fast
        # network.
        return {"UCX_NET_DEVICES": interface, "OMPI_MCA_osc": "^ucx"}
    names = ",".join(port.name for port in chosen)
    indices = {port.gids.get(interface) for port in chosen}
    index = indices.pop() if len(indices) == 1 else None
    return {
        "NCCL_IB_HCA": f"={names}",
        "UCX_NET_DEVICES": names,
        **({"NCCL_IB_GID_INDEX": str(index)} if index is not None else {}),
    }


def _for_jobs(ports: Collection[FabricPort], interface: str) -> list[FabricPort]:
    """Return the fastest InfiniBand ports; without InfiniBand, the fastest RoCE ports of
    ``interface``.
    """
    fast = [port for port in ports if port.layer == INFINIBAND] or [
        port for port in ports if port.layer == ETHERNET and interface in port.interfaces
    ]
    best = max((port.rate for port in fast), default=0.0)
    return [port for port in fast if port.rate == best]
