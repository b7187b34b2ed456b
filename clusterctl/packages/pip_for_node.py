"""A wrapper of pip that evaluates markers for a node. Usage: python -P THIS_FILE MARKERS
PIP_ARGUMENT...

pip has options to select wheels for another Python version, but evaluates markers such as
`; python_version < "3.12"` for the Python that runs it. MARKERS: their values on the node, as JSON.
This file imports nothing of clusterctl.
"""

from __future__ import annotations

import json
import runpy
import sys

from pip._vendor.packaging import markers


def answer_for(values: str) -> None:
    """Make pip evaluate markers with these values (JSON)."""
    markers.default_environment = json.loads(values).copy


if __name__ == "__main__":
    answer_for(sys.argv[1])
    sys.argv[:2] = ["pip"]
    runpy.run_module("pip", run_name="__main__")
