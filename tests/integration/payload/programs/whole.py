"""Writes small models in layouts, as they begin and after some training, each into a folder of its
own.

mpirun -n 2 python whole.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from payload.comm import mpi
from payload.comm.world import local_rank
from payload.device import choose
from payload.device.base import Device
from payload.parallel.mesh import Mesh, make_mesh
from payload.saved_model.record import ModelRecord
from payload.saved_model.writer import ModelWriter
from tests.integration.payload.programs.layouts import SMALL, Case, make_engine, steps

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"bucket_bytes": SMALL},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "zero": {"zero": 3, "bucket_bytes": SMALL},
}
"""On two ranks."""

CASES = {
    (model, layout): Case(model, **LAYOUTS[layout])
    for model in ("gpt", "bert", "vit", "lstm", "resnet", "tied")
    for layout in LAYOUTS
    if layout != "tp" or model not in ("resnet", "tied")
}
ITERATIONS = 3
MOMENTS = ("begun", "trained")


def write(folder: Path, case: Case, mesh: Mesh, device: Device) -> None:
    """Into ``begun`` and ``trained``."""
    engine, units = make_engine(case, mesh, device)
    record = ModelRecord(case.model, {}, {}, 0, None)
    for moment in MOMENTS:
        if moment == "trained":
            steps(case, engine, ITERATIONS)
        ModelWriter(folder / moment, record, engine, units).write(1)


def main() -> None:
    mpi.start()
    device = choose("auto", local_rank())
    world = mpi.MpiCommunicator(device)
    for (model, layout), case in CASES.items():
        mesh = make_mesh(world, tp=case.tp, pp=case.pp)
        write(Path(sys.argv[1]) / f"{model}-{layout}", case, mesh, device)


if __name__ == "__main__":
    main()
