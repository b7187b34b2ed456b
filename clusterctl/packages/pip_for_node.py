"""A wrapper of pip that evaluates markers for a node. Usage: python -P THIS_FILE MARKERS
PIP_ARGUMENT...

pip has options to select wheels for another Python version, but evaluates markers such as
`; python_version < "3.12"` for the Python that runs it. MARKERS: their values on the node, as JSON.
pip also prints which pages of an index it can't read, and which archives of sources it may not use,
which it otherwise tells only with `-vv`.
This file imports nothing of clusterctl.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys

# Makes the loggers of pip, which have a level more than others.
import pip._internal  # noqa: F401
from pip._vendor.packaging import markers


def answer_for(values: str) -> None:
    """Make pip evaluate markers with these values (JSON), and print the pages that it can't read
    and the sources that it may not use.
    """
    markers.default_environment = json.loads(values).copy
    for name in ("collector", "package_finder"):
        logger = logging.getLogger(f"pip._internal.index.{name}")
        logger.setLevel(logging.DEBUG)
        logger.addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    if record.getMessage().startswith(("Could not fetch URL", "Skipping link: No sources")):
        record.levelno = max(record.levelno, logging.INFO)
    return record.levelno >= logging.INFO


if __name__ == "__main__":
    answer_for(sys.argv[1])
    sys.argv[:2] = ["pip"]
    runpy.run_module("pip", run_name="__main__")
