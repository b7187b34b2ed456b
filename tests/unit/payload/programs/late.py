"""A wrong command line on all ranks, of which rank 0 is the last to start."""

import os
import sys
import time

from payload.__main__ import main

if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    time.sleep(1.5)
sys.exit(main(["train", "--lr", "fast"]))
