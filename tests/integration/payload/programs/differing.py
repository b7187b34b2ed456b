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
from payload.device.base import Cpu
from payload.errors import UsageError

mpi.start()
world = mpi.MpiCommunicator(Cpu())
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
    said = complaint(data, model)
    assert said.startswith(f"data-differs-on-nodes: --data: {data} "), said
    assert all(value in said for value in (" on node-0, ", " on node-1;")), said
    assert len(set(world.allgather(said))) == 1
assert all(value in said for value in ("2560 bytes", "5120 bytes")), said
assert not complaint("digits", "mlp")
assert not complaint(f"text:{Path(sys.argv[1]) / '0' / 'text'}", "gpt-tiny")
