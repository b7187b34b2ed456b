"""Measures the link between the first rank and the last, as if these were on different hosts.

Arguments: a folder as the kernel's of adapters; `port` if each message is counted at the port of
the sender, as an adapter does; the folder of the devices.
"""

import json
import sys
from pathlib import Path
from typing import Any

from payload.comm import mpi
from payload.comm.link import measure
from payload.comm.world import MPI

root = Path(sys.argv[1])
counter = root / "mlx5_0/ports/1/counters/port_xmit_data"


class Counting(MPI.Intracomm):
    def Send(self, buf: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        super().Send(buf, *args, **kwargs)
        if sys.argv[2] == "port":
            counter.write_text(str(int(counter.read_text()) + len(buf) // 4))


mpi.start()
comm = Counting(MPI.COMM_WORLD)
found = measure(comm, [*["here"] * (comm.size - 1), "there"], root, Path(sys.argv[3]))
if comm.rank == 0:
    sys.stdout.write(json.dumps(found))
