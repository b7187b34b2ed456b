"""Wheels for the nodes: resolved and downloaded on the user's machine, so that nodes need no internet."""

from clusterctl.wheels.house import wheelhouse
from clusterctl.wheels.lock import Lock, Wheel
from clusterctl.wheels.node import NODE_PYTHON
from clusterctl.wheels.resolve import Question, resolve, resolved, wheel_path

__all__ = [
    "NODE_PYTHON",
    "Lock",
    "Question",
    "Wheel",
    "resolve",
    "resolved",
    "wheel_path",
    "wheelhouse",
]
