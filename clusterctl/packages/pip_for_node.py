"""A wrapper of pip that evaluates markers for a node. Usage: python -P THIS_FILE PYTHON ARCH
PIP_ARGUMENT...

pip has options to select wheels for another Python version, but evaluates markers such as
`; python_version < "3.12"` for the Python that runs it. This file imports nothing of clusterctl.
"""

from __future__ import annotations

import runpy
import sys

from pip._vendor.packaging import markers


def answer_for(python: str, arch: str) -> None:
    """Make pip evaluate markers for CPython ``python`` on Linux ``arch``."""
    node = markers.default_environment()
    # The node's patch level is unknown.
    if node["python_version"] != python:
        node["implementation_version"] = node["python_full_version"] = f"{python}.0"
    node["python_version"] = python
    node["implementation_name"] = "cpython"
    node["platform_python_implementation"] = "CPython"
    node["os_name"] = "posix"
    node["sys_platform"] = "linux"
    node["platform_system"] = "Linux"
    node["platform_machine"] = arch
    markers.default_environment = node.copy


if __name__ == "__main__":
    answer_for(*sys.argv[1:3])
    sys.argv[:3] = ["pip"]
    runpy.run_module("pip", run_name="__main__")
