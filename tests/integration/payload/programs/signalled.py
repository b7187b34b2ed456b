"""Trains, and sends a rank a signal when it calls a function for the n-th time, always at the same
moment.

mpirun -n 2 python signalled.py SIGNAL RANK FUNCTION N FLAGS-OF-TRAIN

FUNCTION is a qualified name, such as Loader.held_out; each batch of a generator is a call.
"""

import os
import signal
import sys
import threading
from types import FrameType

from payload.__main__ import main
from payload.comm.world import world_rank


class Moment:
    """A profiler that counts calls, and sends the signal."""

    def __init__(self, number: signal.Signals, rank: int, function: str, n: int) -> None:
        self._calls = 0
        self._number = number
        self._rank = rank
        self._function = function
        self._n = n

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code.co_qualname == self._function:
            self._calls += 1
            if self._calls == self._n and world_rank() == self._rank:
                os.kill(os.getpid(), self._number)


number, rank, function, n, *flags = sys.argv[1:]
moment = Moment(signal.Signals[number], int(rank), function, int(n))
handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
threading.setprofile(moment)
sys.setprofile(moment)
sys.argv[1:] = ["train", *flags]
try:
    code = main(["train", *flags])
finally:
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    for each, handler in handlers.items():
        signal.signal(each, handler)
sys.exit(code)
