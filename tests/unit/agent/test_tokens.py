"""Tokens of dry runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.journal import CallBound
from clusterctl.agent.tokens import VALID_S, PlannedCall, Tokens
from tests.support.messages import refused

ARGUMENTS: dict[str, Any] = {"job": "train.py", "nodes": 2, "args": ["--lr", "0.1"]}
PLANNED = PlannedCall(
    "submit", ARGUMENTS, "/p", "demo a12345", "d1", CallBound(1, 2.0, None), ("",)
)


def test_token_gives_its_call_once(tmp_path: Path) -> None:
    token = Tokens(tmp_path).give(PLANNED)
    # Another server takes it.
    assert Tokens(tmp_path).take(token, "submit", dict(ARGUMENTS), "/p") == PLANNED
    with refused("agent-token-used"):
        Tokens(tmp_path).take(token, "submit", ARGUMENTS, "/p")


@pytest.mark.parametrize(
    ("verb", "arguments", "project"),
    [
        ("down", ARGUMENTS, "/p"),
        ("submit", {**ARGUMENTS, "nodes": 3}, "/p"),
        ("submit", {**ARGUMENTS, "nodes": "2"}, "/p"),
        ("submit", {**ARGUMENTS, "nodes": True}, "/p"),
        ("submit", {"job": "train.py"}, "/p"),
        ("submit", ARGUMENTS, "/other"),
    ],
)
def test_token_of_another_call_is_refused_and_stays_valid(
    tmp_path: Path, verb: str, arguments: dict[str, Any], project: str
) -> None:
    tokens = Tokens(tmp_path)
    token = tokens.give(PLANNED)
    with refused("agent-token-other"):
        tokens.take(token, verb, arguments, project)
    assert tokens.take(token, "submit", ARGUMENTS, "/p") == PLANNED


@pytest.mark.parametrize("token", ["", "x", "../../etc/passwd", "\0", "\udc80", "a" * 100_000])
def test_token_that_nobody_gave_is_refused(tmp_path: Path, token: str) -> None:
    Tokens(tmp_path).give(PLANNED)
    with refused("agent-token-unknown"):
        Tokens(tmp_path).take(token, "submit", ARGUMENTS, "/p")


def test_token_expires(tmp_path: Path) -> None:
    token = Tokens(tmp_path).give(PLANNED)
    (path,) = (tmp_path / "tokens").iterdir()
    row = json.loads(path.read_text())
    assert 0 < row["expires"] - time.time() <= VALID_S
    path.write_text(json.dumps({**row, "expires": time.time() - 1}))
    with refused("agent-token-expired"):
        Tokens(tmp_path).take(token, "submit", ARGUMENTS, "/p")


def test_token_is_nowhere_on_disk(tmp_path: Path) -> None:
    """Who reads the state folder must not be able to carry out a call."""
    token = Tokens(tmp_path).give(PLANNED)
    for path in tmp_path.rglob("*"):
        assert token not in path.name
        assert path.is_dir() or token not in path.read_text()


def test_token_files_are_removed_in_the_end(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    tokens.give(PLANNED)
    (path,) = (tmp_path / "tokens").iterdir()
    os.utime(path, (1, 1))
    tokens.give(PLANNED)
    assert path not in (tmp_path / "tokens").iterdir()
