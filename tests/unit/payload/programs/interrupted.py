"""Trains, and lets a signal come at the second look of rank 1: in the evaluation after the first iteration.

mpirun -n 2 python interrupted.py FLAGS-OF-TRAIN
"""

import sys

from payload.checkpoint.saver import StopSignals
from payload.cli.arguments import parse
from payload.cli.report import begin
from payload.comm import make_transport
from payload.training.loop import train


class Late(StopSignals):
    """Signals of which the first look sees none."""

    def __init__(self, rank: int) -> None:
        self._looks = 0
        self._rank = rank

    @property
    def came(self) -> bool:
        self._looks += 1
        return self._rank == 1 and self._looks > 1

    @came.setter
    def came(self, value: bool) -> None:
        """The run tells what other ranks know."""


config = parse(["train", *sys.argv[1:]])
world, device = begin("cpu")
sys.exit(train(config, device, make_transport("mpi", device), Late(world.rank)))
