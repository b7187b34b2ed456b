"""A cluster of two machines with GPUs, for what needs no machine to be shown."""

from __future__ import annotations

from clusterctl.state.inventory import CONTROLLER
from tests.support.inventories import host_of, inventory_of

CTL, ONE, TWO = "head", "gpu01", "gpu02"
INVENTORY = inventory_of(
    provider="onprem",
    hosts=(
        host_of(CTL, CONTROLLER, address="10.0.0.2"),
        host_of(ONE, partition="train"),
        host_of(TWO, partition="train", address="10.0.0.4"),
    ),
    baked=False,
)
