"""Trains, and sends a rank a signal when it calls a function for the n-th time, always at the same
moment.

mpirun -n 2 python signalled.py SIGNAL RANK FUNCTION N FLAGS-OF-TRAIN

FUNCTION is a qualified name, such as Loader.held_out; each batch of a generator is a call. ``any``:
of all functions that the training calls in its main thread. N = 0: no signal. Rank 0 writes the
number of calls.
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
        self.calls = 0
        self._trains = False
        self._number = number
        self._rank = rank
        self._function = function
        self._n = n
        self._thread = threading.current_thread()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        name = frame.f_code.co_qualname
        self._trains |= name == "train"
        is_any = self._trains and threading.current_thread() is self._thread
        if name == self._function or (self._function == "any" and is_any):
            self.calls += 1
            if self.calls == self._n and world_rank() == self._rank:
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
if world_rank() == 0:
    sys.stdout.write(f"calls {moment.calls}\n")
sys.exit(code)
