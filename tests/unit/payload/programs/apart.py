"""Trains with a folder for checkpoints that is another one on each rank."""

import os
import sys

from payload.__main__ import main

own = f"{sys.argv[1]}/{os.environ['OMPI_COMM_WORLD_RANK']}"
sys.exit(main(["train", "--save-interval", "1", "--checkpoints", own, "--out", sys.argv[1]]))
