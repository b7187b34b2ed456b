"""Training over MPI, on all ranks that the launcher started."""

from __future__ import annotations

from contextlib import nullcontext

from payload.checkpoint.saver import StopSignals
from payload.cli.arguments import check
from payload.cli.config import TrainConfig
from payload.cli.report import begin
from payload.comm import make_transport
from payload.training.loop import train


def run(config: TrainConfig) -> int:
    """Train on all ranks, and return the exit code."""
    # Catch signals from the start, because loading takes a while.
    with nullcontext() if config.batch.find else StopSignals() as signals:
        world, device = begin(config.run.device, config.precision)
        layout = config.layout
        check(config, several=world.size > layout.tp * layout.pp, gpu=device.gpu is not None)
        transport = make_transport(layout.comm, device, cuda_aware=layout.cuda_aware)
        return train(config, device, transport, signals)
