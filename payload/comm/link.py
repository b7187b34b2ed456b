"""The bandwidth between two hosts with ports of InfiniBand or RoCE, and whether MPI used the ports.

The kernel counts the bytes of each port, so that this says what happened, whatever MPI chose.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from payload.comm.world import MPI

ADAPTERS = Path("/sys/class/infiniband")
# Programs use adapters by these files. A local node lacks them, but shows its host's adapters.
_VERBS = Path("/dev/infiniband")
_ACTIVE = "4: ACTIVE"
_MESSAGE_BYTES = 8 << 20
_MESSAGES = 16
# The unit of port_xmit_data, in bytes.
_WORD = 4
# Part of the bytes that must have left by a port. Adapters of Omni-Path count larger words.
_PART = 4


def measure(
    comm: MPI.Intracomm, hosts: Sequence[str], root: Path = ADAPTERS, verbs: Path = _VERBS
) -> dict[str, Any]:
    """Send messages from rank 0 to the first rank on another host, if both have ports that are up.

    All ranks call this. hosts: of all ranks. root: folder in which the kernel shows the adapters.
    verbs: folder of the devices by which programs use them.
    Return, on all ranks: hosts; gb_per_s: 10^9 bytes per second; port: the port that sent the
    bytes, with its kind, or "" if no port did. Return {} if nothing was measured.
    """
    before = sent_by_port(root) if verbs.is_dir() else {}
    receiver = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 0)
    if not receiver or not all(comm.allgather(bool(before) or comm.rank not in {0, receiver})):
        return {}
    message = array("B", bytes(_MESSAGE_BYTES))
    found: dict[str, Any] = {}
    if comm.rank == receiver:
        for _ in range(_MESSAGES + 1):
            comm.Recv(message, source=0)
        comm.send(None, dest=0)
    elif comm.rank == 0:
        comm.Send(message, dest=receiver)
        started = time.perf_counter()
        for _ in range(_MESSAGES):
            comm.Send(message, dest=receiver)
        comm.recv(source=receiver)
        seconds = time.perf_counter() - started
        found = {
            "hosts": [hosts[0], hosts[receiver]],
            "gb_per_s": round(_MESSAGES * _MESSAGE_BYTES / seconds / 1e9, 3),
            "port": busiest(before, sent_by_port(root), _MESSAGES * _MESSAGE_BYTES),
        }
    return comm.bcast(found)


def sent_by_port(root: Path) -> dict[str, int]:
    """Return port, such as `mlx5_0:1 InfiniBand` -> bytes that it has sent, for ports that are
    up.
    """
    found = {}
    for folder in root.glob("*/ports/*"):
        # A port may vanish, and some adapters have no counters.
        with suppress(OSError, ValueError):
            if (folder / "state").read_text().strip() == _ACTIVE:
                kind = (folder / "link_layer").read_text().strip()
                words = int((folder / "counters/port_xmit_data").read_text())
                name = f"{folder.parent.parent.name}:{folder.name}"
                found[f"{name} {'RoCE' if kind == 'Ethernet' else kind}"] = _WORD * words
    return found


def busiest(before: Mapping[str, int], after: Mapping[str, int], sent: int) -> str:
    """Return the port that sent most, "" if all ports together sent too little for ``sent``
    bytes.
    """
    grown = {port: after.get(port, 0) - bytes_before for port, bytes_before in before.items()}
    return max(grown, key=lambda port: grown[port]) if sum(grown.values()) >= sent / _PART else ""
