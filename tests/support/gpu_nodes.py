"""A cluster of two machines with GPUs, for what needs no machine to be shown."""

from __future__ import annotations

from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory

CTL, ONE, TWO = "head", "gpu01", "gpu02"
INVENTORY = Inventory(
    cluster="d",
    cluster_id="a1b2c3",
    provider="onprem",
    hosts=(
        Host(name=CTL, address="10.0.0.2", roles=(CONTROLLER,), host_key="k"),
        Host(name=ONE, address="10.0.0.3", roles=(COMPUTE,), partition="train", host_key="k"),
        Host(name=TWO, address="10.0.0.4", roles=(COMPUTE,), partition="train", host_key="k"),
    ),
    network="10.0.0.0/24",
    shared="/shared",
    baked=False,
)
