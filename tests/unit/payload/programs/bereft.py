"""Trains with checkpoints, and kills the writer of the last rank along the way."""

import os
import signal
import sys
from pathlib import Path

from payload.__main__ import main
from payload.checkpoint.saver import Saver

_written = Saver.written


def written(saver: Saver) -> bool:
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
    return _written(saver)


Saver.written = written  # type: ignore[method-assign]
sys.exit(main(["train", "--save-interval", "2", "--out", sys.argv[1]]))
