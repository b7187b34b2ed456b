"""pip, whose environment markers are those of a node: python -P THIS_FILE PYTHON ARCH PIP_ARGUMENT...

pip takes another Python's version for the names of wheels, but evaluates `; python_version < "3.12"` for the
one that it runs on, and has no option for it. This file imports nothing of clusterctl.
"""

from __future__ import annotations

import runpy
import sys

from pip._vendor.packaging import markers


def answer_for(python: str, arch: str) -> None:
    """Let markers be evaluated for CPython ``python`` on Linux ``arch``."""
    node = markers.default_environment()
    if node["python_version"] != python:  # else the patch level of this one is as good as any
        node["implementation_version"] = node["python_full_version"] = f"{python}.0"
    node["python_version"] = python
    node["implementation_name"], node["platform_python_implementation"] = "cpython", "CPython"
    node["os_name"], node["sys_platform"], node["platform_system"] = "posix", "linux", "Linux"
    node["platform_machine"] = arch
    markers.default_environment = node.copy


if __name__ == "__main__":
    answer_for(*sys.argv[1:3])
    sys.argv[:3] = ["pip"]
    runpy.run_module("pip", run_name="__main__")
