"""The helper's record of a cluster, and a helper with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.providers.local.client import Helper, HelperExchange
from clusterctl.providers.local.layout import ClusterState


def a_state(cluster_id: str = "a1b2c3", **differs: Any) -> ClusterState:
    place = {"owner": 0, "workspace": "/w", "image": "0" * 16, "subnet": "10.9.8.0/24"}
    return ClusterState.model_validate({"id": cluster_id, "name": "d", **place, **differs})


def play_helper(
    patch: pytest.MonkeyPatch, result: Mapping[str, Any], *ready: Mapping[str, Any]
) -> list[Any]:
    """Let the helper answer ``ready`` messages, then the result. Return the messages that it gets
    after the request.
    """
    lines = [{"ready": message} for message in ready] + [{"result": result, "goes_on": False}]
    sent: list[Any] = []

    class Played(HelperExchange):
        def send(self, message: object) -> None:
            sent.append(message)

    @contextmanager
    def asking(*_: object) -> Iterator[HelperExchange]:
        stdout = StringIO("".join(json.dumps(line) + "\n" for line in lines))
        yield Played(SimpleNamespace(stdout=stdout), print)  # type: ignore[arg-type]

    patch.setattr(Helper, "asking", asking)
    return sent
