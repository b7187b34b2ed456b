"""Opens data that is not the same on all of two nodes, each of which a rank stands for, and some
that is.
"""

import os
import sys
from pathlib import Path

from payload.cli.arguments import parse
from payload.cli.config import TrainConfig
from payload.comm import mpi
from payload.data import datasets
from payload.device.base import CpuDevice
from payload.errors import UsageError

mpi.start()
world = mpi.MpiCommunicator(CpuDevice())
host = f"node-{world.rank}"
datasets.hostname = lambda: host  # type: ignore[attr-defined]
os.chdir(Path(sys.argv[1]) / str(world.rank))


def complaint(data: str, model: str) -> str:
    config = parse(["train", "--data", data, "--model", model, "--sequence-length", "8"])
    assert isinstance(config, TrainConfig)
    try:
        datasets.open_dataset(config, world)
    except UsageError as exc:
        return f"{exc.code}: {exc}"
    return ""


for data, model in (("idx:.", "mlp"), ("text:text", "gpt-tiny"), ("text:longer", "bert-tiny")):
    complaint_text = complaint(data, model)
    assert complaint_text.startswith(f"data-differs-on-nodes: --data: {data} "), complaint_text
    assert all(value in complaint_text for value in (" on node-0, ", " on node-1;")), complaint_text
    assert len(set(world.allgather(complaint_text))) == 1
assert all(value in complaint_text for value in ("2560 bytes", "5120 bytes")), complaint_text
assert not complaint("digits", "mlp")
assert not complaint(f"text:{Path(sys.argv[1]) / '0' / 'text'}", "gpt-tiny")
