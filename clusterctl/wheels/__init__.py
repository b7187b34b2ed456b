"""Wheels for the nodes: resolved and downloaded on the user's machine, so that nodes need no internet."""

from clusterctl.wheels.house import filled, is_there, unwritable, wheelhouse
from clusterctl.wheels.lock import Lock, Wheel
from clusterctl.wheels.node import Node
from clusterctl.wheels.requirements import content
from clusterctl.wheels.resolve import Question, plant, resolve, resolved, wheel_path

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
