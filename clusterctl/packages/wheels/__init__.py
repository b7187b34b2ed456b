"""Wheels for the nodes: resolved and downloaded on the user's machine, so that nodes need no internet."""

from clusterctl.packages.wheels.lock import Lock, Wheel
from clusterctl.packages.wheels.node import Node
from clusterctl.packages.wheels.requirements import content
from clusterctl.packages.wheels.resolve import Question, plant, resolve, resolved, wheel_path
from clusterctl.packages.wheels.wheelhouse import filled, is_there, unwritable, wheelhouse

__all__ = [
    "Lock",
    "Node",
    "Question",
    "Wheel",
    "content",
    "filled",
    "is_there",
    "plant",
    "resolve",
    "resolved",
    "unwritable",
    "wheel_path",
    "wheelhouse",
]
