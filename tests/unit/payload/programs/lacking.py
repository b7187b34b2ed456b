"""Trains by a config file that the last rank does not have."""

import os
import sys
from pathlib import Path

from payload.__main__ import main

lacks = os.environ["OMPI_COMM_WORLD_RANK"] == str(int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1)
file = Path(sys.argv[1])
if not lacks:
    file = file.with_name("mine.toml")
    file.write_text("[batch]\niterations = 2\n")
sys.exit(main(["train", "--config", str(file), "--out", str(file.parent)]))
